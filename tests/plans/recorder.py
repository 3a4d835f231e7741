"""Record how PostgreSQL executed each statement of a session: `auto_explain` sends the plans to the client.

No code wraps the statements, so that those sent through libpq directly are recorded too.
"""

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from django.db import DatabaseError, connection

_SETTINGS = {
    "log_min_duration": 0,
    "log_analyze": "on",
    "log_buffers": "on",
    "log_timing": "off",
    "log_nested_statements": "on",
    "log_format": "json",
    "log_level": "notice",
}


_PARAMETER = re.compile(r"\$\d+")


class Lookup(NamedTuple):
    """How a statement reads a table. The condition is that of the index, without numbers of parameters."""

    scan: str
    table: str
    index: str | None
    condition: str


@dataclass
class Statement:
    """One statement, with the plan that PostgreSQL executed."""

    sql: str
    plan: dict
    where: str
    nodes: list = field(default_factory=list)

    @property
    def pages(self):
        """Number of pages of tables and indexes read; those of a sub-select may be counted twice.

        Pages of the catalog are not counted: a session reads them again whenever others have changed many tables. Pages
        of a function are those of its own statements.
        """
        reads = sum(_buffers(node) for node in self.nodes if _scans(node))
        writes = [node for node in self.nodes if node["Node Type"] in ("ModifyTable", "LockRows")]
        return reads + sum(_buffers(node) - sum(map(_buffers, _inputs(node))) for node in writes)

    def lookups(self, *tables):
        """Return how it reads each of these tables."""
        nodes = [node for node in self.nodes if _scans(node) and node["Relation Name"] in tables]
        return tuple(
            Lookup(
                node["Node Type"],
                node["Relation Name"],
                node.get("Index Name"),
                _PARAMETER.sub("$", node.get("Index Cond", "")),
            )
            for node in nodes
        )

    @property
    def rows(self):
        """Number of rows that the statement returned."""
        return self.plan["Actual Rows"]

    @property
    def changed(self):
        """Number of rows locked or written; a row counts each time."""
        return sum(
            child["Actual Rows"] * child["Actual Loops"]
            for node in self.nodes
            if node["Node Type"] in ("ModifyTable", "LockRows")
            for child in _inputs(node)
        )

    def reads_whole(self, table):
        """Return True if it scans this table sequentially."""
        return any("Seq Scan" in node["Node Type"] and node.get("Relation Name") == table for node in self.nodes)

    def __str__(self):
        return f"{self.where}: {self.pages} pages, {self.changed:.0f} rows locked or changed: {self.sql[:600]}"


def _scans(node):
    """Return True if it reads a table, perhaps by an index."""
    return "Scan" in node["Node Type"] and "Relation Name" in node


def _inputs(node):
    return [child for child in node.get("Plans", ()) if child.get("Parent Relationship") == "Outer"]


def _buffers(node):
    return node["Shared Hit Blocks"] + node["Shared Read Blocks"]


def _nodes(node):
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


class Recorder:
    """Record the statements of this thread's session; `during` names the operation that they belong to."""

    def __init__(self):
        self.statements = []
        self._where = ""

    def start(self):
        """Start recording; return the reason if that is impossible, else ""."""
        with connection.cursor() as cursor:
            try:
                cursor.execute("LOAD 'auto_explain'")
            except DatabaseError as error:  # it is not installed, or only a superuser may load it
                return f"PostgreSQL cannot load auto_explain: {error}"
            for name, value in _SETTINGS.items():
                cursor.execute(f"SET auto_explain.{name} = '{value}'")
        connection.connection.add_notice_handler(self._hear)
        return ""

    def stop(self):
        connection.close()

    @contextmanager
    def during(self, where):
        self._where = where
        yield
        self._where = ""

    def _hear(self, notice):
        text = notice.message_primary or ""
        _, found, body = text.partition("plan:\n")
        if found and self._where:
            entry = json.loads(body)
            nodes = list(_nodes(entry["Plan"]))
            self.statements.append(Statement(" ".join(entry["Query Text"].split()), entry["Plan"], self._where, nodes))
