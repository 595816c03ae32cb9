"""The name of podman's containers: no annotation has it, but conmon, the parent of their init, is called with it."""

from itertools import pairwise

from ocihook.linux.procfs import command_line, parent_pid

_MAX_ANCESTORS = 3  # of a container's init the first; of CRIU in a restore, with the runtime between them


def conmon_name(pid: int, container_id: str) -> str:
    """Return the name of a container, "" without a conmon that has it.

    Args:
        pid: the container's init; in a restore, before there is one, CRIU.
        container_id: whose conmon it must be.
    """
    for _ in range(_MAX_ANCESTORS):
        pid = parent_pid(pid) if pid > 1 else 0
        if pid <= 1:
            break
        arguments = command_line(pid)
        options = dict(reversed([*pairwise(arguments)]))  # the first of each counts
        if arguments and arguments[0].endswith("conmon") and options.get("-c") == container_id:
            return options.get("-n", "")
    return ""
