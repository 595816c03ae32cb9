"""Runs a piece of Python in a process that may take so much memory more, whatever the machine has."""

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parent.parent
# Address space, since the kernel bounds nothing else; what modules take, and what the allocator keeps, comes before.
_PROGRAM = """
import resource, sys
{before}
bound = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + {bound_bytes}
resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
{program}
"""


def run_within(bound_bytes: int, program: str, *arguments: object, before: str) -> str:
    """Run `program` with `sys.argv[1:]`, `before` having been run outside of the bound; return what it prints.

    Raises:
        AssertionError: with its traceback, if it ends by an error, such as a MemoryError.
    """
    source = _PROGRAM.format(before=before, bound_bytes=bound_bytes, program=program)
    command = [sys.executable, "-c", source, *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=_ROOT, timeout=120)
    if done.returncode != 0:
        raise AssertionError(done.stderr[-4000:])
    return done.stdout
