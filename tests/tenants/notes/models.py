from django.db import models


class Note(models.Model):
    word = models.TextField()

    def __str__(self):
        return self.word
