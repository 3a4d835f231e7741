"""Move jobs from the Redis of the original Faktory to this database and back.

It reads and writes the keys of the Redis directly, without a Faktory server. Needs redis-py:
`pip install "django-faktory[redis]"`.
"""
