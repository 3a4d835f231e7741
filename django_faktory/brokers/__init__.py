"""Which broker this project uses: made once a process, by the settings."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver
from django.utils.module_loading import import_string

from .. import conf
from ..locket import Locket
from .base import Broker

if TYPE_CHECKING:
    from ..measuring import Recorder
    from ..payloads import WorkerIdentity
    from .outbox import Outbox

__all__ = ["Broker", "get_broker", "get_producer", "remote_broker", "serving_broker", "working_broker"]


@lru_cache(maxsize=1)
def get_broker() -> Broker:
    """The broker of `FAKTORY["BROKER"]`: "orm", "remote", or the dotted path of a Broker that takes no arguments."""
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
    """A server's own: `get_broker`, with its hints sent by `announce`, which does not wait, where the jobs are in a
    database."""
    if conf.get("BROKER") != "orm":
        return get_broker()
    return _orm_broker(announce=announce, announces_apart=True, shares_numbers=True, recorder=recorder)


def working_broker(recorder: Recorder) -> Broker:
    """A worker's own: `get_broker`, which lets `recorder` know what passes where the jobs are in a database."""
    return _orm_broker(recorder=recorder) if conf.get("BROKER") == "orm" else get_broker()


def _orm_broker(**more: Any) -> Broker:
    if not apps.is_installed("django_faktory"):
        raise ImproperlyConfigured(
            'jobs have no table: the app is not installed; INSTALLED_APPS += ["django_faktory"], then run manage.py '
            "migrate"
        )
    from .orm import OrmBroker  # models may be imported only when the apps are ready

    return OrmBroker(
        conf.get("DATABASE"),
        dead_for_s=conf.get("DEAD_TTL"),
        max_interruptions=conf.get("MAX_INTERRUPTIONS"),
        worker_timeout_s=conf.get("WORKER_TIMEOUT"),
        commit_within_s=conf.get("BATCH_COMMIT_WITHIN"),
        locket=configured_locket(),
        **more,
    )


def configured_locket() -> Locket:
    """What the settings say of locketed queues."""
    settings = conf.get("LOCKET")
    key = settings.get("JOB_LOCK_KEY")
    return Locket(settings, key=import_string(key) if isinstance(key, str) else key)


@lru_cache(maxsize=1)
def get_producer() -> Broker | Outbox:
    """Where tasks are pushed to: the broker, or where jobs live elsewhere than transactions an outbox before it."""
    aliases = conf.outbox()
    if not aliases:
        return get_broker()
    from .outbox import Outbox  # it has a model

    return Outbox(get_broker(), aliases, own=conf.get("DATABASE") if conf.get("BROKER") == "orm" else None)


def remote_broker(url: str, *, identity: WorkerIdentity | None = None) -> Broker:
    """The Faktory server at `url`."""
    from .remote import RemoteBroker  # a project with its jobs in the database needs no sockets

    return RemoteBroker(url, identity=identity)


@receiver(setting_changed)
def _forget(*, setting: str, **_: Any) -> None:
    if setting in ("FAKTORY", "DATABASES"):
        get_broker.cache_clear()
        get_producer.cache_clear()
