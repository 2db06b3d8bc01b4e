"""For every suite."""

from hypothesis import HealthCheck, settings

# No deadlines (speed is shown in benchmarks; machines are noisy), and the same examples everywhere.
settings.register_profile("project", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")
