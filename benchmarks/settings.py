"""Settings of a project with only the benchmarks' tasks, on PostgreSQL unless BENCH_DATABASE selects another database.

BENCH_SYNCHRONOUS is SQLite's setting: NORMAL, or FULL, with which each commit waits for the disk. BENCH_FAKTORY is the
setting FAKTORY as JSON.
"""

import json
import os
from pathlib import Path

KIND = os.environ.get("BENCH_DATABASE", "postgresql")
SYNCHRONOUS = os.environ.get("BENCH_SYNCHRONOUS", "NORMAL")
SECRET_KEY = "benchmarks only"
USE_TZ = True
INSTALLED_APPS = ["django_faktory", "benchmarks"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TASKS = {"default": {"BACKEND": "django_faktory.backend.FaktoryBackend", "QUEUES": []}}
FAKTORY = json.loads(os.environ.get("BENCH_FAKTORY", "{}"))
LOGGING = {"version": 1, "disable_existing_loggers": False, "root": {"level": "WARNING"}}
DATABASES = {
    "postgresql": {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": os.environ.get("BENCH_NAME", "faktory_bench"),
            "HOST": os.environ.get("PGHOST", "127.0.0.1"),
            "PORT": os.environ.get("PGPORT", "5432"),
            "USER": os.environ.get("PGUSER", "postgres"),
            "PASSWORD": os.environ.get("PGPASSWORD", ""),
            "CONN_MAX_AGE": None,
        }
    },
    "sqlite": {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(Path(__file__).parent / "results" / f"{os.environ.get('BENCH_NAME', 'bench')}.sqlite3"),
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "timeout": 20,
                "init_command": f"PRAGMA journal_mode=WAL; PRAGMA synchronous={SYNCHRONOUS};",
            },
        }
    },
    "mariadb": {
        "default": {
            "ENGINE": "django.db.backends.mysql",
            "NAME": os.environ.get("BENCH_NAME", "faktory_bench"),
            "HOST": os.environ.get("MYSQL_HOST", "127.0.0.1"),
            "PORT": os.environ.get("MYSQL_PORT", "3306"),
            "USER": os.environ.get("MYSQL_USER", "root"),
            "PASSWORD": os.environ.get("MYSQL_PASSWORD", ""),
            "OPTIONS": {"charset": "utf8mb4", "isolation_level": "read committed"},
            "CONN_MAX_AGE": None,
        }
    },
}[KIND]
