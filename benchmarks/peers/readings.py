"""CPU seconds and memory of processes, from /proc: of those that were started, and of all that they started."""

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def tree(*roots):
    """These processes and their descendants that run now."""
    children = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (fields := _stat(int(path.name))):
            children.setdefault(int(fields[1]), []).append(int(path.name))
    found, waiting = [], list(roots)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def cpu_s(pids):
    """CPU seconds of each, the children it has buried included: {pid: seconds}."""
    return {pid: sum(int(field) for field in fields[11:15]) / TICKS for pid in pids if (fields := _stat(pid))}


def cpu_between(before, after):
    """CPU seconds used between two readings; a process that is new in the second began with none."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def memory_mb(pids):
    """RSS, in which shared pages count once a process, and PSS, in which they count once: (MB, MB)."""
    rss = pss = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
        rss += sizes["Rss"]
        pss += sizes["Pss"]
    return rss / 1024, pss / 1024


def _stat(pid):
    """The fields after the process's name, which may hold anything; the first is its state. None: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def machine():
    """What the figures were measured on."""
    cpu = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpus": os.cpu_count(),
        "cpu": cpu[0] if cpu else os.uname().machine,
        "kernel": os.uname().release,
        "load before": round(os.getloadavg()[0], 2),
    }
