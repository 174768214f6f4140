"""What all tests share. Standing here, it also lets them import the fakes beside it by name."""

import os

# Before anything imports JAX: two devices, so that every test of sharding has something to shard.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "marin-rl",
    deadline=None,  # two cores are shared with whatever else runs
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("marin-rl")
