"""The Lua scripts and key names of GearMonkey. Data never becomes part of a script's text.

Knows no connection. The first write of each script is either one that Redis refuses when out of memory, or one it never
refuses: after the first write Redis lets the script finish, so that no script stops half done.
"""

from __future__ import annotations

import hashlib

DUE = (
    "local item = redis.call('ZRANGEBYSCORE', KEYS[1], 0, ARGV[1], 'LIMIT', 0, 1); if (#item > 0) then "
    "redis.call('ZREM', KEYS[1], item[1]); return { KEYS[1],  item[1] }; end"
)
"""The specification's script, byte for byte. The two spaces before the last item matter for its digest."""

DUE_SHA1 = "5231827cd49b540660ef44969b38cc858f157824"
"""Digest that `SCRIPT LOAD` returns according to the specification."""


class Script:
    """Text of a script and its digest. `requests` and `redis_worker` send it."""

    def __init__(self, text: str) -> None:
        self.text = text
        # Updated by `RedisWorker.open` with the digest that the server reports.
        self.digest = hashlib.sha1(text.encode()).hexdigest()  # noqa: S324  (Redis identifies scripts by their SHA-1)


# pcall where a peer's key may have another type: an error there must not stop the script half done. The specification
# sets both times to live; 90000 is JOB_TTL_S of `protocol`.
_ENDING = """
local function settle(fn, id, status, output)
  local job, lock = 'job:' .. fn .. ':' .. id, 'lock:' .. fn .. ':' .. id
  local kind = redis.call('TYPE', job).ok
  if kind == 'hash' or kind == 'none' then
    redis.call('HSET', job, 'status', status, 'output', output)
    redis.call('EXPIRE', job, 90000)
  end
  redis.call('PUBLISH', 'channel:' .. fn, 'finish:' .. id)
  redis.pcall('LPUSH', lock, 'OK')
  redis.call('EXPIRE', lock, 10)
end
local function status_of(fn, id)
  local job = 'job:' .. fn .. ':' .. id
  if redis.call('TYPE', job).ok ~= 'hash' then return nil end
  return redis.call('HGET', job, 'status') or ''
end
local function is_final(status) return status == 'success' or status == 'error' end
"""

_CLOCK = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
"""

_REAPING = """
local function leave()
  local count = tonumber(redis.call('GET', KEYS[2]) or '') or 0
  if count > 0 then redis.pcall('DECR', KEYS[2]) end
end
for _, wid in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do
  redis.call('ZREM', KEYS[1], wid)
  leave()
end
"""

# One script for what the specification does in several commands; an outside observer sees the same (ADR 0013).
CREATE = Script("""
local kind = redis.call('TYPE', KEYS[2]).ok
if kind ~= 'none' and kind ~= ARGV[4] then
  return redis.error_reply('WRONGTYPE queue ' .. KEYS[2] .. ' is a ' .. kind)
end
local id
for _ = 1, 10000 do
  redis.call('INCR', KEYS[1])
  id = redis.call('GET', KEYS[1])
  if redis.call('EXISTS', 'job:' .. ARGV[1] .. ':' .. id) == 0 then break end
  id = nil
end
if not id then return false end
redis.call('HSET', 'job:' .. ARGV[1] .. ':' .. id, 'status', 'idle', 'input', ARGV[2])
redis.call('DEL', 'lock:' .. ARGV[1] .. ':' .. id)
redis.call('PUBLISH', 'channel:' .. ARGV[1], 'create:' .. id)
if ARGV[4] == 'zset' then redis.call('ZADD', KEYS[2], ARGV[3], id) else redis.call('LPUSH', KEYS[2], id) end
return id
""")
"""KEYS uid, queue; ARGV fn, input, score, "list" or "zset".

Returns the id as text, because Lua numbers are exact only up to 2^53. Returns nil if 10,000 ids of a lost counter are
still in use; the caller repeats the request.
"""

# Reaps first, so that the count is right even if no worker of ours is alive to do it (ADR 0013).
ROLL_CALL = Script(f"""{_CLOCK}{_REAPING}
return redis.call('GET', KEYS[2])
""")
"""KEYS registry, count. Removes our dead workers, then returns the count."""

# ZREM of '' removes nothing. It is a first write that Redis never refuses, so that this script, and each one below that
# begins in the same way, also finishes while Redis is out of memory.
REGISTER = Script(f"""{_CLOCK}
redis.call('ZREM', KEYS[1], '')
{_REAPING}
if redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1]) == 1 then redis.pcall('INCR', KEYS[2]) end
local ours = redis.call('ZCARD', KEYS[1])
if (tonumber(redis.call('GET', KEYS[2]) or '') or 0) < ours then redis.call('SET', KEYS[2], ours) end
return ours
""")
"""KEYS registry, count; ARGV wid, seconds. Returns the number of our workers.

Raises a count below the registry's, so that the count is correct again after FLUSHALL.
"""

# Subtracts only what a registration has added, so that a second call does not lower the count (ADR 0013).
UNREGISTER = Script(f"""{_CLOCK}
redis.call('ZREM', KEYS[1], '')
{_REAPING}
if redis.call('ZREM', KEYS[1], ARGV[1]) == 1 then leave() end
return redis.call('GET', KEYS[2])
""")
"""KEYS registry, count; ARGV wid. Returns the count, never lowered below 0."""

# The ZCARDs write nothing: a lease key of another type fails the script before its first write. `index` is the position
# of a function's lease key, the last of its five keys. `due` is the specification's script unchanged, inside of ours
# (ADR 0013).
RESERVE = Script(f"""{_ENDING}{_CLOCK}
local function due(KEYS, ARGV) {DUE} end
local wid, lease_s, limit, taken, wrong_keys = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), {{}}, {{}}
for index = 5, #KEYS, 5 do redis.call('ZCARD', KEYS[index]) end
local function take(index, origin, id)
  local fn = ARGV[3 + index / 5]
  local status = status_of(fn, id)
  if is_final(status) or redis.call('ZSCORE', KEYS[index], id) then return end
  local job, meta = 'job:' .. fn .. ':' .. id, 'gm:meta:' .. fn .. ':' .. id
  local input = status and redis.call('HGET', job, 'input')
  if not input then
    settle(fn, id, 'error', 'job data missing')
    taken[#taken + 1] = {{ fn, id, 0 }}
    return
  end
  redis.call('ZADD', KEYS[index], string.format('%.6f', now + lease_s), id)
  local attempt = redis.call('HINCRBY', meta, 'attempt', 1)
  redis.call('HSETNX', meta, 'token', wid .. '-' .. clock[1] .. '-' .. clock[2] .. '-' .. #taken)
  redis.call('HSET', meta, 'wid', wid, 'from', origin)
  redis.call('EXPIRE', meta, 90000)
  redis.call('PUBLISH', 'channel:' .. fn, 'start:' .. id)
  redis.call('HSET', job, 'status', 'busy')
  taken[#taken + 1] = {{ fn, id, attempt, input, redis.call('HGET', meta, 'token') }}
end
for index = 5, #KEYS, 5 do
  if #taken < limit then
    local is_queue, item = pcall(due, {{ KEYS[index - 4] }}, {{ clock[1] }})
    if not is_queue then wrong_keys[#wrong_keys + 1] = KEYS[index - 4]
    elseif item then take(index, 'scheduled', item[2]) end
  end
end
for rank, origin in ipairs({{ 'high', 'normal', 'low' }}) do
  for index = 5, #KEYS, 5 do
    while #taken < limit do
      local id = redis.pcall('RPOP', KEYS[index - 4 + rank])
      if type(id) == 'table' then wrong_keys[#wrong_keys + 1] = KEYS[index - 4 + rank] end
      if type(id) ~= 'string' then break end
      take(index, origin, id)
    end
  end
end
return {{ taken, wrong_keys }}
""")
"""KEYS for each function scheduled, high, normal, low, lease; ARGV wid, lease seconds, limit, and the functions.

Returns the jobs as [fn, id, attempt, input, token], with attempt 0 for jobs without data, and the keys that
are not queues.
"""

# wid and attempt fence the job: a worker whose lease expired must not end it. A job that has ended with this output was
# ended by an earlier call whose reply was lost.
FINISH = Script(f"""{_ENDING}
local wid, attempt = unpack(redis.call('HMGET', KEYS[2], 'wid', 'attempt'))
if wid ~= ARGV[3] or attempt ~= ARGV[4] then
  local job = 'job:' .. ARGV[1] .. ':' .. ARGV[2]
  if wid or not is_final(status_of(ARGV[1], ARGV[2])) then return 0 end
  local status, output = unpack(redis.call('HMGET', job, 'status', 'output'))
  return status == ARGV[5] and output == ARGV[6] and 1 or 0
end
local leased = redis.call('ZREM', KEYS[1], ARGV[2]) + redis.call('ZREM', KEYS[3], ARGV[2])
if leased == 0 then return 0 end
redis.call('DEL', KEYS[2])
if is_final(status_of(ARGV[1], ARGV[2])) then return 0 end
settle(ARGV[1], ARGV[2], ARGV[5], ARGV[6])
return 1
""")
"""KEYS lease, meta, held; ARGV fn, id, wid, attempt, status, output.

Returns 1, or 0 for a stale worker or a job that has ended.
"""

UPDATE = Script("""
local wid, attempt = unpack(redis.call('HMGET', KEYS[2], 'wid', 'attempt'))
if wid ~= ARGV[2] or attempt ~= ARGV[3] or not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
redis.call('HSET', KEYS[3], 'status:dividend', ARGV[4], 'status:divisor', ARGV[5])
return 1
""")
"""KEYS lease or held, meta, job; ARGV id, wid, attempt, dividend, divisor. Returns 1, or 0 for a stale worker."""

# RPUSH, as workers pop from the right: the job is next. Score 0: it was due already.
_BACK = """
local function put_back(fn, id, origin)
  local queue = 'queue:' .. fn .. ':' .. origin
  if origin == 'scheduled' then return redis.pcall('ZADD', queue, 0, id) end
  return redis.pcall('RPUSH', queue, id)
end
"""

# No `deaths`: a worker that releases a job is alive.
RELEASE = Script(f"""{_BACK}
local wid, attempt, origin = unpack(redis.call('HMGET', KEYS[2], 'wid', 'attempt', 'from'))
if wid ~= ARGV[3] or attempt ~= ARGV[4] or not redis.call('ZSCORE', KEYS[1], ARGV[2]) then return 0 end
if type(put_back(ARGV[1], ARGV[2], origin)) == 'table' then return 0 end
redis.call('ZREM', KEYS[1], ARGV[2])
redis.call('HDEL', KEYS[2], 'wid')
redis.call('HSET', KEYS[3], 'status', 'idle')
return 1
""")
"""KEYS lease, meta, job; ARGV fn, id, wid, attempt.

Puts the job at the head of its queue, as if it had not been taken. Returns 1, or 0 for a stale worker or a queue key of
another type.
"""

# Only leases that still exist: a job that a sweep put back must not be revived by a late beat.
EXTEND = Script(f"""{_CLOCK}
redis.call('ZREM', KEYS[1], '')
local kept = {{}}
for place = 4, #ARGV, 2 do
  local id, meta = ARGV[place], 'gm:meta:' .. ARGV[1] .. ':' .. ARGV[place]
  local wid, attempt = unpack(redis.call('HMGET', meta, 'wid', 'attempt'))
  if wid == ARGV[2] and attempt == ARGV[place + 1] and redis.call('ZSCORE', KEYS[1], id) then
    redis.call('ZADD', KEYS[1], string.format('%.6f', now + tonumber(ARGV[3])), id)
    redis.call('EXPIRE', meta, 90000)
    kept[#kept + 1] = id
  end
end
return kept
""")
"""KEYS lease or held; ARGV fn, wid, seconds, then id and attempt of each job.

Returns the ids of the jobs that are still this worker's.
"""

# A job whose queue key has another type keeps its lease for 5 more seconds, and is tried again.
SWEEP = Script(f"""{_ENDING}{_BACK}{_CLOCK}
local requeued, given_up = {{}}, {{}}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 100)) do
  local meta = 'gm:meta:' .. ARGV[1] .. ':' .. id
  local status = status_of(ARGV[1], id)
  local origin, deaths = unpack(redis.call('HMGET', meta, 'from', 'deaths'))
  if status == nil or is_final(status) then
    redis.call('ZREM', KEYS[1], id)
    redis.call('DEL', meta)
  elseif tonumber(deaths or '0') + 1 >= tonumber(ARGV[2]) then
    redis.call('ZREM', KEYS[1], id)
    redis.call('DEL', meta)
    settle(ARGV[1], id, 'error', 'worker died')
    given_up[#given_up + 1] = id
  elseif type(put_back(ARGV[1], id, origin or 'normal')) == 'table' then
    redis.call('ZADD', KEYS[1], now + 5, id)
  else
    redis.call('ZREM', KEYS[1], id)
    redis.call('HINCRBY', meta, 'deaths', 1)
    redis.call('HDEL', meta, 'wid')
    redis.call('EXPIRE', meta, 90000)
    redis.call('HSET', 'job:' .. ARGV[1] .. ':' .. id, 'status', 'idle')
    requeued[#requeued + 1] = id
  end
end
return {{ requeued, given_up }}
""")
"""KEYS lease; ARGV fn, maximum of deaths. Returns the ids put back and the ids given up."""

DISMISS = Script(f"""{_BACK}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local meta, job = 'gm:meta:' .. ARGV[1] .. ':' .. id, 'job:' .. ARGV[1] .. ':' .. id
  local wid, origin = unpack(redis.call('HMGET', meta, 'wid', 'from'))
  if wid == ARGV[2] then
    if ARGV[3] == '1' then redis.call('ZADD', KEYS[1], 0, id)
    elseif redis.call('TYPE', job).ok ~= 'hash' then redis.call('ZREM', KEYS[1], id)
    elseif type(put_back(ARGV[1], id, origin)) ~= 'table' then
      redis.call('ZREM', KEYS[1], id)
      redis.call('HDEL', meta, 'wid')
      redis.call('HSET', job, 'status', 'idle')
    end
  end
end
""")
"""KEYS lease; ARGV fn, wid, "1" if the worker died.

Expires the leases of a dead worker, so that the next sweep puts its jobs back and counts the death. Puts the jobs of a
live worker back at once.
"""

HAND_OVER = Script(f"""{_CLOCK}
local wid, attempt = unpack(redis.call('HMGET', KEYS[3], 'wid', 'attempt'))
if wid ~= ARGV[2] or attempt ~= ARGV[3] or redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('ZADD', KEYS[2], string.format('%.6f', now + tonumber(ARGV[4])), ARGV[1])
return 1
""")
"""KEYS lease, held, meta; ARGV id, wid, attempt, seconds. Returns 1, or 0 for a stale worker.

Afterwards a row in this project's database represents the job. A sweep reads only lease keys, so none puts the job back
into a queue (ADR 0013).
"""

# The token stays that of the first claim. The jid is derived from it, so the new gateway finds the row (ADR 0013).
ADOPT = Script(f"""{_CLOCK}
local adopted = {{}}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, tonumber(ARGV[4]))) do
  local meta = 'gm:meta:' .. ARGV[1] .. ':' .. id
  local token = redis.call('HGET', meta, 'token')
  if token then
    redis.call('ZADD', KEYS[1], string.format('%.6f', now + tonumber(ARGV[3])), id)
    local attempt = redis.call('HINCRBY', meta, 'attempt', 1)
    redis.call('HSET', meta, 'wid', ARGV[2])
    adopted[#adopted + 1] = {{ ARGV[1], id, attempt, '', token }}
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
return {{ adopted, {{}} }}
""")
"""KEYS held; ARGV fn, wid, seconds, limit. Returns jobs that have a row and no live gateway, in the form of RESERVE."""

# Queued at the second audit only: at the first, a client may be between two of its commands (ADR 0013).
AUDIT = Script(f"""{_CLOCK}
local fn, id, lost = ARGV[1], ARGV[2], false
local job = 'job:' .. fn .. ':' .. id
if redis.call('TYPE', job).ok == 'hash' and redis.call('HGET', job, 'status') == 'idle' then
  lost = not (redis.call('ZSCORE', KEYS[2], id) or redis.call('ZSCORE', KEYS[3], id))
  for place = 4, 6 do
    local at = redis.pcall('LPOS', KEYS[place], id)
    if at and type(at) ~= 'table' then lost = false end
  end
end
if not lost then
  redis.call('ZREM', KEYS[1], id)
  return 0
end
redis.call('ZADD', KEYS[1], 'NX', string.format('%.6f', now), id)
if now - tonumber(redis.call('ZSCORE', KEYS[1], id)) < tonumber(ARGV[3]) then return 1 end
if type(redis.pcall('LPUSH', KEYS[5], id)) == 'table' then return 1 end
redis.call('ZREM', KEYS[1], id)
return 2
""")
"""KEYS audit, lease, scheduled, high, normal, low; ARGV fn, id, seconds.

Returns 0 if the job is not lost, 1 if it is noted as lost, 2 if it was queued again.
"""

# Each takes the function's name, and the id or priority where the key has one.
uid_key = "uid:{}".format
"""Counter of the function's job ids."""

count_key = "count:{}".format
"""Counter of the function's workers, as accurate as the peers keep it."""

job_key = "job:{}:{}".format
"""Hash of one job."""

lock_key = "lock:{}:{}".format
"""List on which blocking clients wait."""

queue_key = "queue:{}:{}".format
"""List of ids; for "scheduled" a sorted set."""

channel = "channel:{}".format
"""Channel of the function's events."""

lease_key = "gm:lease:{}".format
"""Own key: the jobs that our workers hold, scored by the end of the lease."""

held_key = "gm:held:{}".format
"""Own key: the jobs with a row, scored by the end of the gateway's lease."""

meta_key = "gm:meta:{}:{}".format
"""Own key: worker, attempt, origin, deaths and token of a job."""

registry_key = "gm:workers:{}".format
"""Own key: our live workers, scored by the time at which they count as dead."""

audit_key = "gm:audit:{}".format
"""Own key: the jobs that look lost, scored by the time at which they were first found."""

FUNCTIONS_KEY = "gm:functions"
"""Own key: every function that our workers have served."""
