"""What CI runs is the same each time; and a container that has only what a test gives it."""

import os
import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("nightly" if os.environ.get("OCIHOOK_NIGHTLY") else "ci")


@pytest.fixture
def container_pid() -> Iterator[int]:
    """A container of one process, without what this one has open."""
    with subprocess.Popen(["sleep", "infinity"], start_new_session=True) as init:
        yield init.pid
        init.kill()
