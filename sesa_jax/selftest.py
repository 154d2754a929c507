"""Does this machine compute what it should? Run first on a new one.

    python -m sesa_jax.main --mode=selftest

A small random model of the backbones' shapes goes through what a run goes
through: the kernels that `auto` chooses here, the engine on every mesh of this
host's devices, the learner. Each is held against a plain forward pass.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from sesa_jax import rollout, types
from sesa_jax.engine import engine as engine_lib
from sesa_jax.learner import learner as learner_lib
from sesa_jax.policy import attention, model, sharding
from sesa_jax.policy.backbones import Backbone

_LENGTH = 512
_VOCABULARY = 3000
_END = _VOCABULARY - 1


class Check(NamedTuple):
  """One comparison: passed if what was measured is within the limit."""

  name: str
  measured: float
  limit: float

  @property
  def passed(self) -> bool:
    """NaN is within no limit."""
    return self.measured <= self.limit


def main(console: rich.console.Console | None = None) -> int:
  """Runs all checks and prints a table; returns the exit code, 1 if any fails.

  Every check is between things that do not share their code. Limits are those
  of float32 on a CPU and of bfloat16 elsewhere.
  """
  console = console or rich.console.Console()
  devices = jax.local_devices()
  kinds = ", ".join(sorted({device.device_kind for device in devices}))
  console.print(f"{len(devices)} x {kinds}, jax {jax.__version__}")
  table = rich.table.Table("check", "measured", "limit", "")
  checks = []
  for check in run(devices):
    checks.append(check)
    table.add_row(
      check.name,
      f"{check.measured:.2g}",
      f"{check.limit:.2g}",
      "[green]ok[/]" if check.passed else "[red]FAILED[/]",
    )
  console.print(table)
  failed = [check.name for check in checks if not check.passed]
  console.print(
    f"{len(failed)} of {len(checks)} failed: {'; '.join(failed)}. A run on "
    "this machine would learn from wrong numbers. Try another version of jax, "
    "or a config with the attention 'xla'."
    if failed
    else f"All {len(checks)} passed."
  )
  return 1 if failed else 0


def run(devices: Sequence[jax.Device]) -> Iterator[Check]:
  """Yields each check as it is done, on these devices of one host."""
  cpu = devices[0].platform == "cpu"
  dtype = "float32" if cpu else "bfloat16"
  backbone = _backbone(cpu)
  graphdef = model.build(backbone)
  mesh = sharding.mesh(len(devices), 1, devices)
  kind = attention.resolve(
    "auto", devices[0].platform, backbone.head_dim, dtype
  )
  yield from _training_attention(kind, mesh, backbone, dtype)

  params = _params(backbone)
  learner, plain = (
    _learner(graphdef, mesh, len(devices), choice, dtype)
    for choice in (kind, "xla")
  )
  policy = learner.init(params)
  exact = 1e-4 if cpu else 1.0  # of one token, in nats
  mean = rollout.GAP_LIMITS[dtype]
  before: Sequence[types.Episode] = ()
  for tensor in _splits(backbone, len(devices)):
    shards = len(devices) // tensor
    engine = _engine(graphdef, shards, tensor, devices, dtype)
    label = f"engine on {shards} x {tensor} devices ({engine.layout.kind})"
    copy = engine.load(policy.params)
    episodes = _play(engine, copy)
    again = _play(engine, copy)
    yield Check(
      f"{label}: two runs differ in episodes", _differing(episodes, again), 0
    )
    forward = [_forward(graphdef, params, episode) for episode in episodes]
    gap, most = rollout.gaps(episodes, forward)
    yield Check(f"{label}: mean gap to a plain forward", gap, mean)
    yield Check(f"{label}: greatest gap to it", most, exact)
    if before and cpu:
      changed = _differing(episodes, before) / len(episodes)
      yield Check(f"{label}: episodes unlike the first mesh's", changed, 0.2)
    before = before or episodes

  scores = learner.score(policy.params, before, temperature=1.0)
  gap, most = rollout.gaps(before, scores)
  yield Check(f"learner ({kind}): mean gap to the engine", gap, mean)
  yield Check(f"learner ({kind}): greatest gap to it", most, exact)
  yield _update(learner, plain, policy, params, before, kind, cpu)


# --- what is compared ---------------------------------------------------------


def _backbone(cpu: bool) -> Backbone:
  """The shapes that kernels depend on are a real backbone's."""
  return Backbone(
    vocab_size=_VOCABULARY,
    dim=512,
    ffn=512 if cpu else 2048,
    layers=2 if cpu else 4,
    heads=16,
    kv_heads=8,
    head_dim=16 if cpu else 128,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied=False,
    qk_norm=True,
    qkv_bias=True,
    context=4096,
  )


def _params(backbone: Backbone) -> model.Params:
  drawn = jax.jit(model.init, static_argnums=0)(backbone, jax.random.key(1))
  # Larger than at initialisation: else no token is likelier than another. In
  # bfloat16's numbers, so that the cast itself costs nothing.
  return jax.tree.map(
    lambda x: (
      (x * (3 if x.ndim > 1 else 1)).astype(jnp.bfloat16).astype(x.dtype)
    ),
    drawn,
  )


def _splits(backbone: Backbone, count: int) -> list[int]:
  """Sizes of the rollout mesh's tensor axis: none, some, all that fit."""
  fit = [n for n in range(1, count + 1) if not count % n]
  fit = [n for n in fit if not backbone.kv_heads % n]
  return sorted({fit[0], fit[len(fit) // 2], fit[-1]})


def _learner(graphdef, mesh, rows, kind, dtype) -> learner_lib.Learner:
  return learner_lib.Learner(
    graphdef,
    mesh,
    learning_rate=1e-3,
    warmup_updates=0,
    minibatch_questions=100,
    clip_low=0.2,
    clip_high=0.2,
    kl_coefficient=0.0,
    microbatch_rows=rows,
    row_multiple=_LENGTH,
    compute_dtype=dtype,
    attention=kind,
  )


def _engine(graphdef, data, tensor, devices, dtype) -> engine_lib.Engine:
  return engine_lib.Engine(
    graphdef,
    graphdef.backbone,
    _NoText(),
    [b"" for _ in range(_VOCABULARY)],
    (_END,),
    mesh=sharding.rollout_mesh(tensor, devices),
    slots=4 * data,
    length=_LENGTH,
    page_size=128,
    prefill_chunk=64,
    steps_per_dispatch=8,
    deterministic=True,
    dtype=dtype,
    seed=0,
  )


class _NoText:
  def decode(self, ids: Sequence[int]) -> str:
    return ""


class _Script:
  """Episodes of up to three turns, with observations of drawn lengths."""

  stops = ()

  def respond(self, pause: types.Pause) -> types.Reply:
    rng = random.Random(f"{pause.request_id}/{pause.attempt}/{pause.turn}")
    if pause.turn == 2 or pause.room < 100:
      return types.Reply("finish", finish="answer", action="answer")
    ids = tuple(rng.randrange(_END) for _ in range(rng.randrange(90)))
    return types.Reply("append", ids, action="search")


def _play(engine: engine_lib.Engine, copy: Any) -> Sequence[types.Episode]:
  rng = random.Random(0)
  requests = [
    types.Request(
      id=str(number),
      prompt_ids=tuple(
        rng.randrange(_END) for _ in range(rng.randrange(1, 200))
      ),
      attempts=2,
      sampling=types.Sampling(),
      limits=types.Limits(turn_tokens=12, episode_tokens=_LENGTH, turns=3),
      arm="selftest",
    )
    for number in range(6)
  ]
  return engine.play(copy, requests, _Script(), iteration=0).episodes


def _differing(
  some: Sequence[types.Episode], others: Sequence[types.Episode]
) -> int:
  return sum(
    not (
      np.array_equal(one.ids, other.ids)
      and np.array_equal(one.mask, other.mask)
    )
    for one, other in zip(some, others, strict=True)
  )


def _forward(graphdef, params, episode: types.Episode) -> np.ndarray:
  """Logprobs of an episode's ids by one plain float32 pass over them all."""
  size = len(episode.ids)
  ids = np.zeros((1, _LENGTH), np.int32)
  ids[0, :size] = episode.ids
  logits = _plain(graphdef, params, ids, size)
  logprobs = np.asarray(jax.nn.log_softmax(logits[0]))
  found = np.zeros(size, np.float32)
  found[1:] = logprobs[np.arange(size - 1), episode.ids[1:]]
  return np.where(episode.mask, found, 0)


@functools.partial(jax.jit, static_argnums=0)
def _plain(graphdef, params, ids, size):
  positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
  with jax.default_matmul_precision("highest"):
    hidden = model.hidden(
      graphdef,
      params,
      ids,
      positions,
      (positions < size).astype(jnp.int32),
      compute_dtype=jnp.float32,
      remat=False,
    )
    return model.logits(graphdef, params, hidden)


def _training_attention(kind, mesh, backbone, dtype) -> Iterator[Check]:
  """Values and gradients of the training kernel beside the definition's."""
  rows, length = mesh.shape["fsdp"], 256
  keys = jax.random.split(jax.random.key(2), 4)

  def draw(key, heads):
    shape = rows, length, heads, backbone.head_dim
    return jax.random.normal(key, shape).astype(dtype)

  q, k, v, mix = (
    draw(key, heads)
    for key, heads in zip(
      keys,
      (backbone.heads, backbone.kv_heads, backbone.kv_heads, backbone.heads),
      strict=True,
    )
  )
  # Packed rows, except for cuDNN's, which hold one sequence and padding.
  sizes = [200, 56] if kind == "cudnn" else [90, 100, 66]
  numbers = [1, 0] if kind == "cudnn" else [1, 2, 0]
  segments = jnp.tile(
    jnp.repeat(jnp.array(numbers), jnp.array(sizes)), (rows, 1)
  )

  def mixed(attend):
    def total(q, k, v):
      out = attend(q, k, v, segments).astype(jnp.float32)
      out = jnp.where(segments[..., None, None] > 0, out, 0)
      return jnp.sum(out * mix), out

    return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(q, k, v)

  gradients, out = mixed(attention.training(kind, mesh))
  with jax.default_matmul_precision("highest"):
    expected_gradients, expected = mixed(_definition)
  limit = 1e-5 if jnp.dtype(dtype) == jnp.float32 else 2e-2
  label = f"training attention ({kind})"
  yield Check(f"{label}: values", _relative(out, expected), limit)
  yield Check(
    f"{label}: gradients",
    max(map(_relative, gradients, expected_gradients)),
    limit,
  )


def _definition(q, k, v, segments):
  """Causal attention inside segments, written out, float32."""
  q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  group = q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
  scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
  place = jnp.arange(q.shape[1])
  seen = (segments[:, :, None] == segments[:, None, :]) & (
    place[:, None] >= place[None, :]
  )
  weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
  return jnp.einsum("bnts,bsnh->btnh", weights, v)


def _update(learner, plain, policy, params, episodes, kind, cpu) -> Check:
  """Does one update move the weights as it does with plain attention?"""
  lessons = [
    types.Lesson(episode, 1.0 if number % 2 else -1.0)
    for number, episode in enumerate(episodes)
  ]
  moved, _ = learner.update(policy, None, lessons, temperature=1.0)
  expected, _ = plain.update(plain.init(params), None, lessons, temperature=1.0)

  def step(updated):
    # Adam's first moment is the gradient, scaled; the step its sign alone.
    return jax.tree.leaves(updated.opt_state.adam[0].mu)

  difference = max(map(_relative, step(moved), step(expected)))
  return Check(
    f"update ({kind}): gradient beside plain attention's",
    difference,
    1e-4 if cpu else 0.2,
  )


def _relative(value, expected) -> float:
  """|value - expected| / |expected|, in the Euclidean norm."""
  value, expected = (np.asarray(x, np.float64) for x in (value, expected))
  return float(
    np.linalg.norm(value - expected) / max(np.linalg.norm(expected), 1e-30)
  )
