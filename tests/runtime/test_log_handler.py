"""The handler of `runfaktory`: one write for many records, none lost, none late."""

import io
import logging
import os
import threading
import weakref

import pytest

from django_faktory.runtime.log_handler import LogFormatter, LogHandler
from tests.programs import Program
from tests.waiting import wait_until


class Stream(io.StringIO):
    """A stream that keeps each write, and blocks them while `is_open` is not set."""

    def __init__(self):
        super().__init__()
        self.writes = []
        self.is_open = threading.Event()
        self.is_open.set()

    def write(self, text):
        self.is_open.wait(60)
        self.writes.append(text)
        return super().write(text)


def record(text, *args, level=logging.INFO):
    return logging.LogRecord("django_faktory.test", level, __file__, 1, text, args, None)


@pytest.fixture
def start_handler(monkeypatch):
    """Return a function that returns a handler that writes to a `Stream`, with its thread."""
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)  # pytest itself forks later

    def start(**options):
        handler = LogHandler(**options)
        handler.setFormatter(logging.Formatter("%(message)s"))
        handler.stream = Stream()
        handler.start_thread()
        return handler

    return start


@pytest.fixture
def handler(start_handler):
    return start_handler()


def test_records_of_many_threads_are_written_together_and_none_is_lost(handler):
    handler.stream.is_open.clear()  # like a slow disk: what comes meanwhile waits

    def log(thread):
        for number in range(500):
            handler.handle(record("%d %d", thread, number))

    threads = [threading.Thread(target=log, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    handler.stream.is_open.set()
    wait_until(lambda: handler.stream.getvalue().count("\n") == 2000)
    lines = handler.stream.getvalue().splitlines()
    for thread in range(4):
        assert [line for line in lines if line[0] == str(thread)] == [f"{thread} {number}" for number in range(500)]
    assert len(handler.stream.writes) < 100


def test_a_warning_is_written_before_the_call_returns_after_the_records_before_it(start_handler):
    handler = start_handler(delay_s=600)
    handler.handle(record("first"))
    handler.handle(record("second", level=logging.WARNING))
    assert handler.stream.getvalue() == "first\nsecond\n"


def test_a_lone_record_is_written_soon(handler):
    handler.handle(record("alone"))
    wait_until(lambda: handler.stream.getvalue() == "alone\n")


def test_the_shutdown_of_logging_writes_what_waits(start_handler):
    handler = start_handler(delay_s=600)
    handler.handle(record("last"))
    logging.shutdown([weakref.ref(handler)])
    assert handler.stream.getvalue() == "last\n"


def test_a_stream_that_blocks_stops_the_threads_that_log_before_the_memory_is_full(start_handler):
    handler = start_handler(max_waiting=100)
    handler.stream.is_open.clear()
    logged = []

    def log():
        for number in range(1000):
            handler.handle(record("%d", number))
            logged.append(number)

    thread = threading.Thread(target=log)
    thread.start()
    wait_until(lambda: len(logged) >= 100)
    thread.join(0.2)
    assert len(logged) < 210, "at most 100 records that wait, and 100 that are being written"
    handler.stream.is_open.set()
    thread.join(60)
    handler.flush()
    assert handler.stream.getvalue().split() == [str(number) for number in range(1000)]


def test_a_closed_stream_does_not_stop_the_thread(handler):
    handler.stream.close()
    handler.handle(record("lost"))
    wait_until(lambda: not handler._waiting)  # the thread has tried to write it
    handler.stream = Stream()
    handler.handle(record("kept"))
    wait_until(lambda: handler.stream.getvalue().endswith("kept\n"))


def test_a_record_that_cannot_be_formatted_is_reported_on_stderr_and_the_next_is_written(handler, capsys):
    handler.handle(record("%d", "no number"))
    handler.handle(record("next", level=logging.WARNING))
    assert handler.stream.getvalue() == "next\n"
    assert "Logging error" in capsys.readouterr().err


def test_a_forked_process_writes_its_own_records_at_once_and_its_parents_never():
    """In a program of its own: after a fork a test run would go on twice."""
    program = Program("-c", FORKING)
    try:
        assert program.code() == 0
        assert sorted(program.lines) == ["child", "parent"]
    finally:
        program.clean_up()


FORKING = """
import logging, os, sys, warnings
from django_faktory.runtime import log_handler
warnings.simplefilter("ignore")  # Python 3.12 and later warn of a fork beside threads, which is what this is about
handler = log_handler.LogHandler(delay_s=600)
handler.setFormatter(logging.Formatter("%(message)s"))
logger = logging.getLogger("django_faktory")
logger.addHandler(handler)
logger.setLevel("INFO")
log_handler.start_threads()
logger.info("parent")
pid = os.fork()
if pid == 0:
    logger.info("child")
    os._exit(0)
os._exit(os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize("created", [0.0, 1.5, 1_700_000_000.999, 1_700_000_001.0004])
@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING, logging.CRITICAL])
@pytest.mark.parametrize("error", [None, ValueError("x")])
def test_a_line_is_that_of_the_format_string(created, level, error):
    one = record("text %s", "1", level=level)
    one.created, one.msecs = created, (created - int(created)) * 1000
    one.exc_info = error and (type(error), error, None)
    formatter, usual = LogFormatter(), logging.Formatter("%(asctime)s %(levelname)-7s %(process)d %(message)s")
    for _ in range(2):  # the second time from the text that is kept
        assert formatter.format(one) == usual.format(one)
