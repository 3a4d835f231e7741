"""A model that tasks of the test project write, so that tests see what was committed."""

from django.db import models


class Mark(models.Model):
    text = models.CharField(max_length=200)

    def __str__(self):
        return self.text
