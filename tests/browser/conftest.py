"""Fixtures: a real browser, and a page that records all errors and warnings of its console."""

import os
from pathlib import Path

import pytest
from django.contrib.auth.models import User

from django_faktory.brokers import get_broker
from tests.waiting import wait_until

ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
WAIT_MS = 60_000
LONGEST_PAUSE_S = 10
"""More than the pause between two updates of any page."""


class Screen:
    """A browser page that records its errors and warnings."""

    def __init__(self, page, base):
        self.page, self._base = page, base
        self.complaints = []
        page.set_default_timeout(WAIT_MS)
        page.route("**/favicon.ico", lambda route: route.fulfill(status=204))  # the favicon is the project's
        page.on(
            "console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text)
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def go(self, path):
        answer = self.page.goto(f"{self._base}{path}")
        assert answer.status == 200, f"{path}: {answer.status}"

    def log_in(self):
        self.go("/admin/login/?next=/admin/django_faktory/overview/")
        self.page.get_by_label("Username").fill("on-call")
        self.page.get_by_label("Password").fill("secret")
        self.page.get_by_role("button", name="Log in").click()
        self.page.get_by_role("heading", name="Overview", exact=True).wait_for()

    def sees(self, *words):
        main = self.page.locator("main, #main")
        for text in words:
            try:
                main.get_by_text(text).first.wait_for()
            except Exception as error:  # Playwright's, which is optional
                seen = self.page.locator("#content, #main").first.inner_text()[:2000]
                raise AssertionError(f"{text!r} is not on {self.page.url}, which says:\n{seen}") from error

    def skip_pause(self):
        """Skip the pause before the next update, until the page asks for that; the window needs `has_fake_clock`."""
        asked = []

        def has_asked():
            self.page.clock.fast_forward(1000 * LONGEST_PAUSE_S)
            return asked

        def note(request):
            if request.url.endswith("/part/"):
                asked.append(request)

        self.page.on("request", note)
        wait_until(has_asked)
        self.page.remove_listener("request", note)

    def keep(self, name):
        """Save a screenshot if FAKTORY_SCREENSHOTS names a folder."""
        if folder := os.environ.get("FAKTORY_SCREENSHOTS"):
            Path(folder).mkdir(exist_ok=True, parents=True)
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


@pytest.fixture(scope="module")
def chromium(chromium_path):
    """Start Chromium once per module. While it runs, an event loop runs in this thread: Django would refuse queries
    there, and tests of other modules could not start a loop.
    """
    from playwright.sync_api import sync_playwright  # optional; `chromium_path` has skipped the test without it

    before = os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path, args=list(ARGUMENTS))
        yield browser
        browser.close()
    os.environ.pop("DJANGO_ALLOW_ASYNC_UNSAFE")
    if before is not None:
        os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = before


@pytest.fixture
def screen(chromium, transactional_db, live_server, monkeypatch):
    """`screen(width=…, theme=…)` opens a window in which a superuser is logged in; `scale` enlarges its pages.

    With `has_fake_clock` the timers of its pages can be advanced (`Screen.skip_pause`).
    """
    get_broker.cache_clear()  # it remembers queues of earlier tests, which have no rows now
    User.objects.create_superuser("on-call", password="secret")
    opened = []

    def open_(*, width=1280, height=900, scale=1, theme="light", script=True, has_fake_clock=False):
        context = chromium.new_context(
            viewport={"width": width // scale, "height": height // scale},
            device_scale_factor=scale,
            color_scheme=theme,
            java_script_enabled=script,
        )
        opened.append(context)
        found = Screen(context.new_page(), live_server.url)
        if has_fake_clock:  # before the first page: timers of a page that is open already stay real
            found.page.clock.install()
        found.log_in()
        return found

    yield open_
    for context in opened:
        context.close()
