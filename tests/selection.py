"""Tables of tests that `make test` leaves to `make test-all`, and of tests that run on one database only.

An entry is a folder, a module or a test below tests/: "soak", "contrib/api", "worker/test_idle.py",
"worker/test_idle.py::test_…".
"""

import pytest

from tests.examples import examples

SLOW = (
    "admin/test_hostile.py::test_no_text_of_a_client_adds_an_element_to_a_page",
    "browser",
    "contrib/api/test_hostile.py",
    "contrib/api/test_openapi.py::test_no_request_is_answered_with_a_5xx",
    "contrib/gearmonkey/test_admin.py::test_no_text_of_a_peer_changes_what_the_page_is_made_of",
    "contrib/gearmonkey/test_gateway.py::test_the_command_runs_a_gateway_and_a_killed_gateway_loses_nothing",
    "contrib/gearmonkey/test_hardened.py",
    "contrib/gearmonkey/test_runfaktory.py",
    "contrib/gearmonkey/test_servers.py",
    "deadlocks",
    "deploys",
    "example/test_demo.py",
    "faults",
    "interop",
    "management/cli/test_hostile.py",
    "outside/test_outside.py",
    "plans",
    "runtime/processes",
    "runtime/supervisor/test_supervisor.py::test_a_child_that_a_signal_suspends_is_not_killed",
    "runtime/supervisor/test_supervisor.py::test_a_child_that_does_not_respond_is_killed_before_the_grace_is_over",
    "runtime/supervisor/test_supervisor.py::test_a_child_whose_threads_run_and_that_does_not_do_its_work_is_replaced",
    "runtime/supervisor/test_supervisor.py::test_a_farewell_that_hangs_is_cut_short",
    "runtime/supervisor/test_supervisor.py::test_heartbeats_of_the_time_in_which_the_supervisor_did_not_run_are_not_missed",
    "runtime/supervisor/test_supervisor.py::test_while_a_child_does_not_respond_the_others_can_see_it",
    "server/handlers/test_jobs.py::test_clients_that_go_away_at_any_moment_leave_no_job_behind",
    "server/test_going_away.py::test_a_job_of_which_only_a_part_was_sent_goes_back",
    "server/test_limits.py::test_a_stopping_server_lets_a_slow_client_read_what_it_was_answered",
    "server/test_limits.py::test_who_reads_slowly_but_reads_gets_it_all",
    "server/test_long_lines.py::test_others_are_answered_while_a_line_that_takes_long_is_read",
    "soak",
    "store/limits/test_exact.py::test_with_locks_and_sweeps_and_two_nodes_no_limit_is_passed_and_nothing_is_repaired",
    "store/locks/test_processes.py",
    "store/locks/test_running.py::test_many_clients_with_few_keys_never_overlap_and_lose_nothing",
    "tasks/test_cron.py::test_edits_pauses_and_new_entries_take_effect_without_a_restart",
    "tenants",
    "test_snapshots.py",
    "typing",
    "worker/test_worker.py::test_what_cannot_be_reported_before_the_end_is_told_by_jid",
)
"""Tests that kill or roll out processes, run or race for seconds, or drive a browser or another client."""

QUICK = (
    "browser/test_pages.py::test_without_a_script_all_can_be_done",
    "contrib/gearmonkey/test_hardened.py::test_h01_a_naive_worker_does_our_clients_job",
    "contrib/gearmonkey/test_hardened.py::test_h02_our_worker_does_a_naive_clients_job",
    "contrib/gearmonkey/test_hardened.py::test_h05_a_poisonous_job_is_given_up_after_five_deaths",
    "contrib/gearmonkey/test_hardened.py::test_h12_a_roll_call_is_not_answered_by_the_dead",
    "contrib/gearmonkey/test_hardened.py::test_h14_a_job_that_somebody_lost_is_queued_again_once",
    "contrib/gearmonkey/test_runfaktory.py::test_a_task_serves_a_function",
    "contrib/gearmonkey/test_servers.py::test_a_client_that_is_closed_leaves_no_connection_to_a_sentinel",
    "contrib/gearmonkey/test_servers.py::test_a_worker_of_its_own_says_that_there_is_no_memory",
    "contrib/gearmonkey/test_servers.py::test_behind_sentinels_the_master_is_found",
    "contrib/gearmonkey/test_servers.py::test_the_documented_access_list_is_enough_and_opens_nothing_else",
    "deploys/test_newer_workers.py",
    "deploys/test_tables_in_use.py",
    "outside/test_outside.py::test_nothing_is_lost_doubled_or_over_its_limit_whatever_dies",
    "runtime/processes/test_isolation.py",
    "runtime/processes/test_leases.py::test_a_job_that_was_delivered_stays_with_its_worker",
    "runtime/processes/test_pid_one.py",
    "runtime/processes/test_probes.py",
    "runtime/processes/test_recycling.py::test_who_is_replaced_takes_leave",
    "runtime/processes/test_runfaktory.py::test_a_second_signal_ends_at_once_and_the_job_goes_back",
    "runtime/processes/test_runfaktory.py::test_everything_runs_with_one_command",
    "runtime/processes/test_runfaktory.py::test_running_jobs_may_end",
    "runtime/processes/test_runfaktory.py::test_the_job_of_a_killed_worker_runs_again",
    "runtime/processes/test_starting.py::test_what_cannot_start_ends_it",
)
"""Exceptions from SLOW: one test for each claim about processes stays in `make test`."""

CORE = ("brokers/test_tls.py", "core", "tools")
"""Tests that need no database. Modules elsewhere are marked `core` themselves."""

ONCE = ("browser", "contrib/api", "contrib/gearmonkey", "docs", "example", "interop", "management/cli", "typing")
"""Tests that do not depend on the kind of database: they run on the first one only, except modules marked
`each_database`.
"""

ONCE_IF_QUICK = (
    "admin",
    "checks/test_security.py",
    "contract/test_remote.py",
    "contrib/metrics",
    "contrib/transfer",
    "runtime/processes",
    "security",
    "server",
    "tasks",
    "testing",
    "worker",
)
"""Tests with little SQL or transactions: `make test` runs them on the first database only, except EACH."""

EACH = (
    "admin/test_speed.py",
    "contrib/metrics/test_telling.py",
    "runtime/processes/test_isolation.py",
    "runtime/processes/test_runfaktory.py::test_the_job_of_a_killed_worker_runs_again",
    "server/handlers/test_batches.py",
    "server/test_async_exchange.py",
    "server/test_job_options.py",
    "server/test_lock_waits.py",
    "server/test_prefetch_buffer.py",
    "tasks/test_atomic.py",
    "tasks/test_atomic_commit.py",
    "tasks/test_cron.py",
    "tasks/test_isolation.py",
    "testing/test_live.py",
    "worker/test_limits.py",
)
"""Exceptions from ONCE_IF_QUICK: `make test` runs them on each database."""


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
    if names & set(ONCE_IF_QUICK) and not names & set(EACH):
        item.add_marker(pytest.mark.once_if_quick)
