"""Tables of tests that `make test` leaves to `make test-all`, and of tests that run on one database only.

An entry is a folder, a module or a test below tests/: "soak", "contrib/api", "worker/test_idle.py",
"worker/test_idle.py::test_…".
"""

import pytest

from tests.examples import examples

SLOW = (
    "admin/test_language.py::test_each_page_is_translated_as_a_whole",
    "admin/test_language.py::test_german_pages_have_no_placeholder_and_no_english_menu",
    "admin/test_hostile.py::test_a_word_of_a_megabyte_adds_no_element_to_a_page",
    "admin/test_hostile.py::test_hostile_texts_of_clients_add_no_element_to_a_page",
    "admin/test_speed.py::test_pages_with_20_rows_take_as_many_statements_as_with_3",
    "attacks/test_attacks.py",
    "browser",
    "admin/test_lookups.py::test_random_parameters_are_rejected_or_do_not_filter",
    "contrib/api/test_hostile.py",
    "contrib/api/test_without_the_extra.py",
    "contrib/api/test_openapi.py::test_no_request_is_answered_with_a_5xx",
    "contrib/gearmonkey/test_admin.py::test_hostile_texts_of_peers_do_not_change_the_elements_of_the_page",
    "contrib/gearmonkey/test_functions.py::test_without_redis_py_only_gearmonkey_is_unavailable",
    "contrib/gearmonkey/test_gateway.py::test_runfaktory_runs_a_gateway_and_kills_lose_no_job",
    "contrib/gearmonkey/test_hardened.py",
    "contrib/gearmonkey/test_runfaktory.py",
    "contrib/gearmonkey/test_servers.py",
    "contrib/metrics/test_exports.py::test_exports_a_bounded_number_of_lines_for_20_000_queues",
    "deadlocks",
    "deploys",
    "example/test_demo.py",
    "faults",
    "interop",
    "management/cli/test_hostile.py",
    "outside/test_outside.py",
    "plans",
    "runtime/processes",
    "runtime/supervisor/test_supervisor.py::test_a_child_suspended_by_a_signal_is_not_killed",
    "runtime/supervisor/test_supervisor.py::test_an_unresponsive_child_is_killed_before_the_grace_period_ends",
    "runtime/supervisor/test_supervisor.py::test_a_child_that_runs_but_makes_no_progress_is_replaced",
    "runtime/supervisor/test_supervisor.py::test_a_hanging_farewell_is_ended_by_a_timeout",
    "runtime/supervisor/test_supervisor.py::test_time_while_the_supervisor_is_suspended_counts_no_missed_heartbeats",
    "runtime/supervisor/test_supervisor.py::test_an_unresponsive_child_is_visible_to_the_other_children",
    "server/handlers/test_jobs.py::test_clients_that_disconnect_during_a_fetch_lose_no_job",
    "server/test_going_away.py::test_a_job_is_released_if_only_part_of_its_reply_was_sent",
    "server/test_limits.py::test_a_stopping_server_waits_until_a_slow_client_has_read_its_reply",
    "server/test_limits.py::test_a_slow_reader_receives_a_large_job_completely",
    "server/test_long_lines.py::test_other_clients_are_answered_while_a_long_line_is_parsed",
    "security/test_permission_matrix.py::test_each_marker_is_shown_to_users_with_its_permissions",
    "security/test_redaction.py::test_admin_log_and_confirmation_pages_show_no_hidden_arguments",
    "security/test_redaction.py::test_admin_pages_show_arguments_without_redaction",
    "security/test_redaction.py::test_api_responses_show_arguments_without_redaction",
    "security/test_secrets.py::test_a_password_in_a_command_line_url_causes_a_warning",
    "security/test_secrets.py::test_a_public_server_without_a_password_warns_when_it_starts",
    "soak",
    "store/limits/test_exact.py::test_two_nodes_with_locks_and_sweeps_keep_the_limit_without_repairs",
    "store/locks/test_processes.py",
    "store/statistics/test_counter_rows.py::test_no_count_is_lost_while_rows_are_folded",
    "store/statistics/test_counts.py::test_twenty_thousand_queues_are_counted_in_one_statement",
    "store/locks/test_running.py::test_eight_clients_with_ten_keys_never_overlap_and_lose_no_job",
    "tasks/test_cron.py::test_edits_pauses_and_new_entries_take_effect_without_a_restart",
    "tenants",
    "test_snapshots.py",
    "tools/test_benchmarks.py",
    "tools/test_own_servers.py",
    "typing",
    "worker/test_worker.py::test_jobs_that_cannot_be_reported_at_shutdown_are_logged_by_jid",
)
"""Tests that kill or roll out processes, run or race for seconds, or drive a browser or another client.

Also tests of claims that other tests in `make test` check.
"""

QUICK = (
    "contrib/gearmonkey/test_hardened.py::test_h01_a_naive_worker_executes_a_job_of_our_client",
    "contrib/gearmonkey/test_hardened.py::test_h02_our_worker_executes_a_job_of_a_naive_client",
    "contrib/gearmonkey/test_hardened.py::test_h05_a_job_fails_after_five_of_its_workers_have_died",
    "contrib/gearmonkey/test_hardened.py::test_h12_dead_workers_do_not_answer_a_roll_call",
    "contrib/gearmonkey/test_hardened.py::test_h14_a_job_lost_by_another_worker_is_queued_again_once",
    "contrib/gearmonkey/test_runfaktory.py::test_a_task_serves_a_function",
    "contrib/gearmonkey/test_servers.py::test_a_closed_client_leaves_no_connection_to_a_sentinel",
    "contrib/gearmonkey/test_servers.py::test_a_standalone_worker_fails_with_an_error_if_redis_has_no_memory",
    "contrib/gearmonkey/test_servers.py::test_clients_find_the_master_through_sentinels",
    "contrib/gearmonkey/test_servers.py::test_the_documented_access_list_is_sufficient_and_permits_nothing_else",
    "runtime/processes/test_isolation.py",
    "runtime/processes/test_leases.py::test_a_delivered_job_stays_with_its_worker",
    "runtime/processes/test_pid_one.py::test_process_1_ends_on_sigterm_with_all_its_children",
    "runtime/processes/test_probes.py",
    "runtime/processes/test_recycling.py::test_a_replaced_worker_unregisters_itself",
    "runtime/processes/test_runfaktory.py::test_a_second_signal_ends_the_program_and_requeues_the_job",
    "runtime/processes/test_runfaktory.py::test_one_command_runs_the_server_and_the_workers",
    "runtime/processes/test_runfaktory.py::test_running_jobs_finish_during_shutdown",
    "runtime/processes/test_runfaktory.py::test_the_job_of_a_killed_worker_runs_again",
)
"""Exceptions from SLOW: one test for each claim about processes stays in `make test`."""

CORE = ("brokers/test_tls.py", "core", "tools")
"""Tests that need no database. Modules elsewhere are marked `core` themselves."""

ONCE = (
    "admin/test_arguments.py",
    "admin/test_hostile.py",
    "admin/test_job_log.py",
    "admin/test_language.py",
    "admin/test_large_jobs.py",
    "admin/test_navigation.py",
    "admin/test_read_only.py",
    "admin/test_run_task.py",
    "attacks",
    "browser",
    "checks/test_security.py",
    "contract/test_remote.py",
    "contrib/api",
    "contrib/gearmonkey",
    "docs",
    "example",
    "interop",
    "management/cli",
    "runtime/processes/test_migrations.py",
    "runtime/processes/test_pid_one.py",
    "runtime/processes/test_probes.py",
    "runtime/processes/test_replacing.py",
    "runtime/processes/test_runfaktory.py",
    "runtime/processes/test_unresponsive.py",
    "security",
    "server/test_going_away.py",
    "server/test_handshake.py",
    "server/test_limits.py",
    "server/test_long_lines.py",
    "server/test_order.py",
    "server/test_protocol_page.py",
    "server/test_tls.py",
    "tasks/test_refusals.py",
    "tasks/test_registry.py",
    "typing",
    "worker/test_draining.py",
    "worker/test_interrupt.py",
    "worker/test_worker.py",
)
"""Tests that do not depend on the kind of database: they run on the first one only, except modules marked
`each_database`.
"""

ONCE_IF_QUICK = (
    "admin",
    "checks",
    "contrib/api/test_speed.py",
    "contrib/metrics",
    "contrib/transfer",
    "models/test_about.py",
    "operations",
    "runtime/processes",
    "runtime/test_alarm_notifier.py",
    "runtime/test_maintenance.py",
    "server",
    "tasks",
    "testing",
    "worker",
)
"""Tests with little SQL or transactions: `make test` runs them on the first database only, except EACH."""

LINTED = ("test_house_rules.py", "test_layout.py", "test_prose.py")
"""Tests that `make lint` runs, and no run of tests that does not name them."""

PORTABLE = (
    "models/test_querysets.py",
    "store/jobs/test_edits.py",
    "store/jobs/test_scan.py",
    "store/jobs/test_state_machine.py",
    "store/jobs/test_tracking.py",
    "store/limits/test_settings.py",
)
"""Tests of statements that MariaDB shares with SQLite (`store/dialects/portable.py`), without concurrency: `make test`
runs them on these two other databases only, except EACH.
"""

EACH = (
    "models/test_querysets.py::test_common_queries_use_an_index",
    "runtime/processes/test_isolation.py",
    "runtime/processes/test_runfaktory.py::test_the_job_of_a_killed_worker_runs_again",
    "runtime/test_maintenance.py::test_an_idle_minute_takes_at_most_86_sql_statements",
    "server/handlers/test_batches.py::test_a_refused_commit_does_not_repeat_batch_new_of_the_same_set",
    "server/handlers/test_batches.py::test_other_clients_are_answered_while_a_commit_waits_for_the_batch_lock",
    "server/handlers/test_batches.py::test_other_jobs_proceed_while_member_reports_wait_for_the_batch_lock",
    "server/test_async_exchange.py",
    "server/test_job_options.py",
    "server/test_lock_waits.py",
    "server/test_prefetch_buffer.py",
    "tasks/test_atomic.py",
    "tasks/test_atomic_commit.py",
    "tasks/test_isolation.py",
    "worker/test_limits.py::test_a_succeeded_job_shows_its_last_progress",
    "worker/test_limits.py::test_the_thread_continues_with_working_connections_after_a_timeout",
)
"""Exceptions from ONCE_IF_QUICK and PORTABLE: `make test` runs them on each database."""


TABLES = {
    "slow": (SLOW, QUICK),
    "core": (CORE, ()),
    "once": (ONCE, ()),
    "once_if_quick": (ONCE_IF_QUICK, EACH),
    "portable": (PORTABLE, EACH),
    "linted": (LINTED, ()),
}
"""Each marker with its table and the exceptions."""


def left_out(kind, *, is_first, is_quick):
    """Return the markers that a run on this kind of database skips."""
    markers = ["linted"] if is_first else ["core", "linted", "once"]
    if is_quick:
        markers += ["slow"] if is_first else ["once_if_quick", "slow"]
        markers += ["portable"] if kind == "mariadb" and not is_first else []
    return markers


LEFT_OUT = "FAKTORY_TEST_LEFT_OUT"
"""Environment variable: markers of tests to skip, separated by commas."""


def is_left_out(path, root, markers):
    """Return whether skipping these markers skips all tests of this file or folder.

    Its import takes CPU time in each process of the run.
    """
    if not path.is_relative_to(root):
        return False
    module = path.relative_to(root)
    names = {place.as_posix() for place in (module, *module.parents)}
    return any(_is_in(names, module.as_posix(), *TABLES[marker], path) for marker in markers)


def _is_in(names, module, table, exceptions, path):
    is_exempt = names & set(exceptions) or any(entry.startswith((f"{module}/", f"{module}::")) for entry in exceptions)
    if not names & set(table) or is_exempt:
        return False
    # Modules and tests of a folder in ONCE may be marked `each_database` themselves.
    return table is not ONCE or (path.suffix == ".py" and "each_database" not in path.read_text(encoding="utf-8"))


def mark(item, root):
    """Add the markers of the tables above, and `varied` if the number of examples depends on the run."""
    if getattr(item.obj, "is_hypothesis_test", False) or getattr(item.module, "examples", None) is examples:
        item.add_marker(pytest.mark.varied)
    if not item.path.is_relative_to(root):
        return
    module = item.path.relative_to(root)
    names = {path.as_posix() for path in (module, *module.parents)} | {f"{module.as_posix()}::{item.originalname}"}
    if names & set(SLOW) and not names & set(QUICK):
        item.add_marker(pytest.mark.slow)
    if names & set(CORE):
        item.add_marker(pytest.mark.core)
    if names & set(ONCE) and not item.get_closest_marker("each_database"):
        item.add_marker(pytest.mark.once)
    for marker in ("once_if_quick", "portable", "linted"):
        table, exceptions = TABLES[marker]
        if names & set(table) and not names & set(exceptions):
            item.add_marker(getattr(pytest.mark, marker))
