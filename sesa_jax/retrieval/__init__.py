"""Embeddings and nearest neighbours, for skills and passages alike."""

from __future__ import annotations

import jax


def host_device() -> jax.Device:
  """This process's own CPU device, whatever the accelerator.

  `jax.devices("cpu")[0]` would be process 0's, which others cannot address.
  """
  return jax.local_devices(backend="cpu")[0]
