"""The commands of `manage.py`: `runfaktory` and `faktory`."""
