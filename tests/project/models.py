"""What the tests' tasks write, to see what was committed."""

from django.db import models


class Mark(models.Model):
    text = models.CharField(max_length=200)

    def __str__(self):
        return self.text
