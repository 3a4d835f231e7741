"""Names of the objects that jobs are about: a model instance as `app.model/pk`. Independent of jobs."""

from __future__ import annotations

from django.db import models

from ..core.queries import split_about


def about_of(subject: models.Model | str) -> str:
    """Return the name of an object; a name is checked and returned unchanged.

    The name of a proxy is that of its concrete model. Raises ValueError for an unsaved object, InvalidQuery for an
    invalid name, TypeError for any other value.
    """
    if isinstance(subject, str):
        split_about(subject)
        return subject
    if not isinstance(subject, models.Model):
        raise TypeError(f"about: expected a model's instance or its name app.model/pk, got {subject!r:.80}")
    # Concrete model: a proxy and its model are the same row, so their jobs must be found together.
    meta = subject._meta.concrete_model._meta  # type: ignore[union-attr]  # noqa: SLF001  (documented)
    if subject.pk is None or subject._state.adding:  # noqa: SLF001  (documented)
        raise ValueError(f"about: an unsaved {meta.label_lower}: save it first, so that it has a key")
    # Composite primary keys are tuples.
    key = ",".join(map(str, subject.pk)) if isinstance(subject.pk, tuple) else str(subject.pk)
    name = f"{meta.label_lower}/{key}"
    split_about(name)
    return name
