"""Statements of the package name their columns, so that new columns of a later release do not change their meaning."""

import ast
import re
from pathlib import Path

import pytest

import django_faktory

pytestmark = pytest.mark.core

PACKAGE = Path(django_faktory.__file__).parent
TABLE = r"(?:\{[\w.]+\}|django_faktory_\w+)"
NAMELESS = {
    "takes all columns of a table": rf"SELECT\s+(?:DISTINCT\s+(?:ON\s*\(.*?\)\s*)?)?\*\s+FROM\s+{TABLE}",
    "returns all columns": r"RETURNING\s+(?:\w+\.)?\*",
    "inserts without naming columns": rf"INSERT\s+INTO\s+{TABLE}(?:\s+AS\s+\w+)?\s*(?:VALUES|SELECT|DEFAULT|\{{)",
    "copies without naming columns": rf"COPY\s+{TABLE}\s+(?:FROM|TO)\b",
}
ALIAS = rf"{TABLE}\s+AS\s+(\w+)"


def complaints(text):
    """Return the clauses of a statement that do not name their columns."""
    found = [what for what, pattern in NAMELESS.items() if re.search(pattern, text, re.IGNORECASE | re.DOTALL)]
    named = {alias for alias in re.findall(ALIAS, text) if re.search(rf"\b{alias}\.\*", text)}
    return found + [f"takes all columns of {alias}" for alias in sorted(named)]


def texts(source):
    """Yield each string literal; an f-string contains its expressions in braces."""
    parts = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts.update(node.values)
            values = [
                part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
                for part in node.values
            ]
            yield "".join(map(str, values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            yield node.value


def test_each_statement_names_its_columns():
    found = {
        (path.relative_to(PACKAGE).as_posix(), what)
        for path in PACKAGE.rglob("*.py")
        for text in texts(path.read_text(encoding="utf-8"))
        for what in complaints(text)
    }
    assert found == set()


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM {JOB} WHERE id = 1",
        "SELECT DISTINCT ON (jid) * FROM django_faktory_job",
        "UPDATE {JOB} SET wid = '' RETURNING *",
        "DELETE FROM {JOB} AS j RETURNING j.*",
        "SELECT j.*, 1 FROM {JOB} AS j",
        "INSERT INTO {COUNTER} VALUES (%s)",
        "INSERT INTO {COUNTER} AS c SELECT 1",
        "INSERT INTO {COUNTER} {row}",
        "COPY {JOB} FROM STDIN",
    ],
)
def test_a_statement_without_column_names_is_detected(statement):
    assert complaints(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT COUNT(*) FROM {JOB}",
        "WITH gone AS (DELETE FROM {JOB} RETURNING id) SELECT * FROM gone",
        "INSERT INTO {COUNTER} AS c (day) SELECT 1",
        "COPY {JOB} (jid, queue) FROM STDIN",
    ],
)
def test_a_statement_with_column_names_is_accepted(statement):
    assert complaints(statement) == []
