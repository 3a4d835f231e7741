"""Encode task arguments that JSON has no type for, and decode them before the call.

Values become readable references: `{"$type": "decimal", "value": "1.20"}`, `{"$model": "shop.order", "pk": 7}`.
`docs/arguments.md` defines the forms and which clients may write them. A job never causes an import: a model must
belong to an installed app.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.apps import apps
from django.core.exceptions import ObjectDoesNotExist, ValidationError
from django.db import connections, models, router
from django.utils.dateparse import parse_duration
from django.utils.duration import duration_iso_string

from ..core.job_options import SEALED
from ..core.json import jsontext
from ..errors import Discard, InvalidArgument, InvalidPayload, MissingObject
from .json_values import UNCHANGED, normalize, to_key, to_plain
from .redaction import HIDDEN, describe_value, is_on

_ARGUMENT_ERRORS = (TypeError, ValueError, InvalidArgument, MissingObject)
ENCODING_ERRORS = (ValueError, OverflowError, RecursionError)
"""What JSON's encoder raises for an integer of too many digits or values that nest too deeply."""
TYPE, VALUE, MODEL, PK, USING = "$type", "value", "$model", "pk", "using"
_RESERVED_KEYS = {TYPE, MODEL, SEALED}


def _write_time(value: time) -> str:
    if value.tzinfo is not None and value.utcoffset() is None:
        raise ValueError(
            "a time in a zone without a date has no offset, so JSON would lose the zone: pass a datetime, or the "
            "zone's name as another argument"
        )
    return value.isoformat()


_ENCODERS: list[tuple[type, str, Callable[[Any], str]]] = [
    (datetime, "datetime", datetime.isoformat),  # before date: a datetime is also a date
    (date, "date", date.isoformat),
    (time, "time", _write_time),
    (timedelta, "timedelta", duration_iso_string),
    (Decimal, "decimal", str),
    (UUID, "uuid", str),
]


def encode_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, plain_json: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call in JSON's types only.

    With `plain_json` only JSON's own types are accepted and no references are written.
    Raises TypeError or ValueError; the message begins with the place: args[0], or kwargs['when'].
    """
    encode = normalize if plain_json else _encode
    positional = [
        value if type(value) in UNCHANGED else _convert_at(f"args[{position}]", encode, value)
        for position, value in enumerate(args)
    ]
    if not kwargs:
        return positional, {}
    named = {
        to_key(name): value if type(value) in UNCHANGED else _convert_at(f"kwargs[{name!r}]", encode, value)
        for name, value in kwargs.items()
    }
    return positional, named


def decode_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, missing: str = "fail"
) -> tuple[list[Any], dict[str, Any]]:
    """Return the call's arguments with references replaced by their values.

    Runs one query for each model instance. An instance that does not exist any more ends the job: raises MissingObject,
    or Discard with `missing="discard"`. Raises InvalidArgument for a reference that cannot be decoded.
    """
    try:
        positional = [_convert_at(f"args[{position}]", _decode, value) for position, value in enumerate(args)]
        return positional, {name: _convert_at(f"kwargs[{name!r}]", _decode, value) for name, value in kwargs.items()}
    except MissingObject as error:
        if missing == "discard":
            raise Discard(str(error)) from None
        raise


def may_have_references(text: str) -> bool:
    """Return whether a job's JSON may contain references for `decode_call`.

    A substring search, because nearly no job contains any.
    """
    return '"$' in text or "\\u0024" in text


def name_argument(error: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception:
    """Return the error of encoding a job with the place of the encoded argument that causes it, if one does."""
    places = [(f"args[{position}]", value) for position, value in enumerate(args)]
    places += [(f"kwargs[{name!r}]", value) for name, value in kwargs.items()]
    for place, value in places:
        try:
            # As deep as in a job.
            jsontext.check_depth(jsontext.encode({"args": [value]}))
        except (InvalidPayload, *ENCODING_ERRORS) as found:
            kind = InvalidPayload if isinstance(found, InvalidPayload) else ValueError
            return kind(f"{place}: {str(found).removeprefix('invalid JSON: ')}")
    return error


def _convert_at(place: str, convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return convert(value)
    except _ARGUMENT_ERRORS as error:
        if type(error) not in _ARGUMENT_ERRORS:  # a subclass is defined by other code; its constructor may differ
            raise
        # With redaction on the cause is dropped too: the ORM's messages quote the values.
        # A second conversion of references would load their rows again.
        where = place if is_on() or convert is _decode else place + _path_to_problem(convert, value)
        raise type(error)(f"{where}: {error}") from (None if is_on() else error.__cause__)
    except RecursionError:
        problem = f"nested deeper than {jsontext.MAX_DEPTH} levels, or it contains itself; flatten the data"
        raise ValueError(f"{place}: {problem}") from None


def _path_to_problem(convert: Callable[[Any], Any], value: Any) -> str:
    """Return the keys that lead to the innermost item that cannot be converted, such as `[1]['x']`."""
    path = ""
    while isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            try:
                convert(item)
            except _ARGUMENT_ERRORS:
                path, value = f"{path}[{key!r:.40}]", item
                break
        else:
            break
    return path


# --- writing


def _encode(value: Any) -> Any:
    value_type = type(value)
    if value_type in UNCHANGED:
        return value
    if value_type is list or value_type is tuple:
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return _encode_mapping(value)
    if isinstance(value, models.Model):
        return _encode_reference(value)
    for python_type, name, write_text in _ENCODERS:
        if isinstance(value, python_type):
            return {TYPE: name, VALUE: write_text(value)}
    return to_plain(value, _encode)


def _encode_mapping(value: Mapping[Any, Any]) -> dict[Any, Any]:
    """Encode a user's dict; wrap one that resembles a reference so that it arrives unchanged."""
    encoded = {to_key(key): _encode(item) for key, item in value.items()}
    return {TYPE: "dict", VALUE: encoded} if encoded.keys() & _RESERVED_KEYS else encoded


def _encode_reference(instance: models.Model) -> dict[str, Any]:
    label = instance._meta.label_lower  # noqa: SLF001  (Django's documented API)
    if instance.pk is None or instance._state.adding:  # noqa: SLF001  (documented)
        raise ValueError(f"an unsaved {label}: save it first, so that the worker can load it")
    reference = {MODEL: label, PK: _encode(instance.pk)}
    alias = router.db_for_write(type(instance), instance=instance)
    # A worker reads from the default alias unless the reference names another one.
    if alias != router.db_for_write(type(instance)):
        reference[USING] = alias
    return reference


# --- reading


def _decode(value: Any) -> Any:
    value_type = type(value)
    if value_type is list:
        return [_decode(item) for item in value]
    if value_type is not dict:
        return value
    # Exact key sets: a user's dict with additional keys is data and not a reference.
    if TYPE in value and value.keys() == {TYPE, VALUE}:
        return _decode_typed(value[TYPE], value[VALUE])
    if MODEL in value and PK in value and value.keys() <= {MODEL, PK, USING}:
        return _load_instance(value[MODEL], value[PK], value.get(USING))
    return {key: _decode(item) for key, item in value.items()}


def _decode_typed(name: object, value: Any) -> Any:
    if name == "dict" and isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    read_text = _DECODERS.get(name) if isinstance(name, str) else None
    if read_text is None or not isinstance(value, str):
        raise InvalidArgument(
            f'expected {{"$type": one of {", ".join(sorted(_DECODERS))}, "value": a string}}, got $type {name!r:.40} '
            f"with {describe_value(value)}; to receive such JSON unchanged, set plain_json=True on the task"
        )
    try:
        decoded = read_text(value)
    except (ValueError, ArithmeticError):
        decoded = None
    if decoded is None:
        raise InvalidArgument(f"expected the text of a {name}, got {describe_value(value)}")
    return decoded


_DECODERS: dict[str, Callable[[str], Any]] = {
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": parse_duration,
    "decimal": Decimal,
    "uuid": UUID,
}


def _load_instance(label: object, pk: Any, using: object) -> models.Model:
    """Load the referenced row with the model's base manager, so that a default manager's filter does not hide it."""
    try:
        model = apps.get_model(str(label))
    except (LookupError, ValueError):
        raise InvalidArgument(f"$model {label!r:.80}: no installed app has this model") from None
    alias = str(using or router.db_for_write(model))
    if alias not in connections:
        raise InvalidArgument(f"$model {label!r:.80}: no database has the alias {alias!r:.40}")
    key = _decode(pk)
    # A composite primary key arrives as a JSON list; the ORM expects a tuple.
    manager = model._base_manager.using(alias)  # noqa: SLF001  (documented)
    try:
        instance: models.Model = manager.get(pk=tuple(key) if isinstance(key, list) else key)
    except ObjectDoesNotExist:
        raise MissingObject(f"{model._meta.label} {HIDDEN if is_on() else key} does not exist any more") from None  # noqa: SLF001
    except (TypeError, ValueError, ValidationError) as error:
        raise InvalidArgument(f"$model {label!r:.80}: not a valid primary key: {describe_value(key)}") from error
    return instance
