"""Move jobs from the Redis of the original Faktory to this database and back.

Knows the keys of the original, not its wire protocol. Needs redis-py: `pip install django-faktory[redis]`.
"""
