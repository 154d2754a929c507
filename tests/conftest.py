"""What every test runs under. Set before anything imports jax."""

import getpass
import os
import tempfile

os.environ |= {
  "JAX_PLATFORMS": "cpu",
  # An installed libtpu warns, or dies on its lock file, without these.
  "TPU_SKIP_MDS_QUERY": "1",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  # The last of two equal flags wins, so these come after the caller's. On a
  # busy machine eight devices on two cores may wait for each other for long; a
  # test's own limit ends a wait that has no end.
  "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
  + " --xla_force_host_platform_device_count=8"
  + " --xla_cpu_collective_call_terminate_timeout_seconds=280"
  + " --xla_cpu_collective_timeout_seconds=280"
  # Else independent collectives of a program wait side by side, each holding a
  # thread of a pool of eight, and none is left for those that they wait for.
  + " --xla_cpu_enable_concurrency_optimized_scheduler=false",
}
# Compiled programs outlive a test run; the name keeps two users apart.
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR",
  os.path.join(
    tempfile.gettempdir(), f"sesa_jax_tests_{getpass.getuser()}", "xla"
  ),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import hypothesis  # noqa: E402

# Same examples in every run; compilation would break any deadline.
hypothesis.settings.register_profile(
  "sesa_jax", deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("sesa_jax")
