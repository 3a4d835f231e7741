"""Create the broker and the producer that the settings select, each once per process.

`get_broker` returns the broker, `get_producer` the target of pushes (the broker, or an outbox in front of it).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import date
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver
from django.utils.module_loading import import_string

from .. import conf
from ..core.locket import Locket
from .base import Broker

if TYPE_CHECKING:
    from ..core.histograms import Recorder
    from ..core.payloads import WorkerIdentity
    from ..store.store import Store
    from .outbox import Outbox

__all__ = ["Broker", "get_broker", "get_producer", "is_in_outbox", "remote_broker", "serving_broker", "working_broker"]


# One per process: a broker remembers claims without an answer, known queues and connections.
@lru_cache(maxsize=1)
def get_broker() -> Broker:
    """Return the broker of `FAKTORY["BROKER"]`.

    The setting is "orm", "remote", or the dotted path of a Broker that takes no arguments. Raises ImproperlyConfigured.
    """
    match conf.get("BROKER"):
        case "orm":
            return _orm_broker()
        case "remote":
            return remote_broker(conf.url())
        case path:
            broker = import_string(path)()
            if isinstance(broker, Broker):
                return broker
            raise ImproperlyConfigured(
                f'FAKTORY["BROKER"]: expected "orm", "remote" or the dotted path of a Broker, got {path!r}'
            )


def serving_broker(announce: Callable[[str, Collection[str]], None], recorder: Recorder) -> Broker:
    """Return the broker for a server process.

    If jobs are stored in this database, it notifies workers through `announce`, which must not block; otherwise it is
    `get_broker()`.
    """
    if conf.get("BROKER") != "orm":
        return get_broker()
    # Not cached: its options differ from those of `get_broker`, and a server creates it once.
    return _orm_broker(announce=announce, announces_in_thread=True, recorder=recorder)


def working_broker(recorder: Recorder) -> Broker:
    """Return the broker for a worker process.

    If jobs are stored in this database, it reports their starts and ends to `recorder`; otherwise it is `get_broker()`.
    """
    return _orm_broker(recorder=recorder) if conf.get("BROKER") == "orm" else get_broker()


def _orm_broker(**options: Any) -> Broker:
    if not apps.is_installed("django_faktory"):
        raise ImproperlyConfigured(
            'jobs have no table: the app is not installed; INSTALLED_APPS += ["django_faktory"], then run manage.py '
            "migrate"
        )
    from .orm import OrmBroker  # models may be imported only when the apps are ready

    return OrmBroker(conf.get("DATABASE"), locket=configured_locket(), **_store_options(), **options)


def configured_store(alias: str) -> Store:
    """Return a store of this database with the periods of the settings."""
    from ..store.store import Store  # models may be imported only when the apps are ready

    return Store(alias, **_store_options())


def _store_options() -> dict[str, Any]:
    return {
        "dead_for_s": conf.get("DEAD_TTL"),
        "max_interruptions": conf.get("MAX_INTERRUPTIONS"),
        "worker_timeout_s": conf.get("WORKER_TIMEOUT"),
        "commit_within_s": conf.get("BATCH_COMMIT_WITHIN"),
        "result_ttl_s": conf.get("RESULT_TTL"),
        "export": _export if conf.get("EXPORT_HISTORY") else None,
    }


def _export(day: date | None, rows: Any) -> object:
    # Imported by the call: an error in that module is one of the export, and must not stop pushes.
    return import_string(conf.get("EXPORT_HISTORY"))(day, rows)


def configured_locket() -> Locket:
    """Return the setting LOCKET: which queues run their jobs under a lock, and by which key."""
    settings = conf.get("LOCKET")
    key = settings.get("JOB_LOCK_KEY")
    return Locket(settings, key=import_string(key) if isinstance(key, str) else key)


@lru_cache(maxsize=1)
def get_producer() -> Broker | Outbox:
    """Return the target of pushes: the broker, or an outbox in front of it.

    Jobs of the same database join its open transaction (`store.transactions.run`). In a transaction of another database
    that the setting OUTBOX names, a job becomes a row there (ADR 0008). Otherwise it is pushed at once.
    """
    aliases = conf.outbox()
    if not aliases:
        return get_broker()
    from .outbox import Outbox  # imports a model, so the apps must be ready

    return Outbox(get_broker(), aliases, own_alias=conf.get("DATABASE") if conf.get("BROKER") == "orm" else None)


def is_in_outbox(jid: str) -> bool:
    """Return whether this job waits in an outbox, to be sent to the broker; False if it was refused."""
    producer = get_producer()
    return not isinstance(producer, Broker) and producer.has_waiting(jid)


def remote_broker(url: str, *, identity: WorkerIdentity | None = None) -> Broker:
    """Return a broker for the Faktory server at `url`."""
    from .remote import RemoteBroker  # a project with its jobs in the database needs no sockets

    return RemoteBroker(url, identity=identity)


@receiver(setting_changed)
def _forget(*, setting: str, **_: Any) -> None:
    # For override_settings in tests; settings of a running project do not change.
    if setting in ("FAKTORY", "DATABASES"):
        get_broker.cache_clear()
        get_producer.cache_clear()
