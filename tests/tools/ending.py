"""A program under test: end as its argument says."""

import atexit
import os
import signal
import sys
import threading
import time

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
