from django.db import models


class Note(models.Model):
    word = models.TextField()
