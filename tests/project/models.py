"""A model that tasks of the test project write, so that tests see what was committed."""

from django.db import models


class Mark(models.Model):
    text = models.CharField(max_length=200)

    def __str__(self):
        return self.text


class Effect(models.Model):
    """What a task did once: a second time violates the constraint."""

    number = models.BigIntegerField(unique=True)

    def __str__(self):
        return f"{self.number}"
