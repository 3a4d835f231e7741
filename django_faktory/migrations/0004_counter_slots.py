"""A counter row for each connection: its slot is a number drawn at random."""

from django.db import migrations, models

from ._in_use import TablesInUse


class Migration(migrations.Migration):
    dependencies = [("django_faktory", "0003_reopened_batches")]

    operations = [
        TablesInUse(
            [
                migrations.AlterField(
                    "counter",
                    "slot",
                    models.BigIntegerField(help_text="Random number of the connection that counts in it; -1: the total of folded rows."),
                ),
            ]
        ),
    ]
