"""What was restored stands still, in its own cgroup, until its engine starts it; until then it is `created`."""

import json
import sys

from ocihook.errors import OcihookError
from ocihook.linux.patience import ENDLESS
from ocihook.runtime import containers, stop
from ocihook.runtime.call import Call
from ocihook.runtime.cgroups import freezer_of


def start(call: Call) -> int:
    """Let a container run that is held; the runtime starts one that was not restored."""
    kept = containers.read(call.container_id)
    mark = containers.directory_of(call.container_id) / containers.HELD_NAME
    if kept is None or kept.init is None or not mark.exists():
        call.pass_on()
    if not kept.init.is_alive():
        raise OcihookError(f"container {kept.container} has ended since it was restored", hint="see the kernel's log")
    freezer_of(call).thaw(ENDLESS)
    mark.unlink(missing_ok=True)
    return 0


def state(call: Call) -> int:
    """Print the state that the runtime reports; of a container that is held, `created`."""
    if (containers.directory_of(call.container_id) / containers.ENDED_NAME).exists():
        return stop.state(call)
    if not (containers.directory_of(call.container_id) / containers.HELD_NAME).exists():
        call.pass_on()
    answer = call.run("state", call.container_id)
    if answer.returncode:
        sys.stderr.write(answer.stderr)
        return answer.returncode
    found = json.loads(answer.stdout)
    if found.get("status") in ("running", "paused"):
        found["status"] = "created"
    json.dump(found, sys.stdout)
    return 0
