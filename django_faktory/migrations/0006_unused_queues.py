from django.db import migrations, models
from django.db.models.functions import Now

from django_faktory.migrations._in_use import TablesInUse


class Migration(migrations.Migration):
    dependencies = [("django_faktory", "0005_live_expiries")]

    operations = [
        TablesInUse(
            [
                migrations.AddField(
                    "queue",
                    "used_at",
                    models.DateTimeField(
                        db_default=Now(),
                        editable=False,
                        help_text="Last time that a job was pushed to it or waited in it, to the hour.",
                    ),
                ),
                migrations.AddField(
                    "measure",
                    "used_at",
                    models.DateTimeField(db_default=Now(), help_text="Time of the last change."),
                ),
            ]
        ),
    ]
