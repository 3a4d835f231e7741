"""Send requests as users with any set of permissions, undo each, and record what it showed and wrote."""

import re
from contextlib import ExitStack
from functools import cached_property
from typing import ClassVar

from django.apps import apps
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.test import Client

from tests.security.matrix.rows import MARKERS

APP = "django_faktory"
NONE = frozenset()
OTHER = frozenset({"a_permission_that_no_page_asks_for"})
_writes = re.compile(
    r"\s*(insert|update|delete|replace|with\b.*?\b(insert|update|delete))\b", re.IGNORECASE | re.DOTALL
)
_unimportant = re.compile(r"django_session|auth_user\b", re.IGNORECASE)


class Permissions:
    """An authentication backend: its user has the permissions in `granted`; `asked` collects all that were checked.

    A permission that a request does not check cannot change the answer, so not every set has to be tried.
    """

    granted = NONE
    asked: ClassVar[set[str]] = set()
    users: ClassVar[dict[int, User]] = {}

    def get_user(self, pk):
        return Permissions.users.get(pk)

    def has_perm(self, user, name, obj=None):
        app, _, codename = name.partition(".")
        if not user.is_authenticated or app != APP:
            return False
        Permissions.asked.add(codename)
        return codename in Permissions.granted

    def has_module_perms(self, user, app):
        if not user.is_authenticated or app != APP:
            return False
        Permissions.asked |= OTHER
        return bool(Permissions.granted)


BACKEND = f"{Permissions.__module__}.{Permissions.__qualname__}"


class Answer:
    """A response, the statements that wrote, whether rows of this app changed, and whether the admin's log grew."""

    def __init__(self, request, answer, writes, is_changed):
        self.request = request
        content = b"".join(answer.streaming_content) if answer.streaming else answer.content
        self.status = answer.status_code
        self.text = "\n".join([content.decode("utf-8", "replace"), str(answer.headers), str(answer.cookies)])
        self.writes = writes
        self.is_changed = is_changed
        self.is_logged = LogEntry.objects.exists()
        self.is_to_log_in = "/login/" in answer.headers.get("Location", "")
        self.context = answer.context

    @property
    def is_in(self):
        return self.status < 400 and not self.is_to_log_in

    @cached_property
    def markers(self):
        """Return the markers in the answer, without markers that the user sent."""
        sent = f"{self.request.path} {self.request.sent}"
        return {marker for marker in MARKERS if marker in self.text and marker not in sent}

    def shown_to(self, granted):
        """Return the markers in the answer that a user with these permissions may not see."""
        return [marker for marker in self.markers if not any(needed <= granted for needed in MARKERS[marker])]


class Asker:
    """Send requests as one user, with other permissions each time."""

    def __init__(self):
        self.staff, self.other = (self._client(name, is_staff=name == "staff") for name in ("staff", "other"))
        self.anonymous = Client()

    def _client(self, name, **fields):
        client = Client()
        user = User.objects.create(username=name, **fields)
        Permissions.users[user.pk] = user
        client.force_login(user, backend=BACKEND)
        return client

    def ask(self, request, granted=NONE, *, client=None, compare=False):
        """Send the request in a transaction that is rolled back."""
        Permissions.granted, Permissions.asked = frozenset(granted), set()
        writes = []

        def watch(execute, sql, params, many, context):
            if _writes.match(sql) and not _unimportant.search(sql):
                writes.append(sql[:200])
            return execute(sql, params, many, context)

        with transaction.atomic(), ExitStack() as stack:
            if request.prepare is not None:
                request.prepare()
            before = stored() if compare else None
            with connection.execute_wrapper(watch):
                answer = (client or self.staff).generic(request.method, request.path, **request.sent)
            stack.callback(transaction.set_rollback, True)
            return Answer(request, answer, writes, compare and stored() != before)


def stored():
    """Return every row of every table of this app."""
    models = [one for one in apps.get_app_config(APP).get_models() if one._meta.managed and not one._meta.proxy]
    return {one.__name__: list(one.objects.order_by("pk").values_list()) for one in models}
