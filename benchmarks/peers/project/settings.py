"""Settings of the project, plus those of the system that BENCH_SYSTEM names."""

import os

from benchmarks.peers.systems import SYSTEMS
from benchmarks.settings import DATABASES, LOGGING  # noqa: F401 (Django reads it)

_system = SYSTEMS[os.environ["BENCH_SYSTEM"]]

SECRET_KEY = "benchmarks only"
DEBUG = False
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [*_system.apps, "benchmarks.peers.project"]

if "sqlite3" in DATABASES["default"]["ENGINE"]:
    DATABASES["default"]["NAME"] = os.environ["BENCH_SQLITE"]

for _name, _value in _system.settings().items():
    globals()[_name] = _value
