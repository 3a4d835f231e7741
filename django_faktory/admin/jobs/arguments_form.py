"""A form for the arguments of a task, built from its signature: fields by annotation, JSON where there is none.

Fields work on the JSON values that a job carries. A value that the field of its annotation cannot show gets a field for
JSON, so that nothing is lost, and a value that the user does not touch stays as it is stored. Runs no task and no SQL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from inspect import Parameter, formatannotation
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from django import forms
from django.core.exceptions import ValidationError
from django.utils import timezone
from django.utils.translation import gettext

from ...core.json import jsontext
from ...errors import FaktoryError
from ...operations.edit import check_call
from ...operations.signatures import bind, parameters_of
from ...store.texts import WHOLE, format_json
from ...tasks.arguments import TYPE, VALUE, decode_call, encode_call
from ...tasks.base import FaktoryTask
from ...tasks.json_values import normalize
from ..formats import error_text

ABSENT: Any = object()
"""Value of an argument that the call leaves out: the task uses its default."""

_TYPES = {
    date: "date", datetime: "datetime", time: "time", timedelta: "timedelta", Decimal: "decimal", UUID: "uuid",
}  # fmt: skip
"""Types that a job carries as a reference, with their names there (`tasks.arguments`)."""
_PLACEHOLDERS = {
    "date": "2026-05-01", "datetime": "2026-05-01T12:00:00+00:00", "time": "12:00:00", "timedelta": "P0DT00H05M00S",
}  # fmt: skip


class ArgumentsForm(forms.Form):
    """Arguments for one call of a task. `args` and `kwargs` are the call as a job carries it, once the form is valid.

    `stored` is the call of a job to edit, which the task must accept; None starts with the defaults of the parameters.
    """

    use_required_attribute = False  # the browser would show one missing argument at a time

    def __init__(
        self,
        task: FaktoryTask[..., Any],
        data: Mapping[str, Any] | None = None,
        *,
        stored: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(data, prefix="arg")
        self._task = task
        self._parameters = {parameter.name: parameter for parameter in parameters_of(task)}
        self._stored_args_count = len(stored[0]) if stored else None
        self._stored_values = self._values_of(*stored) if stored else {}
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        hints = _read_hints(task)
        for name, parameter in self._parameters.items():
            shown = self._stored_values.get(name, _default_of(parameter, task))
            self.fields[name], self.initial[name] = _build_field(parameter, hints.get(name, Any), shown, task)

    def _values_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stored value of each parameter; the further ones as a list and a dict."""
        values: dict[str, Any] = {}
        for parameter, name, value in bind(self._task, args, kwargs) or []:
            if parameter.kind is Parameter.VAR_POSITIONAL:
                values.setdefault(parameter.name, []).append(value)
            elif parameter.kind is Parameter.VAR_KEYWORD:
                values.setdefault(parameter.name, {})[name] = value
            else:
                values[name] = value
        return values

    def clean(self) -> dict[str, Any]:
        """Build the call, and check that the task accepts it."""
        cleaned: dict[str, Any] = super().clean() or {}
        if not self.errors:
            values = {name: self._choose_value(name, cleaned[name]) for name in self._parameters}
            try:
                args, kwargs = self._build_call(values)
                self.args, self.kwargs = normalize(args), normalize(kwargs)
                check_call(self._task.jobtype, self.args, self.kwargs)
            except (FaktoryError, TypeError, ValueError) as error:
                self.add_error(None, ValidationError(error_text(error)))
        return cleaned

    def _choose_value(self, name: str, cleaned: Any) -> Any:
        """Return the cleaned value, or the stored one or ABSENT if the user has not changed the text."""
        # A browser sends line breaks of text areas as CRLF.
        if str(self[name].data or "").replace("\r\n", "\n") != str(self.initial[name] or ""):
            return cleaned
        if name in self._stored_values:
            return self._stored_values[name]
        parameter = self._parameters[name]
        is_further = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        return ABSENT if is_further or parameter.default is not Parameter.empty else cleaned

    def _build_call(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the call: by position the arguments without a default or that the job had there, others by name."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        forced_count = self._count_forced(values)
        is_contiguous = True
        for position, (name, parameter) in enumerate(self._parameters.items()):
            value = values[name]
            match parameter.kind:
                case Parameter.VAR_POSITIONAL:
                    args += [] if value is ABSENT else value
                case Parameter.VAR_KEYWORD:
                    kwargs |= self._check_keywords(name, {} if value is ABSENT else value)
                case Parameter.KEYWORD_ONLY:
                    kwargs |= {} if value is ABSENT else {name: value}
                case _ if position < forced_count:
                    args.append(self._require_value(name, value))
                case _ if value is ABSENT:
                    is_contiguous = False
                case _ if is_contiguous and self._is_by_position(position, parameter):
                    args.append(value)
                case _:
                    is_contiguous = False
                    kwargs[name] = value
        return args, kwargs

    def _count_forced(self, values: Mapping[str, Any]) -> int:
        """Return how many parameters must be given by position, because a later argument has no other way."""
        count = 0
        for position, (name, parameter) in enumerate(self._parameters.items()):
            is_given = values[name] is not ABSENT
            if parameter.kind is Parameter.POSITIONAL_ONLY and is_given:
                count = position + 1
            elif parameter.kind is Parameter.VAR_POSITIONAL and is_given and values[name]:
                count = position
        return count

    def _is_by_position(self, position: int, parameter: Parameter) -> bool:
        if self._stored_args_count is not None:
            return position < self._stored_args_count
        return parameter.default is Parameter.empty

    def _require_value(self, name: str, value: Any) -> Any:
        """Return the value, or the default in its place."""
        value = _default_of(self._parameters[name], self._task) if value is ABSENT else value
        if value is ABSENT:
            raise ValueError(f"{name}: expected a value, because a later argument is given by position")
        return value

    def _check_keywords(self, name: str, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
        taken = sorted(
            key for key in keywords.keys() & self._parameters.keys()
            if self._parameters[key].kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        )  # fmt: skip
        if taken:
            raise ValueError(f"{name}: {taken[0]} has a field of its own")
        return keywords


# Each field below has `to_text`: it returns the text that shows a JSON value. It raises ValueError if the field cannot
# show the value.


class _BlankField(forms.CharField):
    """A text field with an empty value that need not be a string, such as null."""

    def validate(self, value: Any) -> None:
        """Reject a blank text if one is required; a text such as `null` may have an empty value."""
        if self.required and value is self.empty_value:
            raise ValidationError(self.error_messages["required"], code="required")


class _JsonField(_BlankField):
    """Any JSON value, or a list or dict of further positional or keyword arguments."""

    def __init__(self, *, expected: type | None = None, **options: Any) -> None:
        super().__init__(strip=False, widget=forms.Textarea({"rows": 2, "spellcheck": "false"}), **options)
        self._expected = expected

    def to_text(self, value: Any) -> Any:
        return format_json(json.dumps(value), WHOLE)

    def to_python(self, value: Any) -> Any:
        """Return the decoded value, the empty value for a blank text."""
        text = "" if value is None else str(value)
        if not text.strip():
            return self.empty_value
        try:
            jsontext.check_depth(text)
            # Refuses numbers such as 1e999, which become infinity and would be stored as null.
            decoded = normalize(jsontext.decode(text))
        except (FaktoryError, TypeError, ValueError) as error:
            raise ValidationError(error_text(error)) from error
        if self._expected is not None and not isinstance(decoded, self._expected):
            is_list = self._expected is list
            raise ValidationError(gettext("expected a JSON array") if is_list else gettext("expected a JSON object"))
        return decoded

    def run_validators(self, value: Any) -> None:
        """Run none: those of Django are for texts."""


class _IntegerField(forms.IntegerField):
    empty_value: Any = ABSENT
    shown_types: tuple[type, ...] = (int,)

    def to_text(self, value: Any) -> Any:
        return _expect(type(value) in self.shown_types, value)

    def clean(self, value: Any) -> Any:
        cleaned = super().clean(value)
        return self.empty_value if cleaned is None else cleaned


class _FloatField(_IntegerField, forms.FloatField):
    shown_types = (int, float)


class _TextField(forms.CharField):
    """A text of one line. A browser would change other texts, so they get a field for JSON."""

    def __init__(self, **options: Any) -> None:
        super().__init__(strip=False, widget=forms.TextInput({"class": "vTextField"}), **options)

    def to_text(self, value: Any) -> Any:
        # A blank text means the empty value of this field, such as null.
        is_shown = type(value) is str and value.isprintable()
        return _expect(is_shown and (value or (self.empty_value == "" and not self.required)), value)


class _BooleanField(forms.BooleanField):
    empty_value: Any = False

    def to_text(self, value: Any) -> Any:
        return _expect(type(value) is bool, value)


class _ChoiceField(forms.TypedChoiceField):
    """One of some JSON values; the option's value is the JSON text."""

    def __init__(self, labels: Mapping[str, str], *, has_blank: bool, **options: Any) -> None:
        choices = [("", "—")] * has_blank + list(labels.items())
        super().__init__(choices=choices, coerce=jsontext.decode, **options)

    def to_text(self, value: Any) -> Any:
        return jsontext.encode(value)


class _ReferenceField(_BlankField):
    """The text of a type that a job carries as a reference."""

    def __init__(self, name: str, **options: Any) -> None:
        attributes = {"class": "vTextField", "placeholder": _PLACEHOLDERS.get(name, "")}
        super().__init__(widget=forms.TextInput(attributes), **options)
        self._name = name

    def to_text(self, value: Any) -> Any:
        is_ours = isinstance(value, dict) and value.keys() == {TYPE, VALUE} and value[TYPE] == self._name
        return _expect(is_ours, value)[VALUE]

    def clean(self, value: Any) -> Any:
        text = super().clean(value)
        if text == self.empty_value:
            return text
        try:
            [[decoded], _] = decode_call([{TYPE: self._name, VALUE: text}], {})
        except FaktoryError as error:
            example = _PLACEHOLDERS.get(self._name, "1.20")
            text = gettext("expected a %(type)s, such as %(example)s") % {"type": self._name, "example": example}
            raise ValidationError(text) from error
        if isinstance(decoded, datetime) and timezone.is_naive(decoded):
            decoded = timezone.make_aware(decoded)
        [[encoded], _] = encode_call([decoded], {})
        return encoded


def _build_field(
    parameter: Parameter, annotation: Any, shown: Any, task: FaktoryTask[..., Any]
) -> tuple[forms.Field, Any]:
    """Return the field of a parameter and its initial text: the one of its annotation if it can show the value."""
    options: dict[str, Any] = {"label": parameter.name, "help_text": _describe(parameter)}
    if parameter.kind is Parameter.VAR_POSITIONAL:
        options |= {"label": f"*{parameter.name}", "help_text": gettext("A JSON array of further arguments.")}
        return _try_field(_JsonField(expected=list, required=False, empty_value=[], **options), [], shown)
    if parameter.kind is Parameter.VAR_KEYWORD:
        options |= {"label": f"**{parameter.name}", "help_text": gettext("A JSON object of further keyword arguments.")}
        return _try_field(_JsonField(expected=dict, required=False, empty_value={}, **options), {}, shown)
    annotation, is_nullable = _split_optional(annotation)
    has_default = parameter.default is not Parameter.empty
    # Blank means null where the task allows it, otherwise the default.
    empty_value = None if is_nullable else ABSENT
    options |= {"required": not (has_default or is_nullable)}
    has_blank = is_nullable or shown is ABSENT
    typed = _typed_field(annotation, empty_value, options, has_blank=has_blank, is_plain=task.plain_json)
    if typed is not None:
        try:
            return _try_field(typed, ABSENT if shown is None and is_nullable else shown)
        except (ValidationError, TypeError, ValueError):
            pass  # the stored value or the default is of another type
    options["help_text"] = f"JSON. {options['help_text']}"
    return _try_field(_JsonField(empty_value=ABSENT if has_default else empty_value, **options), shown)


def _try_field(field: Any, *values: Any) -> tuple[forms.Field, Any]:
    """Return the field with the text of the last value that is not absent. Raises ValidationError, ValueError."""
    given = [value for value in values if value is not ABSENT]
    text = field.to_text(given[-1]) if given else ""
    if given and text != "":
        field.clean(text)
    if isinstance(field, _JsonField):
        field.widget.attrs["rows"] = min(12, max(2, str(text).count("\n") + 1))
    return field, text


def _typed_field(
    annotation: Any, empty_value: Any, options: dict[str, Any], *, has_blank: bool, is_plain: bool
) -> forms.Field | None:
    """Return the field of an annotation; None if only JSON can represent it."""
    field: Any = None
    if annotation is bool and empty_value is not None:
        return _BooleanField(**{**options, "required": False})
    if annotation is bool:
        field = _ChoiceField({"true": gettext("yes"), "false": gettext("no")}, has_blank=has_blank, **options)
    elif annotation in (int, float):
        field = (_IntegerField if annotation is int else _FloatField)(**options)
    elif annotation is str:
        # A task that takes no null gets an empty text; a required one must not be forgotten.
        return _TextField(**options, empty_value=None if empty_value is None else "")
    elif labels := _labels_of(annotation):
        field = _ChoiceField(labels, has_blank=has_blank, **options)
    elif isinstance(annotation, type) and annotation in _TYPES and not is_plain:
        field = _ReferenceField(_TYPES[annotation], **options)
    if field is not None:
        field.empty_value = empty_value
    return field  # type: ignore[no-any-return]


def _labels_of(annotation: Any) -> dict[str, str]:
    """Return the choices of a Literal or an Enum, by their JSON; none if JSON cannot represent one."""
    if get_origin(annotation) is Literal:
        choices = [(value, str(value)) for value in get_args(annotation)]
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        choices = [(member.value, member.name) for member in annotation]
    else:
        return {}
    try:
        return {jsontext.encode(normalize(value)): label for value, label in choices}
    except (TypeError, ValueError):
        return {}


def _split_optional(annotation: Any) -> tuple[Any, bool]:
    """Return X and True for `X | None`; otherwise the annotation, and whether it allows null."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation, annotation in (None, NoneType)
    others = [one for one in get_args(annotation) if one is not NoneType]
    is_nullable = len(others) < len(get_args(annotation))
    return (others[0], is_nullable) if len(others) == 1 else (annotation, is_nullable)


def _read_hints(task: FaktoryTask[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(task.func)
    except Exception:  # noqa: BLE001  (names that are imported for type checkers only, and any other code)
        return {}


def _default_of(parameter: Parameter, task: FaktoryTask[..., Any]) -> Any:
    """Return the default as a job would carry it; ABSENT if there is none, or JSON cannot represent it."""
    if parameter.default is Parameter.empty:
        return ABSENT
    default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    try:
        [[value], _] = encode_call([default], {}, plain_json=task.plain_json)
    except (TypeError, ValueError):
        return ABSENT
    return value


def _describe(parameter: Parameter) -> str:
    parts = [] if parameter.annotation is Parameter.empty else [formatannotation(parameter.annotation).strip("'")]
    if parameter.default is not Parameter.empty:
        parts.append(gettext("default: %(value)s") % {"value": f"{parameter.default!r:.80}"})
    return ", ".join(parts)


def _expect(is_valid: Any, value: Any) -> Any:
    if not is_valid:
        raise ValueError("this field cannot show the value")
    return value
