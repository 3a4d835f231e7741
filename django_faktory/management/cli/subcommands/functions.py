"""`functions`: list the stored functions of PostgreSQL and the triggers, or print the SQL that creates them."""

from __future__ import annotations

from django.db import connections

from ....store.dialects import triggers
from ....store.dialects.postgresql import functions
from ....store.statistics import deltas
from ..subcommand import OK, Invocation, flag, subcommand
from ..table import Column


@subcommand(
    "functions",
    "List the stored functions of PostgreSQL and the triggers, and whether the database has those of this version.",
    flag("--sql", "Print the SQL that creates them, for an administrator who runs it by hand."),
)
def _functions(call: Invocation) -> int:
    connection = connections[call.require_alias()]
    is_postgresql = connection.vendor == "postgresql"
    statements = {one.name: one.text for one in functions.read().values()} if is_postgresql else {}
    statements |= {one.name: f"{one.sql};\n" for one in triggers.build(connection)}
    if call.options["sql"]:
        if call.screen.is_json:
            call.screen.json({"functions": [{"name": name, "sql": sql} for name, sql in statements.items()]})
        else:
            call.screen.out.write("\n".join(statements.values()))
        return OK
    outdated = {*triggers.find_outdated(connection), *(functions.find_outdated(connection) if is_postgresql else ())}
    found = [{"name": name, "is_current": name not in outdated} for name in statements]
    call.screen.listing(
        {"functions": found}, _COLUMNS, ((one["name"], "yes" if one["is_current"] else "no") for one in found)
    )
    return OK


_COLUMNS = (Column("FUNCTION", is_name=True), Column("CURRENT", 1))


@subcommand("recount", "Count all jobs, and correct the numbers that pages and metrics show.")
def _recount(call: Invocation) -> int:
    wrong = deltas.recount(using=call.require_alias())
    found = [{"kind": kind, "name": name, "by": by} for (kind, name), by in sorted(wrong.items())]
    columns = (Column("NUMBER"), Column("OF", is_name=True), Column("CORRECTED BY", 1))
    call.screen.listing({"corrected": found}, columns, (tuple(one.values()) for one in found))
    return OK
