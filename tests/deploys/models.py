"""What atomic tasks write. Of an app that only the programs of a rollout have."""

from django.db import models


class Line(models.Model):
    jid = models.CharField(max_length=40)

    class Meta:
        app_label = "deploys"

    def __str__(self):
        return self.jid
