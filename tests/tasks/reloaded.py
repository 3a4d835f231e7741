"""A module that a test imports twice, as a development server might."""

from django_faktory import task


@task
def changing():
    pass
