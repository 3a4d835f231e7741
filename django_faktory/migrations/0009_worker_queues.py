"""Add the queues and threads that our workers report."""

from django.db import migrations, models

from ._in_use import TablesInUse


class Migration(migrations.Migration):
    dependencies = [("django_faktory", "0008_failed_retries")]

    operations = [
        TablesInUse(
            [
                migrations.AddField(
                    "workerprocess", "queues", models.JSONField(help_text="Queues that it serves.", null=True)
                ),
                migrations.AddField(
                    "workerprocess",
                    "threads",
                    models.IntegerField(help_text="Number of jobs that it runs at a time.", null=True),
                ),
            ]
        ),
    ]
