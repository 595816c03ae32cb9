"""What no runtime's restore applies: sysctls in namespaces of the container's own, and OOM scores."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ocihook.errors import RestoreError
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.runtime.unrestored import apply_unrestored

SOON = Patience(timeout_s=60)
IPC_AND_UTS = 0x08000000 | 0x04000000  # linux/sched.h
HERE = Path("/proc/sys/kernel/msgmax")


@pytest.fixture
def init() -> Iterator[Process]:
    """A process in namespaces of its own, with a child that has another OOM score."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            Path("/proc/self/oom_score_adj").write_text("100")
            assert ctypes.CDLL(None, use_errno=True).unshare(IPC_AND_UTS) == 0, os.strerror(ctypes.get_errno())
            if os.fork() == 0:
                Path("/proc/self/oom_score_adj").write_text("500")
                os.write(writer, b"x")
            time.sleep(1000)
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    process = Process.find(pid)
    assert process is not None
    yield process
    for child in [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()), pid]:
        os.kill(child, signal.SIGKILL)
    os.waitpid(pid, 0)


def bundle(sysctls: dict[str, str], *types: str, **process: Any) -> dict[str, Any]:
    return {"process": process, "linux": {"sysctl": sysctls, "namespaces": [{"type": name} for name in types]}}


def scores(init: Process) -> list[int]:
    children = Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()
    return [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (init.pid, *children)]


def test_sysctls_are_set_in_the_container_alone(init: Process) -> None:
    before, mine = HERE.read_text(), os.readlink("/proc/self/ns/ipc")
    assert apply_unrestored(init, None, bundle({"kernel.msgmax": "7777"}, "ipc"), SOON) == []
    assert HERE.read_text() == before
    assert os.readlink("/proc/self/ns/ipc") == mine
    with open(f"/proc/{init.pid}/ns/ipc") as namespace:
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).setns(namespace.fileno(), 0)
            os._exit(0 if HERE.read_text().strip() == "7777" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_one_of_the_node_is_never_set(init: Process) -> None:
    before = HERE.read_text()
    assert apply_unrestored(init, None, bundle({"kernel.msgmax": "7777", "kernel.pid_max": "9"}, "uts"), SOON) == []
    assert HERE.read_text() == before


def test_one_that_cannot_be_set_is_named(init: Process) -> None:
    with pytest.raises(RestoreError, match=r"its sysctl kernel\.msgmax cannot be set to 'x': Invalid argument"):
        apply_unrestored(init, None, bundle({"kernel.msgmax": "x"}, "ipc"), SOON)


def test_the_score_of_processes_that_have_not_set_their_own(init: Process) -> None:
    assert apply_unrestored(init, 100, bundle({}, oomScoreAdj=300), SOON) == []
    assert scores(init) == [300, 500]
    for then, wanted in ((None, 400), (300, None), (299, 400)):
        process = {} if wanted is None else {"oomScoreAdj": wanted}
        assert apply_unrestored(init, then, bundle({}, **process), SOON) == []
        assert scores(init) == [300, 500]
