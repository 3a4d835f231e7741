"""Test the admin page of GearMonkey, its health check, and the system checks."""

import pytest
from django.core.checks import run_checks
from django.test import override_settings
from django.urls import reverse

from django_faktory.contrib.gearmonkey import lua
from django_faktory.contrib.gearmonkey.inspection import KEYS_A_SCAN, SCANS, health
from django_faktory.contrib.gearmonkey.redis_worker import RedisWorker
from tests.contrib.gearmonkey.naive import NaiveWorker
from tests.hostile import HARMLESS, TEXTS, elements, unwelcome
from tests.project import tasks
from tests.waiting import wait_until

pytestmark = [pytest.mark.once, pytest.mark.django_db(databases=["default", "other"])]

PAGE = "admin:django_faktory_gearmonkeyfunction_changelist"


@pytest.fixture
def here(server):
    with override_settings(FAKTORY={"GEARMONKEY_URL": server.url}):
        yield


@pytest.fixture
def redis_worker(redis):
    made = RedisWorker(redis, ["f"], wid="worker-one")
    made.open()
    return made


def page(client):
    return client.get(reverse(PAGE)).content.decode()


def test_the_page_shows_functions_workers_and_queues(admin_client, here, redis_worker, client):
    redis_worker.register()
    for prio in ("high", "low", "low"):
        client.run("f", "x", prio)
    redis_worker.take(1)
    text = page(admin_client)
    assert "worker-one (" in text
    assert "<td>0</td><td>0</td><td>2</td><td>0</td>" in text
    assert "Nothing is wrong." in text


def test_functions_used_only_by_other_clients_or_workers_are_shown(admin_client, here, redis, redis_worker, naive):
    naive.run("theirs", "x", "high")
    NaiveWorker(redis, "idle", str).start()
    redis.set("uid", 1)
    redis.mset({f"other:{number}": 1 for number in range(3000)})
    redis.hset("count:hash", "no", "counter")
    seen = health(redis)
    assert [(one.fn, one.count, one.waiting) for one in seen.functions] == [
        ("f", "0", 0),
        ("idle", "1", 0),
        ("theirs", "0", 1),
    ]
    assert seen.problems == ["theirs: no running worker; jobs waiting: 1."]
    assert seen.is_complete
    text = page(admin_client)
    assert '<th scope="row">theirs</th><td>0</td>' in text
    assert "There is too much" not in text


def test_the_scan_of_a_huge_redis_is_bounded_and_reported_as_incomplete(admin_client, here, redis, redis_worker):
    too_many = SCANS * KEYS_A_SCAN + 10_000
    redis.eval(f"for number = 1, {too_many} do redis.call('SET', 'other:' .. number, 1) end", 0)
    text = page(admin_client)
    assert '<th scope="row">f</th>' in text
    assert "There is too much in this Redis to look at all of it" in text


def test_problems_are_reported_in_sentences(redis, redis_worker, client):
    client.run("f", "x")
    client.run("f", "x", "low")
    assert health(redis).problems == ["f: no running worker; jobs waiting: 2."]
    redis.lpop("queue:f:low")
    redis_worker.audit()
    redis_worker.take(1)
    redis.zadd("gm:lease:f", {"1": 1})
    assert health(redis).problems == [
        "f: jobs of dead workers: 1; no process of ours queues them again.",
        "f: possibly lost jobs: 1, idle and in no queue.",
    ]
    redis.set("queue:f:high", "no queue")
    assert health(redis).functions[0].queues["high"] == -1


def test_a_button_queues_lost_jobs_again(admin_client, here, redis, redis_worker, client):
    client.run("f", "x")
    redis.lpop("queue:f:normal")
    answer = admin_client.post(reverse(PAGE), follow=True).content.decode()
    assert "0 lost jobs are queued again" in answer
    redis.zadd("gm:audit:f", {"1": 1})  # pretend that the first look was long ago
    answer = admin_client.post(reverse(PAGE), follow=True).content.decode()
    assert "1 lost job is queued again" in answer
    assert redis.lrange("queue:f:normal", 0, -1) == [b"1"]


def test_an_unavailable_server_is_reported_without_its_password(admin_client):
    with override_settings(FAKTORY={"GEARMONKEY_URL": "redis://:s3cret@127.0.0.1:1"}):
        text = page(admin_client)
    assert "Redis unavailable" in text
    assert "s3cret" not in text


def test_the_page_is_listed_only_if_a_server_is_configured(admin_client, here):
    assert reverse(PAGE) in admin_client.get(reverse("admin:index")).content.decode()
    with override_settings(FAKTORY={}):
        assert reverse(PAGE) not in admin_client.get(reverse("admin:index")).content.decode()


@pytest.mark.parametrize(
    ("settings", "identity", "words"),
    [
        ({"GEARMONKEY_URL": "http://x"}, "E002", "expected the URL of a Redis"),
        ({"GEARMONKEY_MODE": "both"}, "E002", '"direct" or "gateway"'),
        ({"GEARMONKEY_FUNCTIONS": {"a:b": "x"}}, "E002", "names of functions to names of tasks"),
        ({"GEARMONKEY_FUNCTIONS": {"a": "no.such"}}, "E021", "no task is registered as 'no.such'"),
    ],
)
def test_system_checks_report_invalid_settings(settings, identity, words):
    with override_settings(FAKTORY=settings):
        found = [message for message in run_checks() if message.id == f"django_faktory.{identity}"]
    assert [message for message in found if words in message.msg] != []


def test_valid_settings_pass_the_system_checks():
    right = {"GEARMONKEY_URL": "redis://localhost", "GEARMONKEY_FUNCTIONS": {"sum": tasks.add.jobtype}}
    with override_settings(FAKTORY=right):
        assert [message.id for message in run_checks() if "GEARMONKEY" in message.msg] == []


def test_a_sweep_requeues_jobs_that_the_health_check_reports_overdue(redis, redis_worker, client):
    client.run("f", "x")
    redis_worker.take(1)
    redis.zadd("gm:lease:f", {"1": 1})
    assert health(redis).functions[0].overdue == 1
    wait_until(lambda: redis_worker.sweep().requeued == ["f:1"])
    assert health(redis).functions[0].overdue == 0


def test_a_server_in_the_environment_is_checked_like_one_in_the_settings(monkeypatch):
    monkeypatch.setenv("GEARMONKEY_URL", "redis://localhost")
    monkeypatch.setattr("django_faktory.contrib.gearmonkey.checks.find_spec", lambda _: None)
    assert "django_faktory.E020" in [message.id for message in run_checks()]


# --- texts that peers may have written


def write(redis, text):
    """Write the text to every place that a peer can write to and the page shows."""
    raw = text.encode("utf-8", "replace")  # a name that is not UTF-8 cannot be requested
    redis.mset({b"uid:" + raw: raw, b"count:" + raw: raw})
    redis.lpush(b"queue:" + raw + b":high", raw)
    redis.sadd(lua.FUNCTIONS_KEY, raw)
    redis.zadd(lua.registry_key("f"), {raw: 4e9})
    redis.zadd(lua.audit_key("f"), {raw: 1})


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_hostile_texts_of_peers_do_not_change_the_elements_of_the_page(admin_client, here, redis, redis_worker, name):
    write(redis, HARMLESS)
    harmless = elements(page(admin_client))
    redis.flushdb()
    redis_worker.register()
    write(redis, TEXTS[name])
    hostile = page(admin_client)
    assert elements(hostile) == harmless
    assert unwelcome(hostile) == []


def test_keys_of_a_wrong_type_do_not_hide_other_functions(admin_client, here, redis, redis_worker):
    redis.set("uid:strange", 1)
    redis.hset("count:strange", "no", "counter")
    [strange] = [one for one in health(redis).functions if one.fn == "strange"]
    assert "WRONGTYPE" in strange.trouble
    text = page(admin_client)
    assert "strange: its keys are not those of GearMonkey" in text
    assert '<th scope="row">f</th>' in text


@pytest.mark.parametrize("count", ["²", "9" * 5000, "00", "-1", "many"])
def test_an_invalid_worker_count_raises_no_error(redis, redis_worker, client, count):
    client.run("f", "x")
    redis.set("count:f", count)
    problems = ["f: no running worker; jobs waiting: 1."]
    assert health(redis).problems == ([] if count.startswith("9") else problems)
