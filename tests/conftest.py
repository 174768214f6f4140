"""What all tests share. Standing here, it also lets them import the fakes beside it by name."""

import atexit
import os
import shutil
import tempfile

# Before anything imports JAX: two devices, so that every test of sharding has something to shard.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

# What one test compiles, the next one finds, in whatever process; the home folder stays clean.
_programs = tempfile.mkdtemp(prefix="marin-rl-programs-")
atexit.register(shutil.rmtree, _programs, ignore_errors=True)
os.environ["MARIN_RL_COMPILATION_CACHE"] = _programs

from hypothesis import HealthCheck, settings

settings.register_profile(
    "marin-rl",
    deadline=None,  # two cores are shared with whatever else runs
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("marin-rl")
