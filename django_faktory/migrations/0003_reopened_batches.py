from django.db import migrations, models
from django.db.models import Q

import django_faktory.models.indexes
from django_faktory.migrations._in_use import TablesInUse


class Migration(migrations.Migration):
    dependencies = [("django_faktory", "0002_interruptions")]

    operations = [
        TablesInUse(
            [
                migrations.AddField(
                    "batch",
                    "reopened_until",
                    models.DateTimeField(
                        help_text="Time at which a reopened batch counts as committed again.",
                        null=True,
                    ),
                ),
                migrations.AddIndex(
                    "batch",
                    django_faktory.models.indexes.PartialIndex(
                        condition=Q(("reopened_until__isnull", False)),
                        fields=["reopened_until"],
                        name="faktory_batch_reopened",
                    ),
                ),
            ]
        ),
    ]
