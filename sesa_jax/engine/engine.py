"""Plays many multi-turn episodes of one policy at a time.

Fixed slots: a slot holds one episode until that ends, then the next one of the
queue. Between dispatches of the decode loop the host harvests what was
sampled, asks the environment about episodes that paused, appends observations
and refills slots. Weights are an argument; the engine holds none.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sesa_jax import types
from sesa_jax.engine import decode, stops
from sesa_jax.policy import model


def sampling_key(seed: int, iteration: int, request_id: str, attempt: int):
  """Returns the uint32 [2] key of an episode; its draws fold in positions.

  An episode depends on this key, its prompt and the weights, and on nothing
  else: not on its slot, its neighbours or its host.
  """
  name = f"{seed}/{iteration}/{request_id}/{attempt}".encode()
  return np.frombuffer(hashlib.sha256(name).digest()[:8], np.uint32)


@dataclasses.dataclass
class _Playing:
  """An episode in its slot."""

  request: types.Request
  attempt: int
  ids: list[int]
  mask: list[bool]
  logprobs: list[float]
  key: np.ndarray
  cached: int = 0  # ids whose keys and values the cache holds
  turns: list[types.Turn] = dataclasses.field(default_factory=list)
  turn_start: int = 0
  malformed: int = 0
  stop_state: int = stops.START
  reason: int = decode.RUNNING
  reply: concurrent.futures.Future | types.Reply | None = None


@dataclasses.dataclass(frozen=True)
class Played:
  """Episodes in the order of requests and attempts, and what they cost."""

  episodes: tuple[types.Episode, ...]
  metrics: dict[str, float]


class Engine:
  """Plays requests on fixed slots with a contiguous key-value cache.

  Args:
    graphdef: the policy's static part.
    backbone: its architecture.
    tokenizer: of the backbone; used to show text in `Turn.text` only.
    token_bytes: the bytes of each id, for the stop automaton.
    end_ids: ids that end a turn.
    slots: episodes played at a time.
    length: ids that a slot can hold: the longest episode.
    prefill_chunk: ids a prefill writes at a time.
    steps_per_dispatch: ids decoded before the host looks.
    deterministic: await every pending tool before each dispatch, so that the
      order of events does not depend on time.
    dtype: of weights and cache.
    seed: of the run.
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
  ):
    self._graphdef = graphdef
    self._backbone = backbone
    self._tokenizer = tokenizer
    self._token_bytes = token_bytes
    self._end_ids = jnp.asarray(end_ids, jnp.int32)
    self._slots = slots
    self._length = length
    self._chunk = min(prefill_chunk, length)
    self._steps = steps_per_dispatch
    self._deterministic = deterministic
    self._dtype = jnp.dtype(dtype)
    self._seed = seed
    self._compile_stops = functools.lru_cache(self._compile_stops)
    self._unstack = jax.jit(lambda params: model.unstack(params, self._dtype))

  def load(self, params) -> Any:
    """Casts and unstacks a policy's masters into rollout weights."""
    return self._unstack(params)

  def _compile_stops(self, strings: tuple[str, ...]):
    automaton = stops.compile_stops(strings, self._token_bytes)
    return automaton, jnp.asarray(automaton.table)

  def play(
    self,
    weights,
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
      ValueError: two requests share an id, or one can never fit.
    """
    self._check(requests)
    automaton, table = self._compile_stops(tuple(environment.stops))
    play = _Play(self, weights, automaton, table, environment, iteration)
    done: dict[tuple[str, int], types.Episode] = {}
    queue = collections.deque(
      (request, attempt)
      for request in requests
      for attempt in range(request.attempts)
    )
    began = time.perf_counter()
    while queue or play.busy():
      play.fill(queue)
      play.decode()
      for episode in play.settle():
        done[episode.request_id, episode.attempt] = episode
        on_episode(episode)
    order = [(r.id, a) for r in requests for a in range(r.attempts)]
    metrics = {f"tokens/{name}": n for name, n in sorted(play.counts.items())}
    metrics["seconds"] = time.perf_counter() - began
    return Played(tuple(done[key] for key in order), metrics)

  def _check(self, requests: Sequence[types.Request]) -> None:
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


class _Play:
  """One call of `Engine.play`: the slots, the cache and the counts."""

  def __init__(self, engine, weights, automaton, table, environment, iteration):
    self._engine = engine
    self._weights = weights
    self._automaton = automaton
    self._table = table
    self._environment = environment
    self._iteration = iteration
    self._slots: list[_Playing | None] = [None] * engine._slots
    # A last chunk may reach beyond an episode's end: keep its writes inside.
    length = -(-(engine._length + engine._chunk) // 64) * 64
    self._cache = decode.empty_cache(
      engine._backbone, engine._slots, length, engine._dtype
    )
    self.counts = collections.Counter(sampled=0, prefilled=0, shared=0)

  def busy(self) -> bool:
    return any(slot is not None for slot in self._slots)

  # --- refill ---

  def fill(self, queue: collections.deque) -> None:
    """Gives free slots the next attempts, and caches what is not cached."""
    for index, slot in enumerate(self._slots):
      if slot is None and queue:
        request, attempt = queue.popleft()
        self._slots[index] = self._begin(request, attempt)
    for index, slot in enumerate(self._slots):
      if slot is not None and slot.reply is None:
        self._share(index, slot)
        self._prefill(index, slot)

  def _begin(self, request: types.Request, attempt: int) -> _Playing:
    size = len(request.prompt_ids)
    return _Playing(
      request,
      attempt,
      list(request.prompt_ids),
      [False] * size,
      [0.0] * size,
      sampling_key(self._engine._seed, self._iteration, request.id, attempt),
      turn_start=size,
    )

  def _share(self, target: int, slot: _Playing) -> None:
    """Copies the prompt's cache from another attempt at the same prompt."""
    need = len(slot.request.prompt_ids) - 1  # the last id is decoded
    if slot.cached:
      return
    for source, other in enumerate(self._slots):
      if (
        other is not None
        and other.request.id == slot.request.id
        and other.cached >= need > 0
      ):
        self._cache = decode.copy_slot(self._cache, source, target)
        self.counts["shared"] += need
        slot.cached = need
        return

  def _prefill(self, index: int, slot: _Playing) -> None:
    chunk = self._engine._chunk
    while (missing := len(slot.ids) - 1 - slot.cached) > 0:
      ids = np.zeros(chunk, np.int32)
      part = slot.ids[slot.cached : slot.cached + min(missing, chunk)]
      ids[: len(part)] = part
      self._cache = decode.prefill(
        self._engine._graphdef,
        self._weights,
        self._cache,
        index,
        ids,
        slot.cached,
      )
      slot.cached += len(part)
      self.counts["prefilled"] += len(part)

  # --- decode ---

  def decode(self) -> None:
    """Runs the decode loop once, and appends what it sampled."""
    running = [s is not None and s.reply is None for s in self._slots]
    if not any(running):
      return
    leave = max(1, len(self._slots) // 16)
    self._cache, after, ids, logprobs, counts = decode.decode_steps(
      self._engine._graphdef,
      self._weights,
      self._cache,
      self._on_device(running),
      self._table,
      self._engine._end_ids,
      self._engine._steps,
      leave,
    )
    ids, logprobs, counts, reason, state = jax.device_get(
      (ids, logprobs, counts, after.reason, after.stop_state)
    )
    for index, slot in enumerate(self._slots):
      if not running[index]:
        continue
      n = int(counts[index])
      slot.ids += ids[index, :n].tolist()
      slot.logprobs += logprobs[index, :n].tolist()
      slot.mask += [True] * n
      slot.cached += n
      slot.reason = int(reason[index])
      slot.stop_state = int(state[index])
      self.counts["sampled"] += n

  def _on_device(self, running: list[bool]) -> decode.Slots:
    def column(value, idle, dtype=np.int32):
      return np.array(
        [value(s) if s is not None else idle for s in self._slots], dtype
      )

    reason = np.where(running, decode.RUNNING, decode.STOP)
    return decode.Slots(
      token=column(lambda s: s.ids[-1], 0),
      position=column(lambda s: len(s.ids) - 1, 0),
      stop_state=column(lambda s: s.stop_state, stops.START),
      reason=reason.astype(np.int32),
      turn_left=column(
        lambda s: s.request.limits.turn_tokens - (len(s.ids) - s.turn_start),
        1,
      ),
      episode_left=column(self._room, 1),
      key=column(lambda s: s.key, (0, 0), np.uint32),
      temperature=column(
        lambda s: s.request.sampling.temperature, 0.0, np.float32
      ),
    )

  def _spent(self, slot: _Playing) -> str:
    """The limit that leaves this turn no further id, or ""."""
    if len(slot.ids) - slot.turn_start >= slot.request.limits.turn_tokens:
      return "turn_tokens"
    return "episode_tokens" if self._room(slot) <= 0 else ""

  def _room(self, slot: _Playing) -> int:
    limit = min(slot.request.limits.episode_tokens, self._engine._length)
    return limit - len(slot.ids)

  # --- pause and resume ---

  def settle(self) -> list[types.Episode]:
    """Asks about paused episodes, applies replies, returns ended episodes."""
    for slot in self._slots:
      if slot and slot.reply is None and slot.reason != decode.RUNNING:
        slot.reply = self._environment.respond(self._pause(slot))
    waiting = [
      slot.reply
      for slot in self._slots
      if slot and isinstance(slot.reply, concurrent.futures.Future)
    ]
    if self._engine._deterministic:
      concurrent.futures.wait(waiting)
    elif len(waiting) == sum(slot is not None for slot in self._slots):
      concurrent.futures.wait(
        waiting, return_when=concurrent.futures.FIRST_COMPLETED
      )
    ended = []
    for index, slot in enumerate(self._slots):
      if slot is None or slot.reply is None:
        continue
      reply = slot.reply
      if isinstance(reply, concurrent.futures.Future):
        if not reply.done():
          continue
        reply = reply.result()
      finish = self._apply(slot, reply)
      slot.reply, slot.reason = None, decode.RUNNING
      if finish:
        ended.append(self._episode(slot, finish))
        self._slots[index] = None
    return ended

  def _pause(self, slot: _Playing) -> types.Pause:
    return types.Pause(
      request_id=slot.request.id,
      attempt=slot.attempt,
      turn=len(slot.turns),
      malformed=slot.malformed,
      ids=tuple(slot.ids[slot.turn_start :]),
      reason=decode.REASONS[slot.reason],
      room=self._room(slot),
      turns=slot.request.limits.turns,
    )

  def _apply(self, slot: _Playing, reply: types.Reply) -> str:
    """Applies a reply; returns the finish reason, or "" to play on."""
    if reply.kind == "go_on":
      if not (spent := self._spent(slot)):
        slot.stop_state = self._automaton.walk(slot.ids[slot.turn_start :])
        return ""
      # The stop string that meant nothing took the last id of a limit.
      reply = types.Reply("finish", finish=spent)
    end = len(slot.ids)
    observation = list(reply.ids) if reply.kind == "append" else []
    assert len(observation) <= self._room(slot), (len(observation), slot)
    slot.ids += observation
    slot.mask += [False] * len(observation)
    slot.logprobs += [0.0] * len(observation)
    slot.turns.append(
      types.Turn(
        start=slot.turn_start,
        end=end,
        stop=len(slot.ids),
        text=self._engine._tokenizer.decode(slot.ids[slot.turn_start : end]),
        action=reply.action,
        argument=reply.argument,
        passages=reply.passages,
        note=reply.note,
      )
    )
    slot.malformed += reply.action == "malformed"
    slot.turn_start = len(slot.ids)
    slot.stop_state = stops.START  # an observation never begins a stop string
    if reply.kind == "append" and self._room(slot) <= 0:
      return "episode_tokens"
    return reply.finish if reply.kind != "append" else ""

  def _episode(self, slot: _Playing, finish: str) -> types.Episode:
    return types.Episode(
      request_id=slot.request.id,
      attempt=slot.attempt,
      arm=slot.request.arm,
      ids=np.array(slot.ids, np.int32),
      prompt_length=len(slot.request.prompt_ids),
      mask=np.array(slot.mask, bool),
      logprobs=np.array(slot.logprobs, np.float32),
      turns=tuple(slot.turns),
      finish=finish,
    )
