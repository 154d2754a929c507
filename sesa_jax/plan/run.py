"""What a config becomes on a target: shapes and places, without an array."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from sesa_jax import config as config_lib
from sesa_jax import tools
from sesa_jax.engine import decode
from sesa_jax.engine import engine as engine_lib
from sesa_jax.learner import learner as learner_lib
from sesa_jax.learner import packing
from sesa_jax.plan import targets
from sesa_jax.plan.compiled import device_bytes
from sesa_jax.policy import backbones, model, sharding, weights

ROLES = config_lib.ROLES
_ENDS = 2  # ids that end a turn; a few more change nothing


@dataclasses.dataclass(frozen=True)
class Run:
  """What a config becomes on a target."""

  config: Any  # for the target's kind of machine
  target: targets.Target
  backbone: backbones.Backbone
  learners: Mapping[str, learner_lib.Learner]  # by role
  lengths: Mapping[str, int]  # of the longest row, by role
  layout: decode.Layout

  @property
  def parts(self) -> dict[str, float]:
    """Bytes that lie on each device throughout."""
    found = {
      name: device_bytes(learner.abstract())
      for name, learner in self.learners.items()
    }
    if self.config.policy.shared:
      found = {"policy": found["solver"]}
    references = len(set(config_lib.starts(self.config).values()))
    return found | {"reference": references * device_bytes(self.reference)}

  @property
  def reference(self) -> Any:
    """The frozen weights, float32, as placed shapes; one set."""
    learner = self.learners["solver"]
    return jax.tree.map(
      lambda leaf, place: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=place
      ),
      learner.abstract().params,
      learner.programs.reference,
    )


def read(
  config: Any,
  target: targets.Target,
  given: Container[str],
  backbone: backbones.Backbone | None = None,
) -> Run:
  """Puts a run together as `tools.assemble` does, without an array.

  Args:
    config: an experiment.
    target: of `targets.find`.
    given: dotted names of fields that the command line gave.
    backbone: another architecture than the config's.

  Raises:
    ValueError: values that a run refuses, or sizes that do not go together.
  """
  config = config_lib.for_machine(config, target.machine, given)
  config_lib.check_values(config)
  backbone = backbone or architecture(config)
  fsdp, tensor = config_lib.mesh_sizes(config, len(target.devices))
  packing.check_rows(config.learner.microbatch_rows, fsdp)
  sharding.check(backbone, fsdp=fsdp, tensor=tensor)
  config_lib.check_rollout(backbone, config.mesh.rollout_tensor)
  mesh = sharding.mesh(fsdp, tensor, target.devices)
  if mesh.size < len(target.devices) and target.name != targets.HERE:
    raise ValueError(
      f"mesh.fsdp = {fsdp} x mesh.tensor = {tensor} leaves some of the "
      f"{len(target.devices)} devices of {target.name} idle. Set mesh.fsdp = "
      "0, which takes all, or name a target of that size."
    )
  graphdef = model.build(backbone)
  learners = {
    role: tools.learner(config, config[role], graphdef, mesh) for role in ROLES
  }
  layout = rollout_layout(
    config,
    graphdef,
    config_lib.rollout_mesh(config, mesh)
    if target.name == targets.HERE
    else sharding.rollout_mesh(config.mesh.rollout_tensor, target.host),
  )
  config_lib.check_longest(config, layout)
  lengths = {
    role: packing.row_length(
      config[role].episode_tokens, config.learner.row_multiple
    )
    for role in ROLES
  }
  return Run(config, target, backbone, learners, lengths, layout)


def architecture(config: Any) -> backbones.Backbone:
  """Returns the backbone of a config, whose weights need not be here.

  Raises:
    ValueError: they are not, and no published model is called as the config.
  """
  try:
    path = config_lib.locate(config.policy.path)
  except ValueError as missing:
    try:
      return backbones.published(config.name)
    except ValueError as unknown:
      raise ValueError(f"{missing} {unknown}") from unknown
  return weights.check(config.policy.source, path)


def rollout_layout(
  config: Any, graphdef: model.Decoder, mesh: Mesh
) -> decode.Layout:
  """Returns the layout of the engine's programs, as the engine has it."""
  return engine_lib.layout(
    graphdef,
    mesh,
    steps=config.engine.steps_per_dispatch,
    ends=_ENDS,
    **config_lib.engine_sizes(config),
  )
