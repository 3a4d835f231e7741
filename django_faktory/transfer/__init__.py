"""Jobs taken over from the Redis of the original Faktory, and handed back to it.

Knows the original's keys, never its wire. Needs redis-py: `pip install django-faktory[redis]`.
"""
