"""A program under test: print how it was started, and end as its argument says."""

import atexit
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

atexit.register(print, "after the end")

match sys.argv[1:]:
    case ["exit"]:
        sys.exit(3)
    case ["raise"]:
        raise ValueError("on purpose")
    case ["interrupt"]:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    case ["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    case ["thread"]:
        threading.Thread(target=time.sleep, args=(0.1,)).start()
    case _:
        atexit.unregister(print)
        shown = {
            "argv": sys.argv[1:], "name": __name__, "variable": os.environ.get("SHOWN"), "session": os.getsid(0),
            "cwd": str(Path.cwd()), "parent": os.getppid(),
            "ours": [name for name in sys.modules if name.startswith(("tests.", "django_faktory"))],
        }  # fmt: skip
        print(json.dumps(shown))  # noqa: T201
