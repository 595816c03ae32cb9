"""What was restored stands still, in its own cgroup, until its engine starts it; so long it is `created`."""

import json
import sys

from ocihook.errors import OcihookError
from ocihook.linux.cgroup import find_freezer
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Process
from ocihook.runtime import containers
from ocihook.runtime.call import Call


def hold(init: Process) -> None:
    """Freeze a container that was just restored.

    Raises:
        FreezeError: if it does not stand still in time.
        OcihookError: if it has no cgroup that could be frozen.
    """
    freezer = find_freezer(init.pid)
    if freezer is None:
        raise OcihookError(f"process {init.pid} is in no cgroup that can be frozen", hint="see `ocihook doctor`")
    freezer.freeze(ENDLESS)


def start(call: Call) -> int:
    """Let a container run that is held; one that was not restored the runtime starts."""
    kept = containers.read(call.container_id)
    mark = containers.directory_of(call.container_id) / containers.HELD_NAME
    if kept is None or kept.init is None or not mark.exists():
        call.pass_on()
    if not kept.init.is_alive():
        raise OcihookError(f"container {kept.container} has ended since it was restored", hint="see the kernel's log")
    freezer = find_freezer(kept.init.pid)
    if freezer is not None:
        freezer.thaw(ENDLESS)
    mark.unlink(missing_ok=True)
    return 0


def state(call: Call) -> int:
    """Tell what the runtime tells, but that what is held has been created and not started."""
    if not (containers.directory_of(call.container_id) / containers.HELD_NAME).exists():
        call.pass_on()
    told = call.run("state", call.container_id)
    if told.returncode:
        sys.stderr.write(told.stderr)
        return told.returncode
    found = json.loads(told.stdout)
    if found.get("status") in ("running", "paused"):
        found["status"] = "created"
    json.dump(found, sys.stdout)
    return 0
