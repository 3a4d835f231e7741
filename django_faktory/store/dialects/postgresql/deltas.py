"""Numbers of jobs as sums of deltas: which rows of `django_faktory_delta` to add up on PostgreSQL (ADR 0047).

A fold replaces rows by their sums, and notes which transactions it did not see. Readers add to its sums only the rows
of these and of later transactions, found by their marks. So they do not read dead rows, however long another snapshot
keeps these.
"""

from __future__ import annotations

from django.db.backends.base.base import BaseDatabaseWrapper

from ..base import DELTA, FOLD_FROM
from ..values import TOTALS

_FIRST_FOLD = 2**62
"""Rows of a fold have this plus the transaction's id as mark, so that the latest fold is the end of the index."""

_LAST = 2**64 - 1

_TOTALS = ", ".join(f"'{name}'" for name in TOTALS)

_MUTEX = 5_218_806_127_240_961_312
"""Key of the advisory lock of `fold`: its rows must be the only ones with sums."""

TOTALS_KEPT_DAYS = 400
"""Days for which the totals of each day are kept; those of older days are one number."""

# A fold of the future is that of another cluster, from which this database was copied by its rows: all rows are read.
# CASE: no other row's name may be converted, whatever the plan is.
CURRENT = f"""(
WITH latest AS MATERIALIZED (
  SELECT ctid AS place, * FROM {DELTA}
  WHERE mark = (SELECT mark FROM {DELTA} WHERE mark >= '{_FIRST_FOLD}' ORDER BY mark DESC LIMIT 1)),
fold AS MATERIALIZED (
  SELECT seen_until FROM (SELECT CASE kind WHEN 'fold' THEN name::xid8 END AS seen_until FROM latest) AS head
  WHERE seen_until <= pg_snapshot_xmax(pg_current_snapshot()))
SELECT * FROM latest WHERE EXISTS (SELECT FROM fold)
UNION ALL
SELECT ctid, * FROM {DELTA} WHERE mark >= COALESCE((SELECT seen_until FROM fold), '0')
  AND mark < COALESCE((SELECT '{_FIRST_FOLD}'::xid8 FROM fold), '{_LAST}')
UNION ALL
SELECT ctid, * FROM {DELTA} WHERE mark = ANY (ARRAY(
  SELECT CASE kind WHEN 'open' THEN name::xid8 END FROM latest WHERE EXISTS (SELECT FROM fold))))"""

_IS_DUE = f"SELECT COUNT(*) FILTER (WHERE mark < '{_FIRST_FOLD}') * {FOLD_FROM} > COUNT(*) FROM {CURRENT} AS delta"

_LOCK = f"SELECT pg_try_advisory_xact_lock({_MUTEX})"

# The rows are deleted by their places: any other condition may be planned as a walk over all rows, dead ones included.
# The fold's own transaction counts as open, because it may go on; not from the snapshot's end on, where rows are later.
_FOLD = f"""
WITH gone AS (
  DELETE FROM {DELTA} WHERE ctid = ANY (ARRAY(SELECT place FROM {CURRENT} AS delta)) RETURNING kind, name, amount),
named AS (
  SELECT kind, amount, CASE WHEN kind IN ({_TOTALS})
    AND name < to_char(now() - interval '{TOTALS_KEPT_DAYS} days', 'YYYY-MM-DD') THEN '' ELSE name END AS name
  FROM gone)
INSERT INTO {DELTA} (mark, kind, name, amount)
SELECT ({_FIRST_FOLD} + pg_current_xact_id()::text::bigint)::text::xid8, kind, name, amount FROM (
  SELECT kind, name, SUM(amount) AS amount FROM named GROUP BY kind, name HAVING SUM(amount) <> 0
  UNION ALL
  SELECT 'fold', pg_snapshot_xmax(pg_current_snapshot())::text, 0
  UNION ALL
  SELECT 'open', xid::text, 0
  FROM (SELECT pg_snapshot_xip(pg_current_snapshot()) UNION SELECT pg_current_xact_id()) AS open (xid)
  WHERE xid < pg_snapshot_xmax(pg_current_snapshot())) AS folded"""


def is_due(connection: BaseDatabaseWrapper) -> bool:
    """Return whether there are enough rows for a fold."""
    with connection.cursor() as cursor:
        cursor.execute(_IS_DUE)
        return bool(cursor.fetchone()[0])


def fold(connection: BaseDatabaseWrapper) -> None:
    """Replace all rows by their sums, unless another transaction does so; call in a transaction."""
    with connection.cursor() as cursor:
        # A statement of its own: the fold must see what the previous one has written.
        cursor.execute(_LOCK)
        if cursor.fetchone()[0]:
            cursor.execute(_FOLD)
