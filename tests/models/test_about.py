"""Jobs about an object, by `using(about=…)` or by any client's `custom.about`, and how to find them."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_faktory.core.job_parser import parse_job
from django_faktory.errors import InvalidQuery
from django_faktory.models import Job
from django_faktory.models.related_object import about_of
from django_faktory.store.jobs import pushes
from django_faktory.store.store import Store
from example_project.shop.models import Order
from tests.factories import JobFactory, payload
from tests.project.models import Mark
from tests.project.tasks import add

pytestmark = [pytest.mark.once_if_quick, pytest.mark.django_db]


class ProxyMark(Mark):
    class Meta:
        proxy = True
        app_label = "project"


@pytest.fixture
def mark():
    return Mark.objects.create(text="x")


def test_jobs_are_found_by_the_object_they_are_about(mark):
    other = Mark.objects.create(text="y")
    result = add.using(about=mark).enqueue(1, 2)
    add.using(about=other).enqueue(1, 2)
    add.enqueue(1, 2)
    job = Job.objects.about(mark).get()
    assert (job.jid, job.about) == (result.id, f"project.mark/{mark.pk}")
    assert f'"custom":{{"about":"project.mark/{mark.pk}"' in job.payload


def test_a_model_its_proxy_and_its_name_refer_to_the_same_object(mark):
    assert about_of(ProxyMark.objects.get(pk=mark.pk)) == about_of(mark) == about_of(f"project.mark/{mark.pk}")


def test_enqueue_many_and_further_using_calls_keep_the_about_option(mark):
    about_it = add.using(about=mark)
    about_it.enqueue_many([(1, 2), (3, 4)])
    about_it.using(priority=5).enqueue(1, 2)
    assert Job.objects.about(mark).count() == 3


def test_a_result_exposes_the_object_of_its_job(mark):
    result = add.using(about=mark).enqueue(1, 2)
    assert add.get_result(result.id).task.about == about_of(mark)


def test_an_unsaved_object_is_rejected_before_a_job_is_written():
    with pytest.raises(ValueError, match=r"about: an unsaved project\.mark: save it first"):
        add.using(about=Mark(text="x"))
    with pytest.raises(ValueError, match="an unsaved"):
        add.using(about=Mark(pk=7, text="x"))


@pytest.mark.parametrize("name", ["mark/7", "project.mark", "project.mark/", "", "project.mark/" + "x" * 255])
def test_an_invalid_object_name_is_rejected(name):
    with pytest.raises(InvalidQuery, match=r"about: expected app\.model/pk"):
        add.using(about=name)


def test_about_rejects_a_value_of_another_type():
    with pytest.raises(TypeError, match="about: expected a model's instance"):
        add.using(about=7)


def test_any_client_can_set_custom_about():
    job = parse_job('{"jid":"12345678","jobtype":"x","args":[],"custom":{"about":"shop.order/é 7"}}')
    pushes.push(Store(), [job])
    assert Job.objects.about("shop.order/é 7").get().jid == "12345678"


@pytest.mark.parametrize(
    "about", ['"the moon"', "7", "null", '{"a":1}', '["shop.order/7"]', '"a.b/\\u0000"', '"a.b/\\ud800"']
)
def test_a_custom_about_that_names_no_object_is_left_unchanged(about):
    text = f'{{"jid":"12345678","jobtype":"x","args":[],"custom":{{"about":{about}}}}}'
    assert pushes.push(Store(), [parse_job(text)]) == [None]
    job = Job.objects.get()
    assert job.about is None
    assert about in job.payload


def test_pushing_a_finished_job_again_without_about_clears_its_object():
    old = JobFactory(succeeded=True, about="shop.order/7", jid="12345678")
    pushes.push(
        Store(), [payload().__class__(jid=old.jid, jobtype="x", text='{"jid":"12345678","jobtype":"x","args":[]}')]
    )
    job = Job.live.get()
    assert (job.state, job.about) == ("enqueued", None)


# --- on the object's page


@pytest.fixture
def order():
    return Order.objects.create(customer="a@example.com", item="tea", price=5)


def page_of(client, order):
    return client.get(f"/admin/shop/order/{order.pk}/change/")


def test_the_admin_page_of_an_object_shows_its_latest_jobs_with_links(admin_client, order):
    about = about_of(order)
    made = [JobFactory(about=about, dead=True, errtype=f"Error{n}", jobtype="shop.<b>") for n in range(21)]
    JobFactory(jobtype="of.another", about="shop.order/0")
    text = page_of(admin_client, order).content.decode()
    assert [f"Error{n}" in text for n in (0, 1, 20)] == [False, True, True]
    assert f"/admin/django_faktory/job/{made[-1].pk}/change/" in text
    assert "shop.&lt;b&gt;" in text
    assert "of.another" not in text
    assert f"/admin/django_faktory/job/?about=shop.order%2F{order.pk}" in text
    listed = admin_client.get("/admin/django_faktory/job/", {"about": about}).content.decode()
    assert made[0].jid in listed


def test_admin_pages_render_for_an_object_without_jobs_and_a_new_one(admin_client, order):
    assert "latest jobs" in page_of(admin_client, order).content.decode().lower()
    assert "latest jobs" not in admin_client.get("/admin/shop/order/add/").content.decode().lower()


def test_a_user_without_view_permission_sees_no_jobs(client, order, django_user_model):
    from django.contrib.auth.models import Permission

    user = django_user_model.objects.create_user("clerk", password="x", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=["view_order", "change_order"]))
    JobFactory(about=about_of(order), jobtype="secret.work")
    client.force_login(user)
    page = page_of(client, order)
    assert page.status_code == 200
    assert "secret.work" not in page.content.decode()


def test_the_admin_page_of_an_object_with_jobs_can_be_saved(admin_client, order):
    JobFactory(about=about_of(order))
    page = page_of(admin_client, order)
    fields = {name: value for name, value in page.context["adminform"].form.initial.items() if value is not None}
    answer = admin_client.post(f"/admin/shop/order/{order.pk}/change/", {**fields, "item": "coffee"})
    assert answer.status_code == 302
    order.refresh_from_db()
    assert order.item == "coffee"


def test_the_number_of_jobs_adds_no_queries_to_the_admin_page(admin_client, order):
    page_of(admin_client, order)  # Django caches some of these queries
    with CaptureQueriesContext(connection) as without:
        page_of(admin_client, order)
    for _ in range(20):
        JobFactory(about=about_of(order))
    with CaptureQueriesContext(connection) as with_jobs:
        page_of(admin_client, order)
    assert len(with_jobs) == len(without)
