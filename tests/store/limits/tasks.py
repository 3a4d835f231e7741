"""Tasks with limits and with limit keys."""

from django_faktory import task


def body(*_):
    return None


@task(limit=2)
def at_most_two():
    return None


@task(limit={"concurrency": 1, "rate": "100/s"}, limit_key=lambda customer: str(customer) if customer else None)
def by_customer(customer):
    return customer


@task(limit_key="printer")
def shared():
    return None


@task(limit_key=lambda number: 1 // number)
def raising(number):
    return number
