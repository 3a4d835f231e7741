"""Test that texts from clients, peers and tasks cannot start a line of their own in a log."""

import io
import logging
import re

import pytest

from django_faktory.core.logs import MARGIN, Lines, get_logger, one_line
from tests.server.raw import RawClient, push
from tests.test_house_rules import PACKAGE, name, tree

pytestmark = pytest.mark.once

FORGED = "2026-01-01 00:00:00,000 ERROR    1 root was here"
HOSTILE = [
    f"x\n{FORGED}",
    f"x\r\n{FORGED}",
    f"x\r{FORGED}",
    f"x\x0b{FORGED}",
    f"x\x85{FORGED}",
    f"x\u2028{FORGED}",
    f"x\x1b[2J{FORGED}",
    f"x\x00{FORGED}",
    f"x\u202e{FORGED}",
]


def fails(text):
    raise ValueError(text)


@pytest.fixture
def log():
    """Yield one of the package's loggers; `log.written()` returns the text that its handler has written."""
    stream = io.StringIO()
    logger = get_logger("django_faktory.tests_of_logs")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.written = stream.getvalue
    yield logger
    logger.removeHandler(handler)
    logger.propagate = True


@pytest.mark.core
@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("kind", [str, ValueError, lambda text: [text]], ids=["text", "error", "list"])
@pytest.mark.parametrize("form", ["%s", "%r", "%.300r"])
def test_a_log_argument_stays_on_its_line(log, text, kind, form):
    log.error(f"event key={form}", kind(text))
    assert log.written().isascii()
    assert re.fullmatch(r"ERROR event key=[ -~]*was here[ -~]*\n", log.written())


@pytest.mark.core
@pytest.mark.parametrize("text", HOSTILE)
def test_traceback_lines_cannot_be_mistaken_for_log_records(log, text):
    try:
        fails(text)
    except ValueError:
        log.exception("task failed")
    first, *rest = log.written().splitlines()
    assert first == "ERROR task failed"
    assert rest
    assert all(line.startswith(MARGIN) and line.isprintable() for line in rest)
    assert "was here" in log.written()


@pytest.mark.core
def test_handlers_still_receive_the_original_exception(caplog):
    with caplog.at_level(logging.ERROR):
        try:
            fails("x\ny")
        except ValueError:
            get_logger("django_faktory.tests_of_logs").exception("task failed")
    assert str(caplog.records[0].exc_info[1]) == "x\ny"


@pytest.mark.core
def test_intended_multi_line_texts_are_indented(log):
    log.warning("stacks pid=%d%s", 7, Lines("one\n\ttwo"))
    assert log.written() == f"WARNING stacks pid=7\n{MARGIN}one\n{MARGIN}    two\n"


@pytest.mark.core
def test_printable_text_of_any_language_is_unchanged():
    assert one_line("Grüße, 世界") == "Grüße, 世界"


@pytest.mark.core
def test_every_module_of_the_package_uses_the_safe_logger():
    own = [path for path in PACKAGE if "getLogger(__name__)" in path.read_text(encoding="utf-8") and tree(path)]
    assert [name(path) for path in own] == []


def test_hostile_names_and_messages_forge_no_log_lines_of_runfaktory(runfaktory, address):
    program = runfaktory("127.0.0.1:0", "--processes", "1", "--no-reload", UNKNOWN_JOBTYPE_GRACE=0)
    server = address(program)
    client = RawClient.identified(server, hostname=f"h\n{FORGED}", labels=[f"l\n{FORGED}"])
    for number, text in enumerate(HOSTILE):
        job = {"jid": f"hostile-{number:04d}", "retry": 0, "custom": {"track": 1}}
        client.ask(push(**job, jobtype=text.replace("\x00", "")))
    client.ask(push(jid=f"jid-jid-\n{FORGED}", jobtype=f"unknown\n{FORGED}", retry=0))
    client.ask(push(jid="bad-queue", queue=f"q\n{FORGED}"))
    client.ask(f"BEAT {{}}\x1b{FORGED}")
    program.wait_for_log("job cannot run", "jid=jid-jid-", timeout_s=60)
    client.close()
    lines = list(program.lines)
    assert any("was here" in line for line in lines)
    begun = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ +\d+ ")
    stray = [line for line in lines if not begun.match(line) and not line.startswith((MARGIN, "runfaktory: "))]
    assert [line for line in lines if line.startswith(FORGED)] == []
    assert [line for line in lines if not line.isprintable()] == []
    assert [line for line in stray if "was here" in line] == []
