"""Which broker the settings select; it is created once, and again when they change."""

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_faktory.brokers import get_broker
from django_faktory.brokers.orm import OrmBroker
from django_faktory.brokers.remote import RemoteBroker

pytestmark = pytest.mark.core


class OtherBroker(OrmBroker):
    """A broker class of the project."""


class NoBroker:
    """A class that is not a broker."""


def dotted(cls):
    return f"{__name__}.{cls.__name__}"


def test_the_default_is_an_orm_broker_on_the_configured_database(settings):
    settings.FAKTORY = {"DATABASE": "default", "DEAD_TTL": 60}
    broker = get_broker()
    assert type(broker) is OrmBroker
    assert (broker.alias, broker.dead_for_s) == ("default", 60)


def test_remote_selects_the_server_of_faktory_url(settings, monkeypatch):
    monkeypatch.setenv("FAKTORY_URL", "tcp://:pw@faktory.example:7420")
    settings.FAKTORY = {"BROKER": "remote"}
    broker = get_broker()
    assert type(broker) is RemoteBroker
    assert (str(broker.address), broker.address.password) == ("faktory.example:7420", "pw")


def test_a_dotted_path_selects_a_broker_class_of_the_project(settings):
    settings.FAKTORY = {"BROKER": dotted(OtherBroker)}
    assert type(get_broker()) is OtherBroker


def test_a_dotted_path_to_a_class_that_is_no_broker_is_refused(settings):
    settings.FAKTORY = {"BROKER": dotted(NoBroker)}
    with pytest.raises(ImproperlyConfigured, match=r'FAKTORY\["BROKER"\]: expected "orm", "remote" or'):
        get_broker()


def test_changed_settings_create_a_new_broker(settings):
    first = get_broker()
    settings.FAKTORY = {"DEAD_TTL": 1}
    assert get_broker() is not first
    settings.USE_TZ = True
    assert get_broker() is get_broker()


def test_without_the_app_the_error_explains_how_to_install_it(settings):
    settings.FAKTORY = {}
    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app != "django_faktory"]
    with pytest.raises(
        ImproperlyConfigured, match=r"INSTALLED_APPS \+= \[.django_faktory.\], then run manage.py migrate"
    ):
        get_broker()
