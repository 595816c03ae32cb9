"""What CI runs is the same each time: property tests try the same examples, however slow the machine is."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("nightly" if os.environ.get("OCIHOOK_NIGHTLY") else "ci")
