"""Record what a real Faktory leaves in its Redis: `python -m tests.contrib.transfer.record /path/to/faktory 1.10.0`.

Writes tests/transfer/faktory-1.10.0.json, one member per key: its type and its contents. Only for new releases.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from redis import Redis

from tests.contrib.gearmonkey.servers import free_port
from tests.server.raw import RawClient, worker
from tests.waiting import wait_until

FOLDER = Path(__file__).parent
FAR = "2090-01-01T00:00:00.123456Z"


def job(jid, queue="default", **fields):
    return {"jid": f"jid-{jid}".ljust(8, "-"), "jobtype": "shop.tasks.send", "queue": queue, "args": [1, "ü"], **fields}


def scenario(client):
    """Push a job of each kind, and several jobs to a queue to record their order."""

    def send(verb, payload):
        text = payload if isinstance(payload, str) else json.dumps(payload)
        return client.ask(f"{verb} {text}")

    send("PUSHB", [job(f"mail{n}", "mail", custom={"trace": n}) for n in range(5)])
    send("PUSH", job("default", retry=3, reserve_for=90))
    send("PUSH", job("later", at=FAR))
    send("PUSH", job("held", "halted"))
    send("QUEUE", "PAUSE halted")
    for jid, retry in (("retry", 25), ("dead", -1), ("again", 25), ("working", 25)):
        send("PUSH", job(jid, "work", retry=retry))
        assert send("FETCH", "work")
        if jid != "working":
            failure = {
                "jid": f"jid-{jid}".ljust(8, "-"),
                "errtype": "OSError",
                "message": "no",
                "backtrace": ["a", "b"],
            }
            send("FAIL", failure)
    send("MUTATE", '{"cmd":"requeue","target":"retries","filter":{"jids":["jid-again"]}}')
    send("PUSH", job("done", "work2"))
    send("FETCH", "work2")
    send("ACK", {"jid": "jid-done"})


def contents(redis):
    """Return all contents of Redis in a form that JSON can represent."""
    read = {
        "list": lambda key: [raw.decode() for raw in redis.lrange(key, 0, -1)],
        "set": lambda key: sorted(name.decode() for name in redis.smembers(key)),
        "zset": lambda key: [[raw.decode(), score] for raw, score in redis.zrange(key, 0, -1, withscores=True)],
        "string": lambda key: redis.get(key).decode(),
    }
    kinds = {key.decode(): redis.type(key).decode() for key in sorted(redis.keys())}
    return {key: [kind, read[kind](key)] for key, kind in kinds.items()}


def connected(port):
    with contextlib.suppress(OSError):
        return RawClient.identified(("127.0.0.1", port), **worker())


def main(program, release):
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = [program, "-b", f"127.0.0.1:{port}", "-w", ":0", "-d", folder]
        server = subprocess.Popen(command)
        try:
            client = wait_until(lambda: connected(port), what="a Faktory that answers")
            scenario(client)
            found = contents(Redis(unix_socket_path=f"{folder}/redis.sock"))
        finally:
            server.terminate()
            server.wait(60)
    text = json.dumps(found, ensure_ascii=False, indent=1)
    (FOLDER / f"faktory-{release}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
