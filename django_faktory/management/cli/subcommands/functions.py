"""`functions`: list the stored functions of PostgreSQL, or print the SQL that creates them."""

from __future__ import annotations

from django.db import connections

from ....store.dialects.postgresql import functions
from ..subcommand import OK, Invocation, flag, subcommand
from ..table import Column


@subcommand(
    "functions",
    "List the stored functions of PostgreSQL, and whether the database has those of this version.",
    flag("--sql", "Print the SQL that creates them, for an administrator who runs it by hand."),
)
def _functions(call: Invocation) -> int:
    if call.options["sql"]:
        if call.screen.is_json:
            call.screen.json({"functions": [{"name": one.name, "sql": one.text} for one in functions.read().values()]})
        else:
            call.screen.out.write(functions.sql())
        return OK
    connection = connections[call.require_alias()]
    # Other databases have none, so none is current there.
    outdated = functions.find_outdated(connection) if connection.vendor == "postgresql" else list(functions.read())
    found = [{"name": name, "is_current": name not in outdated} for name in functions.read()]
    call.screen.listing(
        {"functions": found}, _COLUMNS, ((one["name"], "yes" if one["is_current"] else "no") for one in found)
    )
    return OK


_COLUMNS = (Column("FUNCTION", is_name=True), Column("CURRENT", 1))
