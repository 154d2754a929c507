"""Says before anyone books a machine whether a run fits it, and what it costs.

The run's own programs are lowered with the run's own shardings and compiled,
for hardware that need not be here. Their memory is the compiler's; what lies
beside them is added up, phase by phase; FLOPs and bytes are `costs`'.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import AxisType, Mesh, NamedSharding

from sesa_jax import config as config_lib
from sesa_jax import costs
from sesa_jax.engine import decode
from sesa_jax.plan.compiled import Compiled, compile_program, device_bytes
from sesa_jax.plan.run import ROLES, Run, read, rollout_layout
from sesa_jax.policy import model


@dataclasses.dataclass(frozen=True)
class Phase:
  """What lies on each device at once, at the worst moment of a phase."""

  name: str
  program: str
  resident: Mapping[str, float]  # bytes, by what they are
  added: float  # bytes: the program's temporaries, outputs and own arguments
  memory: float  # bytes that there are

  @property
  def total(self) -> float:
    """Bytes that there must be."""
    return sum(self.resident.values()) + self.added

  @property
  def left(self) -> float:
    """Bytes that nothing needs; below 0 where some are missing."""
    return self.memory - self.total

  @property
  def fits(self) -> bool:
    """Whether none are missing."""
    return self.left >= 0


@dataclasses.dataclass(frozen=True)
class Cache:
  """Room for keys and values in a rollout, of one way to lay them out."""

  kind: str  # of `engine.attention`
  pages: int  # of a data shard, as the config asks for
  fitting: int  # as many as there is room for
  page_size: int
  width: int  # pages of the longest episode
  shards: int  # data shards of all hosts together
  temporaries: float  # bytes of the decode loop, on each device
  rows: float = 0.0  # in a decode step of a data shard, at half their longest
  step_bytes: float = 0.0  # that such a step reads and writes
  tokens_per_second: float | None = None  # an estimate, of all hosts together

  @property
  def usable(self) -> int:
    """Pages of a data shard that a run would have, trash left out."""
    return max(0, min(self.pages, self.fitting) - 1)

  @property
  def tokens(self) -> int:
    """Tokens that there is room for, on all hosts together."""
    return max(0, self.fitting - 1) * self.page_size * self.shards

  @property
  def episodes(self) -> int:
    """Episodes at their longest that there is room for at once."""
    return max(0, self.fitting - 1) // self.width * self.shards

  @property
  def fits(self) -> bool:
    """Whether there is room for what the config asks for."""
    return self.pages <= self.fitting


@dataclasses.dataclass(frozen=True)
class Plan:
  """All that is known of a run on a target."""

  config: str
  target: str
  devices: int
  hosts: int
  mesh: Mapping[str, int]
  microbatch: Mapping[str, tuple[int, int]]  # rows and tokens a row, by role
  offload: bool
  attention: Mapping[str, str]  # of training and rollout
  contiguous: bool  # slots have a stretch of their own, and no pages
  programs: Mapping[str, Compiled]
  phases: tuple[Phase, ...]
  caches: tuple[Cache, ...]  # the config's, and what else there is
  step: float  # bytes of one policy's step, on each device
  estimate: Mapping[str, float]  # see `estimate`
  remedies: tuple[str, ...]  # flags that make it fit

  @property
  def fits(self) -> bool:
    """Whether every phase has its memory."""
    return all(phase.fits for phase in self.phases) and self.caches[0].fits


def make(
  run: Run,
  known: MutableMapping[str, Compiled] | None = None,
  remedies: bool = True,
) -> Plan:
  """Compiles a run's programs and adds up what each phase needs.

  Args:
    run: of `read`.
    known: of `compile_program`.
    remedies: look for what makes it fit where it does not.
  """
  compiled: dict[str, Compiled] = {}
  known = {} if known is None else known

  def compile_one(name: str, program: Any, arguments: tuple) -> Compiled:
    logging.info("Compiling %s for %s.", name, run.target.name)
    compiled[name] = compile_program(program, arguments, run.target, known)
    return compiled[name]

  phases, step = _training(run, compile_one)
  rollout, caches = _rollout(run, compile_one)
  plan = Plan(
    config=run.config.name,
    target=run.target.name,
    devices=len(run.target.devices),
    hosts=run.target.hosts,
    mesh=dict(run.learners["solver"].mesh.shape) | _of_rollout(run.layout.mesh),
    microbatch={
      role: (run.config.learner.microbatch_rows, run.lengths[role])
      for role in ROLES
    },
    offload=run.config.learner.offload,
    attention=dict(
      training=run.learners["solver"].attention, rollout=run.layout.kind
    ),
    contiguous=run.layout.contiguous,
    programs=compiled,
    phases=(*rollout, *phases),
    caches=caches,
    step=step,
    estimate=estimate(run, caches[0]),
    remedies=(),
  )
  if remedies and not plan.fits:
    found = tuple(_remedies(run, plan, known))
    plan = dataclasses.replace(plan, remedies=found)
  return plan


def _of_rollout(mesh: Mesh) -> dict[str, int]:
  return {f"rollout_{name}": size for name, size in mesh.shape.items()}


Compile = Callable[[str, Any, tuple], Compiled]


def _training(run: Run, compile_one: Compile) -> tuple[list[Phase], float]:
  """Phases of the updates, and the memory of one policy's largest step."""
  phases, done, largest = [], {}, 0.0
  same = len({_shape(run, role) for role in ROLES}) == 1
  for role in ROLES:
    if (shape := _shape(run, role)) in done:
      continue
    suffix = "" if same else f" {role}"
    learner = run.learners[role]
    arguments = learner.arguments(run.lengths[role])
    held = learner.abstract()
    # Part of each program's arguments lies there anyway.
    there = dict(
      score=device_bytes(run.reference),
      accumulate=device_bytes(held.params),
      apply=device_bytes(held),
    )
    done[shape] = role
    for name, already in there.items():
      if name == "score" and not learner.kl_coefficient:
        continue
      label = f"{name}{suffix}"
      program = getattr(learner.programs, name)
      found = compile_one(label, program, arguments[name])
      added = found.total - already
      if name != "score":
        largest = max(largest, device_bytes(held) + added)
      phases.append(
        Phase(
          f"{_PHASES[name]}{suffix}", label, run.parts, added, run.target.memory
        )
      )
  return phases, largest


ROLLOUT = "rollout"
_PHASES = {
  "score": "reference scoring",
  "accumulate": "update, gradient",
  "apply": "update, step",
}


def _shape(run: Run, role: str) -> Any:
  """What the programs of a role depend on."""
  return id(run.learners[role].programs), run.lengths[role]


def _rollout(
  run: Run, compile_one: Compile
) -> tuple[list[Phase], tuple[Cache, ...]]:
  """Phases of a rollout; both policies play with the same programs."""
  learner, memory = run.learners["solver"], run.target.memory
  params = learner.abstract().params
  loaded = compile_one("load", _load(run), (params,))
  phases = [
    Phase(
      "rollout, load",
      "load",
      run.parts,
      loaded.total - device_bytes(params),
      memory,
    )
  ]
  copy = device_bytes(decode.weight_shapes(run.layout))
  resident = run.parts | {"rollout weights": copy}
  free = memory - sum(resident.values())
  caches = []
  for number, layout in enumerate((run.layout, *_other_layouts(run))):
    # A pool that is too large would be refused, and tell nothing.
    tried = _with_pages(layout, 0.9 * free)
    arguments = decode.arguments(tried)
    mark = f" {layout.kind}" if number else ""
    found = {
      f"{name}{mark}": compile_one(
        f"{name}{mark}", getattr(decode.programs(tried), name), arguments[name]
      )
      for name in ("decode", "prefill", "copy")
    }
    decoding, _, copying = found.values()
    # As it lies there: a TPU pads small sides.
    pool = max(device_bytes(arguments["copy"][0]), copying.aliased)
    beside = {
      label: program.total - pool - (0 if program is copying else copy)
      for label, program in found.items()
    }
    worst = max(beside, key=beside.__getitem__)
    room = max(0.0, free - beside[worst])
    fitting = int(room // (pool / tried.pages))
    cache = Cache(
      kind=layout.kind,
      pages=layout.pages,
      fitting=fitting,
      page_size=layout.page_size,
      width=layout.width,
      shards=layout.data * run.target.hosts,
      temporaries=decoding.temporaries,
    )
    rows, moved = decode_step(run, layout, cache)
    cache = dataclasses.replace(cache, rows=rows, step_bytes=moved)
    rate = decode_rate(run, layout, cache)
    caches.append(dataclasses.replace(cache, tokens_per_second=rate))
    if not number:
      kept = resident | {"keys and values": pool / tried.pages * layout.pages}
      phases.append(Phase(ROLLOUT, worst, kept, beside[worst], memory))
  return phases, tuple(caches)


def _with_pages(layout: decode.Layout, room: float) -> decode.Layout:
  """The layout, with no more pages than there is room for; an episode's."""
  if layout.contiguous:
    return layout
  one = device_bytes(decode.arguments(layout)["copy"][0]) / layout.pages
  pages = max(layout.width + 1, min(layout.pages, int(room // one)))
  return dataclasses.replace(layout, pages=pages)


def _other_layouts(run: Run) -> list[decode.Layout]:
  """On a GPU, the cache that the config does not take, to be compared."""
  if run.target.platform != "gpu" or not run.layout.kind.startswith("cudnn"):
    return []
  cache = run.config.engine.cache
  other = "contiguous" if cache == "paged" else "paged"
  config = run.config.copy_and_resolve_references()
  with config.unlocked():
    config.engine.cache = other
  return [rollout_layout(config, model.build(run.backbone), run.layout.mesh)]


def _load(run: Run) -> Any:
  """Jits `Engine.load` over all hosts: each gets a copy on a mesh of its own.

  In one step and in the training mesh's order. Where hosts are not neighbours
  in that order a run takes two steps, of which none needs more than this.
  """
  source, own = run.learners["solver"].mesh, run.layout.mesh
  grid = np.reshape(source.devices, (-1, *own.devices.shape))
  mesh = Mesh(
    grid, ("host", *own.axis_names), axis_types=(AxisType.Auto,) * grid.ndim
  )
  cast = functools.partial(
    decode.cast, graphdef=run.layout.graphdef, dtype=run.layout.dtype
  )
  shapes = decode.weight_shapes(run.layout)
  return jax.jit(
    cast,
    out_shardings=jax.tree.map(
      lambda x: NamedSharding(mesh, x.sharding.spec), shapes
    ),
  )


def decode_step(
  run: Run, layout: decode.Layout, cache: Cache
) -> tuple[float, float]:
  """Returns the rows of a decode step of a data shard, and bytes it moves.

  Rows are at half their longest, and as many as the pages hold.
  """
  half = layout.width * layout.page_size / 2
  rows = min(layout.slots, cache.usable * layout.page_size / half)
  moved = costs.decode_bytes(
    run.backbone, rows, rows * half, layout.dtype.itemsize
  )
  if layout.kind == "cudnn":
    # Gathered at full length: read, written, and read by the kernel.
    whole = layout.slots * layout.width * layout.page_size
    moved += 2 * whole * costs.kv_bytes(run.backbone, layout.dtype.itemsize)
  return rows, moved


def decode_rate(run: Run, layout: decode.Layout, cache: Cache) -> float | None:
  """Returns the roofline of sampled tokens a second, of all hosts."""
  chip, rows = run.target.chip, cache.rows
  if chip is None or not rows:
    return None
  half = layout.width * layout.page_size / 2
  flops = costs.forward(run.backbone, rows, rows * half, rows).total
  tensor = layout.mesh.shape["tensor"]
  seconds = costs.seconds(
    flops / tensor, cache.step_bytes / tensor, chip.flops, chip.bandwidth
  )
  return rows / seconds * cache.shards


def estimate(run: Run, cache: Cache) -> dict[str, float]:
  """Counts an iteration's FLOPs, and its hours if nothing lost a cycle.

  As if every episode reached its longest: all turns but the last end in an
  observation at its longest, and the rest is sampled. Evidence checks, tools,
  the judge, collectives and the transfers of an offload are left out. So no
  machine is faster; one that needs twice as long does well.

  Returns:
    tokens, sampled tokens and FLOPs, by role and phase, and the bytes that
    decode steps and Adam move, of all devices together; where the chip's rates
    are known seconds too, and hours of all.
  """
  found: dict[str, float] = {}
  width = jnp.dtype(run.config.learner.moments).itemsize
  for role in ROLES:
    work = _work(run, role)
    found |= {f"{role}/{name}": value for name, value in work.items()}
    questions, *_ = _episodes(run.config, role)
    steps = math.ceil(questions / run.config[role].minibatch_questions)
    moved = steps * costs.apply_bytes(run.backbone, width)
    found[f"{role}/bytes/update"] = moved
    if cache.rows:
      steps = work["sampled"] / cache.rows
      found[f"{role}/bytes/rollout"] = steps * cache.step_bytes
    chip, rate = run.target.chip, cache.tokens_per_second
    if chip is None or rate is None:
      continue
    devices = len(run.target.devices)
    seconds = {
      name: work[f"flops/{name}"] / (chip.flops * devices)
      for name in ("prefill", "score", "update")
    }
    found |= {
      f"{role}/seconds/rollout": work["sampled"] / rate + seconds["prefill"],
      f"{role}/seconds/score": seconds["score"],
      f"{role}/seconds/update": seconds["update"]
      + moved / devices / chip.bandwidth,
    }
  seconds = [value for name, value in found.items() if "/seconds/" in name]
  if seconds:
    found["hours"] = sum(seconds) / 3600
  return found


def _work(run: Run, role: str) -> dict[str, float]:
  """Tokens and FLOPs of one role in an iteration."""
  config, values = run.config, run.config[role]
  length = values.episode_tokens
  observed = (values.turns - 1) * config.environment.observation_tokens
  observed = min(observed, length - values.turn_tokens)
  questions, learned, played = _episodes(config, role)
  # Of one episode; what is observed lies anywhere in it: it sees its share.
  sampled, context = length - observed, costs.context_of(0, length)
  forward = costs.forward(run.backbone, length, context, sampled).total
  prefill = costs.forward(
    run.backbone, observed, context * observed / length, 0
  ).total
  update = costs.gradient(
    run.backbone,
    length,
    context,
    sampled,
    remat=config.policy.remat,
    attention=run.learners[role].attention,
  ).total
  # The reference's logprobs, and old ones where there are several updates.
  several = questions > values.minibatch_questions
  passes = several + (values.kl_coefficient > 0)
  return {
    "tokens": played * length,
    "sampled": played * sampled,
    "flops/rollout": played * forward,
    "flops/prefill": played * prefill,  # a part of the rollout's
    "flops/score": learned * passes * forward,
    "flops/update": learned * update,
  }


def _episodes(config: Any, role: str) -> tuple[int, int, int]:
  """Counts what a role does in an iteration.

  Returns:
    Questions that it learns from, its episodes at them, and all that it plays:
    the solver's without skills come on top.
  """
  seeds, proposals = config.questions, config.challenger.group_size
  if role == "challenger":
    posed = seeds * proposals * config.selfplay
    learns = not config.challenger.frozen
    return seeds * config.selfplay * learns, posed * learns, posed
  tasks = seeds * (proposals if config.selfplay else 1)
  learned = tasks * config.solver.group_size
  return tasks, learned, learned + tasks * config.bank.control_attempts


def _remedies(
  run: Run, plan: Plan, known: MutableMapping[str, Compiled]
) -> Iterator[str]:
  """Tries switches one after the other, each on top of those before.

  Yields:
    Flags that together make the run fit; none where nothing did.
  """
  config = run.config
  fsdp, tensor = config_lib.mesh_sizes(config, plan.devices)
  changes: dict[str, Any] = {}
  for step in (
    {},
    {"learner.offload": True},
    {"learner.microbatch_rows": fsdp},
    {
      "mesh.fsdp": fsdp // 2,
      "mesh.tensor": 2 * tensor,
      "learner.microbatch_rows": fsdp // 2,
    },
    {"mesh.rollout_tensor": 2 * config.mesh.rollout_tensor},
  ):
    if step and all(_value(config, name) == x for name, x in step.items()):
      continue
    tried = changes | step
    try:
      found = plan
      if tried:
        other = read(changed(config, tried), run.target, ())
        found = make(other, known, remedies=False)
    except ValueError:
      continue  # heads or devices do not divide so
    changes = tried
    cache, pages = found.caches[0], {}
    if not cache.fits and cache.episodes and not found.contiguous:
      pages = {"engine.pages": cache.fitting}
    others = [phase for phase in found.phases if phase.name != ROLLOUT]
    if all(phase.fits for phase in others) and (cache.fits or pages):
      for name, value in (changes | pages).items():
        yield f"--config.{name}={value}"
      return


def _value(config: Any, name: str) -> Any:
  return functools.reduce(lambda node, key: node[key], name.split("."), config)


def changed(config: Any, changes: Mapping[str, Any]) -> Any:
  """Returns a copy of a config with other values, by dotted name."""
  copy = config.copy_and_resolve_references()
  with copy.unlocked():
    copy.update_from_flattened_dict(dict(changes))
  return copy.lock()
