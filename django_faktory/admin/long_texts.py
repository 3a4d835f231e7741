"""Columns with long texts: no list or page reads them whole; pages show their beginning, and a link to a download."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from django.contrib import admin
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import FileResponse, Http404, HttpRequest
from django.http.response import HttpResponseBase
from django.template.loader import render_to_string
from django.urls import URLPattern, path
from django.utils.safestring import SafeString
from django.views.decorators.http import require_safe

from ..models import permissions
from ..store import texts
from ..tasks import redaction
from .formats import StrOrPromise
from .links import page_url
from .lists import AnyQuerySet

if TYPE_CHECKING:
    AnyAdmin = admin.ModelAdmin[Any]
else:  # Django's own classes take no type parameters at run time
    AnyAdmin = admin.ModelAdmin


class LongText(NamedTuple):
    """A column with long texts: the permission that shows it, its redaction, and its file type."""

    field: str = ""
    """Its name in `permissions.FIELDS`; "" if the permission to view the row suffices."""
    redact: Callable[[Any, str], str] | None = None
    """Return the visible part of a row's text; None if `REDACT` does not apply to the column."""
    is_json: bool = True


class ShownText(NamedTuple):
    """The part of a text that a page shows, and the address of the whole text."""

    text: str
    size: int
    is_cut: bool
    url: str


def build_shown_text(stored: texts.StoredText, url: str, text: str | None = None) -> ShownText:
    """Return the beginning of a stored text, or of `text` if that is given instead."""
    full_text = texts.format_json(stored.text) if text is None else text
    beginning = texts.cut(full_text)
    return ShownText(beginning, stored.size, not stored.is_whole or len(beginning) < len(full_text), url)


def long_text_column(column: str, description: StrOrPromise) -> Callable[[Any, Any], SafeString]:
    """Return a method that shows the visible beginning of this long text of a row, with a link to its download."""

    @admin.display(description=description)
    def show(model_admin: LongTexts, row: Model) -> SafeString:
        text = model_admin.read_shown_texts(row, column)[column]
        return render_to_string("admin/django_faktory/long_text.html", {"text": text})

    return show


class LongTexts(AnyAdmin):
    """Defer the columns of `long_texts`, and offer their downloads."""

    long_texts: ClassVar[Mapping[str, LongText]] = {}
    """Columns that no list and no page reads whole; they can be downloaded."""

    beginnings: ClassVar[Mapping[str, int]] = {}
    """Columns of `long_texts` that the list shows, and the number of characters it reads of each."""

    def get_queryset(self, request: HttpRequest) -> AnyQuerySet:
        """Defer the columns with long texts, so that they are not read."""
        return super().get_queryset(request).defer(*self.long_texts)

    def get_urls(self) -> list[URLPattern]:
        """Add the downloads of long texts."""
        if not self.long_texts:
            return super().get_urls()
        view = self.admin_site.admin_view(require_safe(self._download))
        name = f"{self.opts.app_label}_{self.opts.model_name}_download"
        # Before Django's patterns: the last of them, `<path:object_id>/`, matches this address too.
        return [path("<path:object_id>/download/<slug:column>/", view, name=name), *super().get_urls()]

    def download_url(self, row: Model, column: str) -> str:
        """Return the download address of the whole text."""
        return page_url(f"{self.opts.model_name}_download", quote(row.pk), column)

    def read_shown_texts(self, row: Model, *columns: str) -> dict[str, ShownText]:
        """Read these long texts of a row, in one query, as far as a page shows them."""
        return {
            column: build_shown_text(self.redact_stored(row, column, stored), self.download_url(row, column))
            for column, stored in texts.read(row, *columns).items()
        }

    def redact_stored(self, row: Model, column: str, stored: texts.StoredText) -> texts.StoredText:
        """Apply `REDACT` to a text. A text that was not read whole is hidden."""
        redact = self.long_texts[column].redact
        if redact is None or not stored.size:
            return stored
        if stored.is_whole:
            text = redact(row, stored.text)
            # With its own length: the stored one would make a shorter text count as cut off.
            return texts.StoredText(text, len(text))
        # The beginning of a JSON text cannot be parsed, so the project's function cannot be applied to it.
        return texts.StoredText(redaction.HIDDEN, stored.size) if redaction.is_on() else stored

    def _download(self, request: HttpRequest, object_id: str, column: str) -> HttpResponseBase:
        """Send a text as a file: all of it, redacted as on the page."""
        long_text = self.long_texts.get(column)
        model = str(self.opts.model_name)
        # Before the row is read: an answer of 404 would reveal to other users which rows and columns exist.
        if not permissions.may_see(request.user, model, long_text.field if long_text else None):
            raise PermissionDenied
        row = self.get_object(request, unquote(object_id))
        if row is None or long_text is None:
            raise Http404
        text = texts.read_whole(row, column)
        if long_text.redact is not None and text:
            text = long_text.redact(row, text)
        is_json = long_text.is_json
        content_type, extension = ("application/json", "json") if is_json else ("text/plain; charset=utf-8", "txt")
        return FileResponse(
            # Lone surrogates, which JSON allows, cannot be encoded.
            BytesIO(text.encode("utf-8", "replace")),
            as_attachment=True,
            filename=f"{model}-{row.pk}-{column}.{extension}",
            content_type=content_type,
        )
