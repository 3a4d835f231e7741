"""The storage layer: every change of a job's state, and all SQL.

Functions take sets of jobs; each call is one or more short transactions and safe to repeat. `jobs` has push,
claim and all ends of a run, `transactions.run` executes and retries transactions, and `dialects` has the SQL of each
database. The package depends on no socket, protocol, setting or task. The clock is the database's, unless a caller
passes `now`.
"""
