"""Operations on sets of jobs: retry, requeue, restart, cancel, kill, discard, prune.

Any query can select jobs in this database. Jobs on a Faktory server are selected by what its command MUTATE supports:
a set, and jids or one task.
"""

from __future__ import annotations

from ....core.lifecycle import State
from ....core.mutation import TARGETS, Mutation
from ....core.queries import Query
from ....operations import bulk
from ....operations.bulk import Run
from ....operations.job_actions import JOB_ACTIONS, Verb
from ....store.batches import batches
from ....store.maintenance import due
from ....store.store import Store
from ..screen import quantity, span
from ..subcommand import INTERRUPTED, NOTHING, OK, YES, Argument, Invocation, Unsupported, flag, subcommand, whole

_QUERY = Argument("query", nargs="+", help="Which jobs, such as: dead queue:mail error:Timeout older:2d, or a jid.")
_PRUNED = Argument("query", nargs="*", help="Which jobs, such as: dead older:1h; those past their retention if none.")
_BOUNDS = (
    Argument(
        "--limit",
        type=whole,
        metavar="N",
        help="Maximum number of jobs, newest first: try one, then the remaining ones.",
    ),
    flag("--dry-run", "Only print how many jobs would change."),
)
_PER_MINUTE = Argument(
    "--per-minute",
    type=whole,
    metavar="N",
    help="Run at most N of them in a minute, the oldest first; the others wait.",
)


def _run_operation(call: Invocation) -> int:
    """Perform the operation that the subcommand is named after."""
    verb, query = Verb(call.name), call.parse_query()
    if verb is Verb.PRUNE and query.is_empty:
        return _prune_expired(call)
    # An empty query would mean every job: a forgotten argument must not discard everything.
    if query.is_empty:
        raise Unsupported(
            f"{verb}: expected a query; such as {' or '.join(sorted(JOB_ACTIONS[verb].states))} for all of these"
        )
    # MUTATE affects no running jobs and no steps, and cannot set times: `require_alias` rejects these.
    if call.alias is None and verb not in (Verb.CANCEL, Verb.RESTART) and not call.options.get("per_minute"):
        return _run_on_remote_server(call, verb, query)
    using, options = call.require_alias(), call.options
    every_s = 60 / options["per_minute"] if options.get("per_minute") else 0.0
    run = bulk.begin(verb, query, newest=options["limit"], every_s=every_s, using=using)
    rows = run.rows(using=using).filter(pk__gt=run.after, pk__lte=run.upto)
    total = rows.count()
    if not total:
        call.note_unknown_names(query)
    if options["dry_run"]:
        _print_result(call, query, 0, total=total)
        return OK if total else NOTHING
    if total and JOB_ACTIONS[verb].warning:
        call.require_confirmation(f"{verb} {quantity(total, 'job')} ({query})?")
    return _execute(call, query, run, total)


for _verb in reversed(Verb):  # the last one added comes first in the help
    _arguments = [_PRUNED if _verb is Verb.PRUNE else _QUERY, *_BOUNDS]
    _arguments += [_PER_MINUTE] * (_verb is Verb.RETRY) + [YES] * bool(JOB_ACTIONS[_verb].warning)
    subcommand(_verb, JOB_ACTIONS[_verb].help, *_arguments)(_run_operation)


def _execute(call: Invocation, query: Query, run: Run, total: int) -> int:
    using, limit = call.require_alias(), call.options["limit"] or total
    try:
        with call.screen.progress(call.name, total) as advance:
            while total and not run.is_over and run.placed < limit:
                placed = run.placed
                run = run.step(using=using, size=limit - placed)
                advance(run.placed - placed)
    # Each step is its own transaction: report the finished ones, so that the same command can continue.
    except KeyboardInterrupt:
        left = max(total - run.placed, 0)
        _print_result(call, query, run.changed, total=total, left=left)
        # The oldest come first, so the newest are left, which a smaller limit selects. A second run that starts earlier
        # would give workers jobs of both runs at the same time.
        again = f"with --limit {left}" if call.options["limit"] else "again"
        pace = f" in {span(run.placed * run.every_s)} to continue at this pace" if run.every_s else " to continue"
        call.screen.note(f"stopped; run the same command {again}{pace}" if left else "stopped; no job is left")
        return INTERRUPTED
    _print_result(call, query, run.changed, total=total)
    if run.changed and run.every_s:
        call.screen.note(f"the last one runs in {span((run.placed - 1) * run.every_s)}")
    return OK if run.changed else NOTHING


def _print_result(call: Invocation, query: Query, changed: int | None, *, total: int | None, left: int = 0) -> None:
    if call.screen.is_json:
        call.screen.json({"query": str(query), "found": total, "changed": changed, "dry_run": call.options["dry_run"]})
    elif call.options["dry_run"]:
        call.screen.line(f"{call.name}: {quantity(total, 'job')} would be changed")
    elif changed is None:
        call.screen.line(f"{call.name}: done; the server does not report the number of jobs")
    else:
        # Between the count and its step, a worker or another command may have changed a job.
        skipped = (total or 0) - left - changed
        note = f", {skipped} skipped: already in another state" if skipped > 0 else ""
        call.screen.line(f"{call.name}: {quantity(changed, 'job')}{note}")


def _prune_expired(call: Invocation) -> int:
    """Delete now what maintenance would delete later: finished jobs and batches past their retention."""
    alias = call.require_alias()
    if call.options["dry_run"] or call.options["limit"]:
        raise Unsupported("prune: --dry-run and --limit go with a query, such as: prune succeeded older:1h")
    deleted = 0
    # Each call deletes a bounded number of rows.
    while count := due.purge(Store(alias)) + batches.purge(Store(alias)):
        deleted += count
    _print_result(call, Query(), deleted, total=deleted)
    return OK if deleted else NOTHING


def _run_on_remote_server(call: Invocation, verb: Verb, query: Query) -> int:
    # First, so that an unsupported query fails before the confirmation.
    mutations = _mutations(call, verb, query)
    if call.options["dry_run"] or call.options["limit"]:
        raise Unsupported(f"{call.name}: a Faktory server elsewhere supports neither --dry-run nor --limit")
    if JOB_ACTIONS[verb].warning:
        call.require_confirmation(f"{verb} all of: {query}?")
    for mutation in mutations:
        call.broker.mutate(mutation)
    _print_result(call, query, None, total=None)
    return OK


def _mutations(call: Invocation, verb: Verb, query: Query) -> list[Mutation]:
    legal = tuple(State(target) for target in TARGETS if State(target) in JOB_ACTIONS[verb].states)
    # Without a state the mutation is sent once for each set that is legal for this operation.
    states = query.states or legal
    expressible = Query(states=query.states, tasks=query.tasks, jids=query.jids)
    is_one_task = len(query.tasks) <= 1 and not any(task.is_prefix for task in query.tasks)
    # A condition that MUTATE cannot express must not be dropped: more jobs would be changed.
    is_expressible = query == expressible and is_one_task and not (query.tasks and query.jids)
    if verb is Verb.PRUNE or not is_expressible or not set(states) <= set(legal):
        raise Unsupported(
            f"{call.name}: a Faktory server elsewhere takes state:{','.join(sorted(legal))} with jids or one whole "
            f"task:, and no other words"
        )
    return [
        Mutation(
            # MUTATE has no retry; requeue of the retries and dead sets does the same.
            command="requeue" if verb is Verb.RETRY else str(verb),
            target=str(state),
            jids=query.jids or None,
            jobtype=query.tasks[0].text if query.tasks else "",
        )
        for state in states
    ]
