"""SQL that the statements which end jobs share: the reports, the check of the holder, the end, and the count."""

from __future__ import annotations

from ..base import COUNTER

REPORTS = 'json_to_recordset($2) AS r (jid text COLLATE "C", wid text COLLATE "C", attempt int, result text)'
"""The reports in the second parameter, as rows `r`."""

IS_HOLDER = """j.state = 'working' AND (r.wid = '' OR j.wid = '' OR j.wid = r.wid)
    AND (r.attempt IS NULL OR r.attempt = j.attempt)"""
"""SQL condition: the report `r` comes from the holder of the job `j` (W16)."""

# A job that has a lock or permits is ended by a statement that releases them, so they are cleared in each case.
_SUCCEEDED = """state = 'succeeded', reserved_until = NULL, unique_key = NULL, lock_token = NULL, permits = NULL"""


def set_succeeded(result: str, *, now: str = "now") -> str:
    """Return the assignments that end a kept job `j`, with SQL for its result and for the time."""
    return (
        f"{_SUCCEEDED}, result = {result}, finished_at = {now}, purge_at = {now} + make_interval(secs => j.result_ttl)"
    )


def count_processed(slot: int, processed: str, *, late: str = "0", source: str = "clock") -> str:
    """Return the statement that adds these counts to the day's row of the slot in a parameter."""
    return f"""INSERT INTO {COUNTER} AS c (day, slot, processed, failed, late)
  SELECT (now AT TIME ZONE 'UTC')::date, ${slot}, {processed}, 0, {late} FROM {source}
  ON CONFLICT (day, slot) DO UPDATE SET processed = c.processed + excluded.processed, late = c.late + excluded.late"""
