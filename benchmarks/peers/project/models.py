"""The business row that tasks write, and that a bare `create()` is measured with."""

from django.db import models


class Row(models.Model):
    """An ordinary row of an application."""

    number = models.IntegerField()
    text = models.CharField(max_length=100)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        app_label = "project"

    def __str__(self):
        return f"row {self.number}"
