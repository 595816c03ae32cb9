"""What a test has left open: files that are new, whatever somebody else in this process closes meanwhile."""

import contextlib
import gc
import os
from collections.abc import Iterator


def open_files() -> dict[int, str]:
    """Return what each descriptor of this process is open for."""
    gc.collect()  # what earlier tests have left to be collected is closed now, and not at any moment
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


@contextlib.contextmanager
def nothing_left_open() -> Iterator[None]:
    """Check that all that is opened meanwhile is closed."""
    before = open_files().items()
    yield
    assert open_files().items() <= before
