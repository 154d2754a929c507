"""Plays many multi-turn episodes of one policy at a time.

Fixed slots, paged keys and values: a slot holds one episode until that ends,
then the next one of the queue. Between calls of the decode loop the host takes
what was sampled, asks the environment about episodes that paused, appends
observations and refills slots. Weights are an argument; the engine holds none.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sesa_jax import costs, distributed, types
from sesa_jax.engine import attention as attention_lib
from sesa_jax.engine import decode, stops
from sesa_jax.engine.pages import pages_for
from sesa_jax.engine.play import Play
from sesa_jax.engine.shard import Playing, check_ids, sampling_key
from sesa_jax.policy import sharding

_PROBE_PROMPT, _PROBE_SAMPLED, _PROBE_ATTEMPTS = 48, 16, 2


@dataclasses.dataclass(frozen=True)
class Played:
  """Episodes in the order of requests and attempts, and what they cost.

  Of several plays, `metrics` add up; `rates` are made of the sums.
  """

  episodes: tuple[types.Episode, ...]
  metrics: dict[str, float]


class Engine:
  """Plays requests on fixed slots with paged keys and values.

  Args:
    graphdef: the policy's static part.
    backbone: its architecture.
    tokenizer: of the backbone; used to show text in `Turn.text` only.
    token_bytes: the bytes of each id, for the stop automaton.
    end_ids: ids that end a turn.
    slots: episodes played at a time, on the whole mesh.
    length: ids that the longest episode holds.
    prefill_chunk: ids a prefill writes at a time, over several episodes.
    steps_per_dispatch: ids decoded before the host looks.
    deterministic: await every pending tool before each dispatch, so that the
      order of events does not depend on time.
    dtype: of weights and pages.
    seed: of the run.
    mesh: of `sharding.rollout_mesh`; one device by default.
    page_size: ids of a page.
    pages: of a data shard; 0 is as many as all slots at their longest need.
    attention: of `attention.KINDS`, or "auto".
    check: assert the pages' invariants after each dispatch; for tests.

  Raises:
    ValueError: sizes that do not go together.
  """

  def __init__(
    self,
    graphdef,
    backbone,
    tokenizer,
    token_bytes: Sequence[bytes],
    end_ids: Sequence[int],
    *,
    slots: int,
    length: int,
    prefill_chunk: int,
    steps_per_dispatch: int,
    deterministic: bool,
    dtype: Any,
    seed: int,
    mesh: Mesh | None = None,
    page_size: int = 128,
    pages: int = 0,
    attention: str = "auto",
    check: bool = False,
  ):
    if mesh is None:
      mesh = sharding.rollout_mesh(1, jax.local_devices()[:1])
    self.layout = layout(
      graphdef,
      mesh,
      slots=slots,
      length=length,
      page_size=page_size,
      pages=pages,
      prefill_chunk=prefill_chunk,
      steps=steps_per_dispatch,
      ends=len(end_ids),
      dtype=dtype,
      attention=attention,
    )
    self._tokenizer = tokenizer
    # Tables of weights may have more rows than the tokenizer has ids.
    unknown = backbone.vocab_size - len(token_bytes)
    self._token_bytes = (*token_bytes, *[b""] * unknown)
    self._length = length
    self._deterministic = deterministic
    self._seed = seed
    self._check_pages = check
    self._everywhere = NamedSharding(mesh, PartitionSpec())
    self._ends = jax.device_put(np.array(end_ids, np.int32), self._everywhere)
    self._compile_stops = functools.lru_cache(self._compile_stops)

  # --- weights ---

  def load(self, params: Any) -> Any:
    """Makes rollout weights of a policy's masters, in one jitted program.

    They are cast, unstacked, their vocabulary is padded, and they go from the
    training mesh to this host's rollout mesh: a collective of all processes.
    The masters stay; the caller should have dropped the copy before.
    """
    return self._cast(params)

  @functools.cached_property
  def _cast(self) -> Callable[[Any], Any]:
    cast = functools.partial(
      decode.cast, graphdef=self.layout.graphdef, dtype=self.layout.dtype
    )
    shapes = decode.weight_shapes(self.layout)
    placed = sharding.shardings(self.layout.mesh, shapes)
    return distributed.onto_host_mesh(cast, placed)

  def probe(self, weights: Any) -> tuple[types.Episode, ...]:
    """Plays a fixed prompt, on every data shard, at temperature 1.

    To be compared with the learner's logprobs of the same ids: rollout weights
    that differ from the masters show in the sampled ids' logprobs. It runs the
    programs that episodes run.
    """
    size = min(_PROBE_PROMPT, self._length // 2)
    limit = min(_PROBE_SAMPLED, self._length - size)
    vocabulary = self.layout.graphdef.backbone.vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, size)
    requests = [
      types.Request(
        id=f"probe/{shard}",
        prompt_ids=tuple(ids.tolist()),
        attempts=_PROBE_ATTEMPTS,
        sampling=types.Sampling(),
        limits=types.Limits(limit, size + limit, 1),
        arm="probe",
      )
      for shard in range(self.layout.data)
    ]
    return self.play(weights, requests, _OneTurn(), iteration=0).episodes

  # --- episodes ---

  def _compile_stops(self, strings: tuple[str, ...]):
    automaton = stops.compile_stops(strings, self._token_bytes)
    return automaton, jax.device_put(automaton.table, self._everywhere)

  def play(
    self,
    weights: Any,
    requests: Sequence[types.Request],
    environment: types.Environment,
    *,
    iteration: int,
    on_episode: Callable[[types.Episode], None] = lambda episode: None,
  ) -> Played:
    """Plays every attempt of every request to its end.

    Args:
      weights: of `load`.
      requests: ids must be unique among them.
      environment: answers pauses.
      iteration: part of every sampling key.
      on_episode: called with each episode when it ends.

    Returns:
      The episodes and the metrics.

    Raises:
      ValueError: two requests share an id, one can never fit, one holds ids
        that the vocabulary does not, as may a reply, or one samples or is
        limited in a way that there is not.
    """
    began = time.perf_counter()
    self._check(requests)

    def begin(request: types.Request, attempt: int, number: int) -> Playing:
      limit = min(request.limits.episode_tokens, self._length)
      key = sampling_key(self._seed, iteration, request.id, attempt)
      return Playing(request, attempt, number, limit, key)

    play = Play(
      self.layout,
      weights,
      *self._compile_stops(tuple(environment.stops)),
      self._ends,
      environment,
      self._tokenizer.decode,
      begin,
      cut=any(r.sampling.top_p < 1 or r.sampling.top_k for r in requests),
      deterministic=self._deterministic,
      check=self._check_pages,
    )
    done: dict[tuple[str, int], types.Episode] = {}
    for episode in play.run(requests):
      done[episode.request_id, episode.attempt] = episode
      on_episode(episode)
    order = [(r.id, a) for r in requests for a in range(r.attempts)]
    seconds = time.perf_counter() - began
    return Played(
      tuple(done[key] for key in order), self._metrics(play, seconds)
    )

  def _metrics(self, play: Play, seconds: float) -> dict[str, float]:
    """Counts, which repeat, and times, which do not."""
    counts, times = play.counts, play.seconds
    device, tools = times["device"], times["tool_wait"]
    flops = costs.forward(
      self.layout.graphdef.backbone,
      tokens=counts["sampled"] + counts["prefilled"],
      context=counts["decode_pairs"] + counts["prefill_pairs"],
      scored=counts["sampled"],
    )
    matmul = matmul_rate(self.layout.mesh, self.layout.dtype.name)
    # `padding` and `idle`: places in prefill batches and in the decode loop
    # that were computed for nobody.
    names = "sampled prefilled shared recomputed padding idle".split()
    return {
      **{f"tokens/{name}": counts[name] for name in names},
      # (query, key) pairs that attention scored in a layer.
      "pairs/decode": counts["decode_pairs"],
      "pairs/prefill": counts["prefill_pairs"],
      "preempted": counts["preempted"],
      "dispatches": counts["dispatches"],
      "steps": counts["steps"],  # of all data shards together
      "slot_steps": counts["steps"] * self.layout.slots,
      "flops": flops.total,
      "seconds": seconds,
      "seconds/device": device,
      "seconds/tool_wait": tools,
      "seconds/host": seconds - device - tools,
      "seconds/matmul": flops.total / matmul,
    }

  def _check(self, requests: Sequence[types.Request]) -> None:
    vocabulary = self.layout.graphdef.backbone.vocab_size
    names = [request.id for request in requests]
    if len(set(names)) != len(names):
      twice = [n for n, c in collections.Counter(names).items() if c > 1]
      raise ValueError(f"Requests share an id: {twice[:3]}. Ids are unique.")
    for request in requests:
      limit = min(request.limits.episode_tokens, self._length)
      if not 0 < len(request.prompt_ids) < limit:
        raise ValueError(
          f"Request {request.id!r} has a prompt of {len(request.prompt_ids)} "
          f"tokens; an episode holds {limit}, and at least one is sampled. "
          "Shorten the prompt (bank.block_tokens) or raise episode_tokens."
        )
      check_ids(f"Request {request.id!r}", request.prompt_ids, vocabulary)
      check_pages(f"Request {request.id!r}", limit, self.layout)
      _check_asked(request)


def check_pages(what: str, limit: int, layout: decode.Layout) -> None:
  """Refuses an episode that could not be played even alone.

  Args:
    what: is played, as a message calls it.
    limit: ids that it may grow to.
    layout: of `layout`.

  Raises:
    ValueError: a data shard has fewer pages.
  """
  size, have = layout.page_size, layout.pages - 1
  needs = pages_for(limit - 1, size)  # the last id need not be in the pool
  if needs > have:
    raise ValueError(
      f"{what} may grow to {limit} tokens, {needs} pages of {size}; a data "
      f"shard has {have}. Set engine.pages to at least {needs + 1} (one is not "
      f"used), or lower episode_tokens to {have * size + 1}."
    )


def _check_asked(request: types.Request) -> None:
  """Raises if a request samples or is limited in a way that there is not."""
  how, limits = request.sampling, request.limits
  if not (
    0 <= how.temperature < math.inf and 0 < how.top_p <= 1 and how.top_k >= 0
  ):
    raise ValueError(
      f"Request {request.id!r} asks for {how}; temperature and top_k are 0 or "
      "more, and finite, top_p is above 0 and at most 1."
    )
  if min(request.attempts, limits.turn_tokens, limits.turns) < 1:
    raise ValueError(
      f"Request {request.id!r} asks for {request.attempts} attempts of {limits}"
      "; attempts, turn_tokens and turns are 1 or more."
    )


def rates(metrics: Mapping[str, float]) -> dict[str, float]:
  """Returns the ratios of a play's metrics, or of the sums of several.

  occupancy = sampled / (steps slots),
  tokens_per_second = (sampled + prefilled) / seconds,
  matmul_share = seconds that matmuls alone would have taken / seconds.
  """
  passes = metrics["tokens/sampled"] + metrics["tokens/prefilled"]
  return {
    "occupancy": metrics["tokens/sampled"] / max(metrics["slot_steps"], 1),
    "tokens_per_second": passes / metrics["seconds"],
    "matmul_share": metrics["seconds/matmul"] / metrics["seconds"],
  }


@functools.lru_cache
def matmul_rate(mesh: Mesh, dtype: str) -> float:
  """Measures a product of two square matrices on a mesh: FLOPs a second.

  Its first device's, times their number; virtual CPU devices share one's.
  """
  device = mesh.devices.flat[0]
  cpu = device.platform == "cpu"
  size = 1024 if cpu else 8192
  ones = jax.device_put(np.ones((size, size), dtype), device)
  product = jax.jit(jnp.matmul)
  product(ones, ones).block_until_ready()

  def seconds() -> float:
    began = time.perf_counter()
    product(ones, ones).block_until_ready()
    return time.perf_counter() - began

  taken = statistics.median(seconds() for _ in range(5))
  return 2 * size**3 / taken * (1 if cpu else mesh.devices.size)


class _OneTurn:
  """An environment whose episodes end where they pause."""

  stops = ()

  def respond(self, pause: types.Pause) -> types.Reply:
    return types.Reply("finish", finish=pause.reason)


def layout(
  graphdef: Any,
  mesh: Mesh,
  *,
  slots: int,
  length: int,
  page_size: int,
  pages: int,
  prefill_chunk: int,
  steps: int,
  ends: int,
  dtype: Any,
  attention: str,
) -> decode.Layout:
  """Chooses the shapes of the programs. Arguments are those of `Engine`.

  No device is touched: the mesh may be one of devices that are not here.

  Raises:
    ValueError: sizes that do not go together.
  """
  data, tensor = mesh.shape["data"], mesh.shape["tensor"]
  if slots < 1 or slots % data:
    near = max(slots // data, 1) * data
    raise ValueError(
      f"engine.slots = {slots} do not divide over {data} data shards (a host's "
      f"devices / mesh.rollout_tensor = {tensor}). The nearest that do: {near} "
      f"or {near + data}."
    )
  backbone = graphdef.backbone
  platform = mesh.devices.flat[0].platform
  kind = attention_lib.resolve(
    attention, platform, backbone.head_dim, dtype, tensor
  )
  own, width = slots // data, pages_for(length, page_size)
  packs = attention_lib.KINDS[kind].packs_prefill
  chosen = decode.Layout(
    graphdef=decode.cut_vocabulary(graphdef, tensor),
    mesh=mesh,
    kind=kind,
    dtype=jnp.dtype(dtype),
    rows=_row_sizes(own, platform),
    # Ample: every slot at its longest, and a kept prompt's last page each.
    pages=pages or own * (width + 1) + 1,
    page_size=page_size,
    width=width,
    prefill_tokens=_batch_sizes(prefill_chunk),
    prefill_rows=own if packs else 1,
    steps=steps,
    ends=ends,
    # Gathered tables cost what they are wide, however short the episodes.
    widths=(-(-width // 4), -(-width // 2)) if kind == "cudnn" else (),
  )
  if chosen.contiguous:
    # A row for each slot, and one that is trash.
    pages = (own + 1) * width
    chosen = dataclasses.replace(chosen, rows=(own,), pages=pages)
  return chosen


def _row_sizes(slots: int, platform: str) -> tuple[int, ...]:
  """Sizes of the decode loop: on a CPU a row costs what it computes."""
  sizes = {slots}
  while platform == "cpu" and min(sizes) >= 16 and len(sizes) < 4:
    sizes.add(min(sizes) // 2)
  return tuple(sorted(sizes))


def _batch_sizes(chunk: int) -> tuple[int, ...]:
  """Sizes of prefill batches: a short observation needs no large one."""
  return (chunk // 4, chunk) if chunk >= 128 else (chunk,)
