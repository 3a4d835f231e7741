"""Searches of users for jobs, shared by the admin, the API and the command line: what a word means, how far it looked.

Verbs do not use them: a word without a key is a jid there, and nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import structs

from ..core import queries
from ..core.lifecycle import FAILED
from ..core.queries import MAX_SEARCHED, MAX_VALUES, Pattern, Query
from ..models import Job, JobQuerySet, Queue
from ..models.job import LAST, RECENT
from ..tasks import redaction
from . import task_names

COUNTED = 1_000_000
"""Maximum number of jobs that are counted to say how many a search left out."""
WIDER = 10
"""Factor by which the offered next search looks at more jobs."""
MIN_JID_BEGINNING = 6
"""Characters from which a word counts as the beginning of a job ID."""


class Coverage(NamedTuple):
    """How many jobs a list looked at, the newest ones, and of how many."""

    searched: int
    total: int
    is_more: bool
    """Whether `total` is a lower bound."""
    wider: Query
    """The query that looks at more jobs."""

    @property
    def document(self) -> dict[str, Any]:
        """The coverage in JSON types."""
        return {"jobs": self.searched, "of": self.total, "is_more": self.is_more}

    @property
    def is_complete(self) -> bool:
        """True if the list looked at every job."""
        return self.searched >= self.total and not self.is_more


def parse_search(text: str, *, using: str) -> Query:
    """Parse a query whose words without a key may be any part of a job. Raises InvalidQuery.

    A word alone is a job ID or its beginning, a queue, a task, the last part or the beginning of one, or an error.
    Any other word, and each of several, is searched in arguments and in messages and tracebacks of failures.
    """
    query, positions = queries.parse_words(text)
    words = [word for word, _ in positions]
    redaction.refuse_to_reveal(query)
    if len(words) == 1 and query == Query(among=query.among):
        return structs.replace(_parse_word(words[0], using), among=query.among)
    jids = [word for word in words if Job.objects.using(using).filter(jid=word).exists()]
    query = task_names.expand_short_names(query, using=using)
    query = structs.replace(query, jids=tuple(dict.fromkeys((*query.jids, *jids))))
    return _with_words(query, [word for word in words if word not in jids])


def read_coverage(query: Query, *, using: str) -> Coverage | None:
    """Return how far a list of `JobQuerySet.shown` looked; None if an index leads to all of its jobs."""
    jobs = Job.objects.using(using)
    if query.has_index and not query.searches:
        return None
    if query.has_index:
        limit, jobs_searched = query.among, jobs.without_texts(query)
    else:
        limit, jobs_searched = max(RECENT, query.among), jobs.all()
    total = jobs_searched.count_up_to(COUNTED + 1)
    # By their keys: of the latest keys some have no row any more.
    searched = min(limit, total) if query.has_index else jobs.recent(limit).count_up_to(limit)
    wider = structs.replace(query, among=min(limit * WIDER, MAX_SEARCHED))
    return Coverage(searched, min(total, COUNTED), total > COUNTED, wider)


def _with_words(query: Query, words: list[str]) -> Query:
    # Messages are no arguments: `REDACT` does not hide them.
    field = "messages" if redaction.is_on() else "words"
    return structs.replace(query, **{field: tuple(dict.fromkeys((*getattr(query, field), *words)))})


def _parse_word(word: str, using: str) -> Query:
    jobs = Job.objects.using(using)
    # The jid first: it is the only exact match.
    if jids := _find_jids(jobs, word):
        return Query(jids=jids)
    by_last_part = task_names.expand_short_names(Query(tasks=(Pattern(word),)), using=using)
    if by_last_part.tasks != (Pattern(word),):
        return by_last_part
    if Queue.objects.using(using).filter(name=word).exists():
        return Query(queues=(Pattern(word),))
    # Among recent jobs only: no index serves a look-up of the beginning of a task in all states.
    name = word.rstrip("*")
    if name and "*" not in name and _has_rows(jobs.recent().task(f"{name}*")):
        return Query(tasks=(Pattern(name, is_prefix=True),))
    error = Query(errors=(Pattern(name, is_prefix=word.endswith("*")),))
    # The list of an error shows recent jobs only too.
    is_error = _has_rows(jobs.recent().in_state(*FAILED).matching(error))
    return error if is_error else _with_words(Query(), [word])


def _has_rows(recent_jobs: JobQuerySet) -> bool:
    # Not exists(): without an order PostgreSQL looks for the first row from the beginning of the table.
    return bool(recent_jobs.order_by("-pk").values_list("pk", flat=True)[:1])


def _find_jids(jobs: JobQuerySet, word: str) -> tuple[str, ...]:
    if jobs.filter(jid=word).exists():
        return (word,)
    if len(word) < MIN_JID_BEGINNING:
        return ()
    return tuple(
        dict.fromkeys(jobs.filter(jid__gte=word, jid__lt=word + LAST).values_list("jid", flat=True)[:MAX_VALUES])
    )
