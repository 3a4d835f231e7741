"""Every change of a job's state, and all SQL. Each verb is one short transaction over a set and safe to repeat.

Knows no socket, no protocol, no setting, no task. The clock is the database's unless a caller passes `now`.
"""
