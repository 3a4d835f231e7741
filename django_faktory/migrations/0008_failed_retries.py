"""Add jobs that wait for a retry to the indexes of failed jobs."""

from django.db import migrations
from django.db.models import Q

from django_faktory.models.indexes import PartialIndex

from ._in_use import ReplaceIndex

_BEFORE = Q(("state__in", ["dead", "discarded", "expired"]))
_AFTER = Q(("state__in", ["retries", "dead", "discarded", "expired"]))


class Migration(migrations.Migration):
    atomic = False  # indexes are built beside those in use

    dependencies = [("django_faktory", "0007_alarm_records")]

    operations = [
        ReplaceIndex(
            "Job",
            PartialIndex(condition=_AFTER, fields=["state", "errtype", "id"], name="faktory_failed"),
            PartialIndex(condition=_BEFORE, fields=["state", "errtype", "id"], name="faktory_failed"),
        ),
        ReplaceIndex(
            "Job",
            PartialIndex(condition=_AFTER, fields=["state", "id"], name="faktory_failed_latest"),
            PartialIndex(condition=_BEFORE, fields=["state", "id"], name="faktory_failed_latest"),
        ),
    ]
