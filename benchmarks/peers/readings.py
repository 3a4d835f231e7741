"""Read CPU seconds and memory of processes and all their descendants from /proc."""

import os
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def tree(*roots):
    """Return the pids of these processes and of their running descendants."""
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
    """Return {pid: CPU seconds}, including children that have ended and were waited for."""
    return {pid: sum(int(field) for field in fields[11:15]) / TICKS for pid in pids if (fields := _stat(pid))}


def cpu_between(before, after):
    """Return the CPU seconds used between two readings; a process that is only in the second started with 0."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def memory_mb(pids):
    """Return (RSS, PSS) in MB.

    RSS counts a shared page once per process, PSS once in total.
    """
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
    """Return the fields of /proc/PID/stat from the state on, or None if the process has ended.

    The process's name before them may contain any character.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def machine():
    """Return a description of the machine on which the figures were measured."""
    cpu = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpus": os.cpu_count(),
        "cpu": cpu[0] if cpu else os.uname().machine,
        "kernel": os.uname().release,
        "load before": round(os.getloadavg()[0], 2),
    }
