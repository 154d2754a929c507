"""Where weights live: on the training mesh and on the rollout's.

One table takes a leaf's path to logical axes, another these to the axes of a
mesh: `fsdp` x `tensor` in training, `data` x `tensor` in a rollout, whose data
shards hold all weights each. The model knows neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sesa_jax.policy.backbones import Backbone

_MESH_AXES = {
  "dim": "fsdp",
  "ffn": "tensor",
  "heads": "tensor",
  "kv_heads": "tensor",
  "vocab": "tensor",
  # Not "layer", nor "norm", which is too small to be worth a collective.
}

# Optimizer states end in the same paths.
_LOGICAL_AXES = {
  "embed/embedding": ("vocab", "dim"),
  "head/embedding": ("vocab", "dim"),
  "norm/scale": ("norm",),
  "layers/attention_norm/scale": ("layer", "norm"),
  "layers/q/kernel": ("layer", "dim", "heads"),
  "layers/k/kernel": ("layer", "dim", "kv_heads"),
  "layers/v/kernel": ("layer", "dim", "kv_heads"),
  "layers/o/kernel": ("layer", "heads", "dim"),
  "layers/q/bias": ("layer", "heads"),
  "layers/k/bias": ("layer", "kv_heads"),
  "layers/v/bias": ("layer", "kv_heads"),
  "layers/q_norm/scale": ("layer", "norm"),
  "layers/k_norm/scale": ("layer", "norm"),
  "layers/ffn_norm/scale": ("layer", "norm"),
  "layers/gate/kernel": ("layer", "dim", "ffn"),
  "layers/up/kernel": ("layer", "dim", "ffn"),
  "layers/down/kernel": ("layer", "ffn", "dim"),
  "ns_coeffs": ("norm",),  # three numbers of Muon's state
}


def mesh(
  fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Arranges the first `fsdp * tensor` devices; all of JAX's by default.

  Raises:
    ValueError: fewer devices are present than asked for.
  """
  devices = jax.devices() if devices is None else devices
  if min(fsdp, tensor) < 1 or fsdp * tensor > len(devices):
    raise ValueError(
      f"mesh.fsdp = {fsdp} x mesh.tensor = {tensor} asks for {fsdp * tensor} "
      f"devices; {len(devices)} are present ({devices[0].platform}). Their "
      f"product must be from 1 to {len(devices)}."
    )
  return _mesh((fsdp, tensor), ("fsdp", "tensor"), devices[: fsdp * tensor])


def rollout_mesh(
  tensor: int, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Arranges a host's devices as `data` x `tensor`; its own by default.

  Raises:
    ValueError: the devices do not divide by `tensor`.
  """
  devices = jax.local_devices() if devices is None else devices
  if tensor < 1 or len(devices) % tensor:
    fit = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
    raise ValueError(
      f"mesh.rollout_tensor = {tensor} does not divide a host's "
      f"{len(devices)} devices. Sizes that do: {', '.join(map(str, fit))}."
    )
  return _mesh((len(devices) // tensor, tensor), ("data", "tensor"), devices)


def _mesh(shape, names, devices) -> Mesh:
  return jax.make_mesh(
    shape,
    names,
    # Explicit axes, the default, would make every function name its shardings.
    axis_types=(AxisType.Auto,) * len(shape),
    devices=devices,
  )


def check(
  backbone: Backbone, *, fsdp: int, tensor: int, field: str = "mesh.tensor"
) -> None:
  """Checks that a backbone can be cut so. Needs no device.

  Args:
    backbone: the architecture.
    fsdp: devices that share `dim`.
    tensor: devices that share heads, feed-forward and vocabulary.
    field: of the config, from which `tensor` is.

  Raises:
    ValueError: an axis does not divide; names the sizes that would.
  """
  # Heads are cut whole, so their number counts, not N * H.
  sizes = {
    ("heads", backbone.heads, field): tensor,
    ("kv_heads", backbone.kv_heads, field): tensor,
    ("ffn", backbone.ffn, field): tensor,
    ("padded vocabulary", backbone.table_rows, field): tensor,
    ("dim", backbone.dim, "mesh.fsdp"): fsdp,
  }
  for (name, size, axis), parts in sizes.items():
    if size % parts:
      shared = [n for (_, n, a) in sizes if a == axis]
      fit = [
        n for n in range(1, min(shared) + 1) if not any(s % n for s in shared)
      ]
      raise ValueError(
        f"The backbone's {name} = {size} does not divide over {axis} = "
        f"{parts}. Sizes that would: {', '.join(map(str, fit[:12]))}."
      )


def shardings(mesh: Mesh, tree: Any) -> Any:
  """Returns a `NamedSharding` for each leaf, in the tree's structure.

  Args:
    mesh: of `mesh` or `rollout_mesh`.
    tree: params, stacked or of `model.unstack`, or an optimizer's state over
      them; arrays or shapes. A leaf without axes, such as a count, is
      replicated.

  Raises:
    ValueError: a leaf has a path that the table does not know.
  """

  def leaf_sharding(path: Any, leaf: Any) -> NamedSharding:
    axes = _logical_axes(path, leaf.shape) if leaf.shape else ()
    placed = (_MESH_AXES.get(axis) for axis in axes)
    spec = (axis if axis in mesh.axis_names else None for axis in placed)
    return NamedSharding(mesh, PartitionSpec(*spec))

  return jax.tree_util.tree_map_with_path(leaf_sharding, tree)


def _logical_axes(path: Any, shape: tuple[int, ...]) -> tuple[str, ...]:
  name = jax.tree_util.keystr(path, simple=True, separator="/")
  stacked = re.sub(r"layers/\d+/", "layers/", name)
  for known, axes in _LOGICAL_AXES.items():
    if f"/{stacked}".endswith(f"/{known}"):
      axes = axes if stacked == name else axes[1:]  # one layer has no such axis
      if len(axes) == len(shape):
        return axes
  raise ValueError(f"No logical axes are known for {name} {shape}.")
