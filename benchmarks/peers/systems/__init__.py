"""All systems, in the order in which tables show them."""

from .celery import Celery
from .dj_queue import DjQueue, DjQueueSqlite
from .django_ox import DjangoOx, DjangoOxSqlite
from .django_tasks_db import DjangoTasksDb, DjangoTasksDbSqlite
from .dramatiq import Dramatiq
from .huey import Huey, HueySqlite
from .ours import Ours, OursAtomic, OursSqlite
from .procrastinate import Procrastinate

SYSTEMS = {
    system.name: system
    for system in (
        Ours(),
        OursAtomic(),
        OursSqlite(),
        DjangoTasksDb(),
        DjangoOx(),
        DjQueue(),
        Procrastinate(),
        Celery(),
        Dramatiq(),
        Huey(),
        DjangoTasksDbSqlite(),
        DjangoOxSqlite(),
        DjQueueSqlite(),
        HueySqlite(),
    )
}
