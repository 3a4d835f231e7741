"""The rows that atomic tasks write, in an app that only programs of a rollout install."""

from django.db import models


class Line(models.Model):
    jid = models.CharField(max_length=40)

    class Meta:
        app_label = "deploys"

    def __str__(self):
        return self.jid
