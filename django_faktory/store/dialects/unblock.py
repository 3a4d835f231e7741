"""Make blocked jobs ready, key by key (`next_ready`), on databases that cannot do it in one statement."""

from __future__ import annotations

from collections.abc import Iterator

from django.db.backends.utils import CursorWrapper

# Defined here, because `base` imports this module.
JOB = "django_faktory_job"


def next_ready(cursor: CursorWrapper, key: str, skip_lock: str) -> Iterator[tuple[str, bool]]:
    """Make the first blocked job of each queue and priority ready, unless one is ready already.

    Yields (queue, True), or (queue, False) if another transaction has locked the row. Each step is one index lookup.
    """
    # Before the first place: the lowest possible sort_priority is -100.
    queue, sort_priority = "", -101
    while True:
        cursor.execute(
            f"SELECT id, queue, sort_priority, limiter FROM {JOB} WHERE lock_key = %s AND state = 'blocked'"
            " AND (queue > %s OR (queue = %s AND sort_priority > %s))"
            " ORDER BY queue, sort_priority, enqueued_at, id LIMIT 1",
            [key, queue, queue, sort_priority],
        )
        row = cursor.fetchone()
        if row is None:
            return
        row_id, queue, sort_priority, limiter = row
        if limiter is not None:  # it waits for a permit, and the jobs of its key wait behind it (ADR 0016)
            continue
        cursor.execute(
            f"SELECT 1 FROM {JOB}"
            " WHERE lock_key = %s AND state = 'enqueued' AND queue = %s AND sort_priority = %s LIMIT 1",
            [key, queue, sort_priority],
        )
        if cursor.fetchone() is None:
            cursor.execute(f"SELECT id FROM {JOB} WHERE id = %s AND state = 'blocked'{skip_lock}", [row_id])
            if cursor.fetchone() is None:
                # The caller passes the key to `promote_waiters` after its commit: waiting here, with other rows locked,
                # could deadlock (ADR 0024).
                yield queue, False
                continue
            cursor.execute(f"UPDATE {JOB} SET state = 'enqueued' WHERE id = %s", [row_id])
            yield queue, True
