"""A client and a worker that use only the commands of the GearMonkey specification, without code of this package."""

import threading
import time

DUE = (
    "local item = redis.call('ZRANGEBYSCORE', KEYS[1], 0, ARGV[1], 'LIMIT', 0, 1); if (#item > 0) then "
    "redis.call('ZREM', KEYS[1], item[1]); return { KEYS[1],  item[1] }; end"
)


class NaiveClient:
    def __init__(self, redis):
        self.redis = redis

    def run(self, fn, input, prio="normal", *, blocking=False, rollcall=False, timeout=0, scheduled=None):
        if rollcall and int(self.redis.get(f"count:{fn}") or 0) < 1:
            raise LookupError(fn)
        id = self.redis.incr(f"uid:{fn}")
        self.redis.execute_command("HMSET", f"job:{fn}:{id}", "status", "idle", "input", input)
        self.redis.publish(f"channel:{fn}", f"create:{id}")
        if prio == "scheduled":
            self.redis.zadd(f"queue:{fn}:{prio}", {id: scheduled})
        else:
            self.redis.lpush(f"queue:{fn}:{prio}", id)
        if blocking:
            self.answer = self.redis.brpop(f"lock:{fn}:{id}", timeout)
        return id

    def get(self, fn, id):
        return self.redis.hgetall(f"job:{fn}:{id}")


class NaiveWorker:
    """`work` takes bytes and returns text, or raises; if `drops` returns True, the worker dies with the popped job."""

    def __init__(self, redis, fn, work, drops=lambda id: False):
        self.redis, self.fn, self.work, self.drops = redis, fn, work, drops
        self.dropped = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self):
        self.start()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopping.set()
        self._thread.join(60)

    def start(self):
        self.sha1 = self.redis.script_load(DUE)
        self.redis.incr(f"count:{self.fn}")

    def exit(self):
        self.redis.decr(f"count:{self.fn}")

    def run(self):
        while not self._stopping.is_set():
            id = self.pop()
            if id is not None:
                self.execute(id)
        self.exit()

    def pop(self, timeout=1):
        fn = self.fn
        item = self.redis.evalsha(self.sha1, 1, f"queue:{fn}:scheduled", int(time.time()))
        if item is None:
            item = self.redis.brpop([f"queue:{fn}:high", f"queue:{fn}:normal", f"queue:{fn}:low"], timeout)
        return item and int(item[1])

    def execute(self, id):
        if self.drops(id):
            self.dropped.append(id)
            return
        fn = self.fn
        self.redis.publish(f"channel:{fn}", f"start:{id}")
        self.redis.execute_command("HMSET", f"job:{fn}:{id}", "status", "busy")
        try:
            status, output = "success", self.work(self.redis.hget(f"job:{fn}:{id}", "input"))
        except Exception as error:  # noqa: BLE001
            status, output = "error", f"{type(error).__name__}: {error}"
        self.redis.execute_command("HMSET", f"job:{fn}:{id}", "status", status, "output", output)
        self.redis.expire(f"job:{fn}:{id}", 90000)
        self.redis.publish(f"channel:{fn}", f"finish:{id}")
        self.redis.lpush(f"lock:{fn}:{id}", "OK")
        self.redis.expire(f"lock:{fn}:{id}", 10)
