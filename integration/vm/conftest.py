"""One virtual machine for all tests of a kernel with soft-dirty bits."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.vm.machine import OCIHOOK, Machine


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    """Debian's kernel, without ocihook."""
    directory = Path(tempfile.mkdtemp(prefix="ocihook-vm-"))
    started = Machine(Path(os.environ["OCIHOOK_VM_ROOT"]), directory)
    # What a test does between two dumps may take minutes here.
    started.run("printf '[agent]\\nidle_timeout_s = 3600\\n' >/etc/ocihook/config.toml")
    yield started
    started.close()
    shutil.rmtree(directory)


@pytest.fixture
def untracked(machine: Machine) -> Machine:
    """One on which CRIU calls ocihook and is not told to track memory; with an agent: it is too slow to start one."""
    machine.run(f"{OCIHOOK} install; ! grep track-mem /etc/criu/*.conf")
    machine.start_agent()
    return machine


@pytest.fixture
def tracking(machine: Machine) -> Machine:
    """One whose CRIU tracks memory, with an agent."""
    machine.run(f"{OCIHOOK} install --track-memory; grep -x track-mem /etc/criu/runc.conf")
    machine.start_agent()
    return machine
