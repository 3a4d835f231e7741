"""RESP replies, written and parsed: tables in both directions, every split of the bytes, hostile input."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_faktory.core.protocol import resp
from django_faktory.core.protocol.resp import BulkString, Error, ReplyReader, Simple
from django_faktory.errors import ProtocolError
from tests.core.protocol.splits import every_split

pytestmark = pytest.mark.core

TABLE = [
    (resp.simple("OK"), Simple("OK")),
    (resp.simple('HI {"v":2}'), Simple('HI {"v":2}')),
    (resp.error("Job not found abc"), Error("ERR", "Job not found abc")),
    (resp.error("Job not unique", code="NOTUNIQUE"), Error("NOTUNIQUE", "Job not unique")),
    (resp.bulk(None), BulkString(None)),
    (resp.bulk(""), BulkString("")),
    (resp.bulk("a\r\nb\n$-1\r\n"), BulkString("a\r\nb\n$-1\r\n")),
    (resp.bulk("é😀"), BulkString("é😀")),
]


def read(pieces):
    reader, found = ReplyReader(), []
    for piece in pieces:
        reader.feed(piece)
        while (reply := reader.next()) is not None:
            found.append(reply)
    return found


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        (resp.OK, b"+OK\r\n"),
        (resp.simple("hé"), b"+h\xc3\xa9\r\n"),
        (resp.error("no"), b"-ERR no\r\n"),
        (resp.error("no", code="NOTUNIQUE"), b"-NOTUNIQUE no\r\n"),
        (resp.bulk(None), b"$-1\r\n"),
        (resp.bulk(""), b"$0\r\n\r\n"),
        (resp.bulk("é"), b"$2\r\n\xc3\xa9\r\n"),
        (resp.bulk("a\ud800"), b"$2\r\na?\r\n"),
    ],
)
def test_replies_are_written_as_the_expected_bytes(written, sent):
    assert written == sent


def test_many_replies_are_read_in_order_at_every_split():
    stream = b"".join(sent for sent, _ in TABLE)
    for pieces in every_split(stream):
        assert read(pieces) == [reply for _, reply in TABLE]


@given(st.text(alphabet=st.characters(codec=None, categories=None)))
def test_an_error_reply_is_one_line_for_any_message(text):
    sent = resp.error(text)
    assert sent.endswith(b"\r\n")
    line = sent[:-2].decode()
    assert len(line) <= len("-ERR ") + resp.MAX_LINE
    assert not re.search("[\x00-\x1f\x7f-\x9f\u2028\u2029]", line)
    assert line.splitlines() == [line]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\r\nb", r"a\r\nb"),
        ("\x00\x1b\x7f\x85", r"\x00\x1b\x7f\x85"),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("\ud800", r"\ud800"),
        ("déjà 😀", "déjà 😀"),
    ],
)
def test_control_characters_in_reply_lines_are_escaped(text, line):
    assert resp.error(text) == f"-ERR {line}\r\n".encode()
    assert resp.simple(text) == f"+{line}\r\n".encode()


def test_a_long_error_message_is_truncated():
    assert len(resp.error("\x00" * 10_000)) <= len("-ERR …\r\n") + resp.MAX_LINE + 2
    assert resp.error("x" * 10_000_000) == b"-ERR " + b"x" * (resp.MAX_LINE - 1) + "…\r\n".encode()
    assert resp.error("x" * resp.MAX_LINE) == b"-ERR " + b"x" * resp.MAX_LINE + b"\r\n"


@given(st.lists(st.one_of(st.none(), st.text())))
def test_all_bulk_strings_round_trip(texts):
    assert read([b"".join(resp.bulk(text) for text in texts)]) == [BulkString(text) for text in texts]


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\r\n",
        b":5\r\n",
        b"$\r\n",
        b"$-2\r\n",
        b"$+1\r\na\r\n",
        b"$ 1\r\na\r\n",
        b"$536870913\r\n",
        b"$00000000000000000001\r\na\r\n",
        b"$" + b"1" * 100,
        b"$1\r\nabc",
        b"$2\r\n\xff\xfe\r\n",
        b"+\xff\r\n",
        b"-ERR \xff\r\n",
        b"+" + b"x" * 1_100_000,
    ],
)
def test_invalid_reply_bytes_are_refused_and_the_reader_stays_failed(garbage):
    reader = ReplyReader()
    reader.feed(garbage)
    for _ in range(2):
        with pytest.raises(ProtocolError, match="expected"):
            reader.next()
        reader.feed(resp.OK)


def test_a_large_reply_in_small_pieces_is_parsed_in_linear_time():
    """16 MiB in pieces of 1 KiB: quadratic copying would take minutes."""
    text = "x" * (16 * 1024 * 1024)
    stream = resp.bulk(text) + resp.OK * 100_000
    began = time.process_time()
    found = read(stream[at : at + 1024] for at in range(0, len(stream), 1024))
    assert len(found) == 100_001
    assert found[0] == BulkString(text)
    assert time.process_time() - began < 5
