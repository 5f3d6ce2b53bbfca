"""How the unit tests run: beside the integration tests, on cores that are busy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No test asserts on time, and neither does hypothesis.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
