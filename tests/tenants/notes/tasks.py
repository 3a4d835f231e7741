from django.db import transaction

from django_faktory import task
from tests.tenants.notes.models import Note


@task
def note(word):
    """Write into the table of the tenant."""
    Note.objects.create(word=word)


@task(atomic=True)
def note_in_transaction(word):
    Note.objects.create(word=word)


@task(unique_for=600)
def note_once(word):
    Note.objects.create(word=word)


@task(lock=True)
def note_alone(word):
    with transaction.atomic():
        Note.objects.create(word=word)
