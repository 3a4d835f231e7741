from django.db import migrations, models

from ._in_use import TablesInUse


class Migration(migrations.Migration):

    dependencies = [
        ('django_faktory', '0001_initial'),
    ]

    operations = [
        TablesInUse(
            [
                migrations.AddField(
                    model_name='job',
                    name='interruptions',
                    field=models.IntegerField(db_default=0, default=0, help_text='Number of times a stopping worker released it unfinished.'),
                ),
            ]
        ),
    ]
