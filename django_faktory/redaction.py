"""What people may see of a job's arguments: the project's own word, by `FAKTORY["REDACT"]`. Off unless it is set.

Whatever shows arguments (admin, API, command line, logs, reprs) asks here; workers and Faktory clients get them as they
are. Where the project's function fails, nothing is shown. Source: docs/security.md, "Arguments that nobody reads".
"""

from __future__ import annotations

from typing import Any

from django.utils.module_loading import import_string

from . import conf, jsontext
from .errors import FaktoryError, InvalidQuery
from .logs import get_logger
from .queries import Query, parse_query

logger = get_logger(__name__)

HIDDEN = "[hidden]"
"""What stands where arguments would, when nobody can say what of them may be seen."""

_failed: set[str] = set()
"""Functions whose failure was logged: once is enough, they are asked for every job that is looked at."""


def is_on() -> bool:
    """Whether the project hides arguments."""
    return bool(conf.get("REDACT"))


def shown(jobtype: str, arguments: Any) -> Any:
    """What may be seen of these: a list of positional arguments, or a dict of those by keyword; in JSON's types."""
    return jsontext.decode(_shown(jobtype, jsontext.encode(arguments))) if is_on() else arguments


def shown_job(jobtype: str, text: str) -> str:
    """A job's JSON with what may be seen of its arguments. Text that is no job is hidden whole."""
    if not is_on():
        return text
    try:
        found = jsontext.last_members(text)
        if "args" in found:
            found["args"] = _shown(jobtype, found["args"])
        if found.get("custom", "").startswith("{"):
            custom = jsontext.last_members(found["custom"])
            if "kwargs" in custom:
                custom["kwargs"] = _shown(jobtype, custom["kwargs"])
                found["custom"] = jsontext.join(custom.items())
        return jsontext.join(found.items())
    except FaktoryError:  # a row somebody changed by hand
        return jsontext.encode(HIDDEN)


def hides(jobtype: str, text: str) -> bool:
    """Whether something of this job is not shown: then nobody can edit what they see of it."""
    if not is_on():
        return False
    try:
        return bool(jsontext.decode(shown_job(jobtype, text)) != jsontext.decode(text))
    except FaktoryError:
        return True


def query_of(text: str) -> Query:
    """Read a query that a person asks. Raises InvalidQuery, also for one that would find out what is hidden."""
    found = parse_query(text)
    if found.searches and is_on():
        raise InvalidQuery("args, text: expected a query that looks into no arguments: FAKTORY['REDACT'] hides them")
    return found


def told(value: object) -> str:
    """An argument's value in an error message."""
    return HIDDEN if is_on() else f"{value!r:.80}"


def _shown(jobtype: str, text: str) -> str:
    path = conf.get("REDACT")
    try:
        hook = import_string(path) if isinstance(path, str) else path
        found = jsontext.encode(hook(jobtype, jsontext.decode(text)))
        jsontext.check_depth(found)
    except Exception as error:  # noqa: BLE001  (anybody's code; its message may quote what it was given)
        if str(path) not in _failed:
            _failed.add(str(path))
            logger.error("REDACT failed, arguments are hidden path=%s jobtype=%s error=%s", path, jobtype, type(error))  # noqa: TRY400
        return jsontext.encode(HIDDEN)
    return found
