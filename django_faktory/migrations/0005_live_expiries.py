from django.db import migrations, models

from django_faktory.models.indexes import HotIndex

from ._in_use import ReplaceIndex


class Migration(migrations.Migration):

    atomic = False  # indexes are built beside those in use

    dependencies = [
        ('django_faktory', '0004_counter_slots'),
    ]

    operations = [
        ReplaceIndex(
            'Job',
            models.Index(
                condition=models.Q(('expires_at__isnull', False), ('state__in', ['scheduled', 'enqueued', 'blocked', 'retries'])),
                fields=['expires_at'],
                name='faktory_expiring',
            ),
            models.Index(condition=models.Q(('expires_at__isnull', False)), fields=['expires_at'], name='faktory_expiring'),
        ),
        ReplaceIndex(
            'Job',
            HotIndex(
                condition=models.Q(('state__in', ['scheduled', 'retries'])),
                fields=['run_at', 'id'],
                include=['state'],
                name='faktory_due',
            ),
            HotIndex(condition=models.Q(('state__in', ['scheduled', 'retries'])), fields=['run_at'], name='faktory_due'),
        ),
    ]
