"""How long it takes to record the state of 200 threads while their container is stopped, and how large that is."""

import statistics
import subprocess
import sys
import time
from typing import NamedTuple

from ocihook.audit.reading import Reader
from ocihook.audit.state import encode_state
from ocihook.linux.cgroup import allowed_cpus

_THREADS, _RUNS = 200, 60
_SLEEPERS = f"""
import threading, time
for _ in range({_THREADS - 1}):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print(flush=True)
time.sleep(600)
"""


class Recorded(NamedTuple):
    """Costs of a record."""

    processor_s: float
    size_bytes: int


def recorded() -> Recorded:
    """Return what that costs for one process of 200 threads, without CAP_SYS_ADMIN as most containers are."""
    command = ["setpriv", "--bounding-set", "-sys_admin", sys.executable, "-c", _SLEEPERS]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = [_record(process.pid) for _ in range(_RUNS)]
        process.kill()
    return Recorded(statistics.median(seconds for seconds, _ in found), found[0].size_bytes)


def _record(pid: int) -> Recorded:
    began = time.process_time()
    data = encode_state(Reader(pid, allowed_cpus(pid)).read([pid]))
    return Recorded(time.process_time() - began, len(data))
