"""Whatever tools do, an episode is what one plain forward pass makes it.

Scripts and timings are drawn; the text search, the counting of limits and the
draws of ids are written out again here, one episode at a time.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import random
import time
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sesa_jax import types
from sesa_jax.engine import engine as engine_lib
from sesa_jax.engine import play as play_lib
from sesa_jax.engine import shard as shard_lib
from sesa_jax.policy import backbones, model, sharding

LENGTH = 640
VOCABULARY = 300
SEED = 11
ENDS = (298, 299)
STOP = b"q>"
# Ids below 256 are bytes; a stop string also hides whole in one id, or is
# split over two that hold more than their part of it.
BYTES = [bytes([i]) for i in range(256)]
BYTES += [b"aq>b"] * 12 + [b"xq"] * 12 + [b">y"] * 12 + [b""] * 8

NARROW = dataclasses.replace(backbones.tiny(), vocab_size=VOCABULARY)
# From this width on, XLA's CPU matmuls round by the size of the batch.
WIDE = dataclasses.replace(
  NARROW, dim=512, ffn=256, heads=8, kv_heads=8, tied=False, qk_norm=True
)
SCALES = {NARROW: 6, WIDE: 3}
# Logprobs and margins of a choice closer than this are equal in float32.
CLOSE = 1e-4


class Geometry(NamedTuple):
  """What programs are compiled for."""

  data: int
  tensor: int
  slots: int
  page_size: int
  pages: int  # of a data shard; 0 is ample
  steps: int
  chunk: int
  backbone: backbones.Backbone = NARROW


GEOMETRIES = [
  Geometry(1, 1, 6, 8, 81, 1, 16),  # one longest episode fits, no more
  Geometry(1, 1, 4, 16, 60, 4, 64),
  Geometry(1, 1, 16, 128, 11, 16, 64),
  Geometry(2, 1, 6, 16, 41, 16, 16),
  Geometry(2, 2, 8, 8, 85, 4, 64),
  Geometry(1, 1, 5, 16, 0, 16, 64),
]


class NoText:
  """A tokenizer stands in the engine for text views only."""

  def decode(self, ids):
    return " ".join(map(str, ids))


def make(geometry, deterministic=True, check=True):
  devices = jax.devices()[: geometry.data * geometry.tensor]
  return engine_lib.Engine(
    model.build(geometry.backbone),
    geometry.backbone,
    NoText(),
    BYTES,
    ENDS,
    slots=geometry.slots,
    length=LENGTH,
    prefill_chunk=geometry.chunk,
    steps_per_dispatch=geometry.steps,
    deterministic=deterministic,
    dtype=jnp.float32,
    seed=SEED,
    mesh=sharding.rollout_mesh(geometry.tensor, devices),
    page_size=geometry.page_size,
    pages=geometry.pages,
    check=check,
  )


@functools.cache
def masters(backbone):
  drawn = model.init(backbone, jax.random.key(5))
  # Larger than at initialisation: else no id is likelier than another.
  scale = SCALES[backbone]
  return jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, drawn)


@functools.cache
def loaded(geometry):
  return make(geometry).load(masters(geometry.backbone))


# --- scripts ------------------------------------------------------------------


class Move(NamedTuple):
  """What an environment does at the end of a turn."""

  observation: int = 0  # ids, as far as there is room
  turn_tokens: int | None = None  # of the next turn
  action: str = "search"
  ignored: int = 0  # stop strings that mean nothing, before one that does
  delay: float | None = None  # seconds in a thread; None: answers at once


class Case(NamedTuple):
  requests: list[types.Request]
  moves: dict[tuple[str, int], list[Move]]  # of (request, attempt)
  finish: str = "answer"  # of the last move
  deterministic: bool = True


def answer(case, pause, asked):
  """The reply to a pause; `asked` is how many its turn had before."""
  moves = case.moves[pause.request_id, pause.attempt]
  move = moves[pause.turn]
  if pause.reason == "stop" and asked < move.ignored:
    return types.Reply("go_on")
  if pause.reason == "episode_tokens":
    return types.Reply("finish", finish="episode_tokens")
  if pause.turn == len(moves) - 1:
    return types.Reply("finish", finish=case.finish, action="answer")
  rng = random.Random(f"{pause.request_id}/{pause.attempt}/{pause.turn}")
  size = min(move.observation, pause.room)
  ids = tuple(rng.randrange(VOCABULARY) for _ in range(size))
  return types.Reply(
    "append", ids, action=move.action, turn_tokens=move.turn_tokens
  )


class Script:
  """The environment of a case; notes what it was asked."""

  stops = (STOP.decode(),)

  def __init__(self, case, threads, jitter=0.0):
    self.case, self.threads, self.jitter = case, threads, jitter
    self.pauses = collections.defaultdict(list)

  def respond(self, pause):
    key = pause.request_id, pause.attempt
    asked = sum(p.turn == pause.turn for p in self.pauses[key])
    self.pauses[key].append(pause)
    reply = answer(self.case, pause, asked)
    delay = self.case.moves[key][pause.turn].delay
    if self.jitter:
      delay = random.SystemRandom().uniform(0, self.jitter)
    if delay is None:
      return reply

    def late():
      time.sleep(delay)
      return reply

    return self.threads.submit(late)


@st.composite
def cases(draw, geometry):
  page = geometry.page_size
  edges = [
    n for n in (1, 2, page, page + 1, page + 2, 2 * page + 1) if n <= 300
  ]
  moves = st.builds(
    Move,
    observation=st.sampled_from([0, 1, page - 1, page, page + 1])
    | st.integers(2, 60)
    | st.integers(61, 400),
    turn_tokens=st.sampled_from([None, None, None, 0, 1, 7, 40]),
    action=st.sampled_from(["search", "malformed"]),
    ignored=st.sampled_from([0, 0, 1, 9]),
    delay=st.sampled_from([None, None, 0.0, 0.002, 0.02]),
  )
  requests, scripts = [], {}
  for number in range(draw(st.integers(1, 4))):
    size = draw(st.sampled_from(edges) | st.integers(1, 200))
    rng = random.Random(draw(st.integers(0, 99)))
    cap = draw(st.sampled_from([LENGTH, LENGTH, 330, size + 1, size + 70]))
    request = types.Request(
      id=f"q{number}",
      prompt_ids=tuple(rng.randrange(VOCABULARY) for _ in range(size)),
      attempts=draw(st.integers(1, 8)),
      sampling=types.Sampling(draw(st.sampled_from([0.0, 0.6, 1.0]))),
      limits=types.Limits(draw(st.sampled_from([1, 5, 12, 30])), cap, 6),
      arm="test",
    )
    requests.append(request)
    for attempt in range(request.attempts):
      count = draw(st.integers(1, 6))
      scripts[request.id, attempt] = [draw(moves) for _ in range(count)]
  finish = draw(st.sampled_from(["answer", "lost"]))
  return Case(requests, scripts, finish, draw(st.booleans()))


def play(geometry, case, *, check=True, jitter=0.0):
  """Returns what was played, and the pauses of each episode."""
  engine = make(geometry, case.deterministic, check)
  with concurrent.futures.ThreadPoolExecutor(8) as threads:
    script = Script(case, threads, jitter)
    played = engine.play(loaded(geometry), case.requests, script, iteration=2)
  return played, script.pauses


# --- the definition -----------------------------------------------------------


def follow(case, request, attempt, ids):
  """Turns, pauses and finish reason of these ids, by search and counting."""
  limits, pauses, turns = request.limits, [], []
  cap = min(limits.episode_tokens, LENGTH)
  at, limit, finish = len(request.prompt_ids), limits.turn_tokens, ""
  while not finish:
    start, asked, text, reply = at, 0, b"", None
    while reply is None:
      assert at < len(ids), "the episode is cut off"
      before, text = text, text + BYTES[ids[at]]
      at += 1
      spent = "turn_tokens" if at - start >= limit else ""
      spent = spent or ("episode_tokens" if at >= cap else "")
      if text.count(STOP) > before.count(STOP):
        reason = "stop"
      elif ids[at - 1] in ENDS:
        reason = "eos"
      elif not (reason := spent):
        continue
      pause = types.Pause(
        request_id=request.id,
        attempt=attempt,
        turn=len(turns),
        malformed=sum(turn.action == "malformed" for turn in turns),
        ids=tuple(ids[start:at].tolist()),
        reason=reason,
        room=cap - at,
        turns=limits.turns,
      )
      pauses.append(pause)
      reply, asked = answer(case, pause, asked), asked + 1
      if reply.kind == "go_on":
        reply = types.Reply("finish", finish=spent) if spent else None
    end, at = at, at + len(reply.ids)
    assert ids[end:at].tolist() == list(reply.ids), "not the observation"
    written = " ".join(map(str, ids[start:end]))
    turns.append(types.Turn(start, end, at, written, reply.action, "", (), ""))
    limit = limits.turn_tokens
    if reply.turn_tokens is not None:
      limit = reply.turn_tokens
    finish = reply.finish
    if reply.kind == "append" and limit <= 0:
      finish = "turn_tokens"
    elif reply.kind == "append" and at >= cap:
      finish = "episode_tokens"
  assert at == len(ids), "ids after the end"
  return tuple(turns), pauses, finish


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, params, ids, segments):
  positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
  hidden = model.hidden(
    graphdef,
    params,
    ids,
    positions,
    segments,
    compute_dtype=jnp.float32,
    remat=False,
  )
  return model.logits(graphdef, params, hidden)


def plain_logits(backbone, ids):
  """[T, V] before each id but the first, and after the last."""
  padded = np.zeros((1, LENGTH), np.int32)
  padded[0, : len(ids)] = ids
  segments = (np.arange(LENGTH) < len(ids)).astype(np.int32)[None]
  graphdef = model.build(backbone)
  logits = forward(graphdef, masters(backbone), padded, segments)
  return np.asarray(logits[0, : len(ids), :VOCABULARY], np.float64)


@jax.jit
def uniforms(key):
  key = jax.random.wrap_key_data(key, impl="threefry2x32")
  fold = functools.partial(jax.random.fold_in, key)
  return jax.vmap(lambda i: jax.random.uniform(fold(i)))(jnp.arange(LENGTH))


def distances(backbone, temperature, episode):
  """Of each sampled id: from the plain logprob, and from the id to be drawn.

  The second is 0 where the id is the one by definition, else by how much the
  choice between the two was missed.
  """
  places = np.flatnonzero(episode.mask)
  logits = plain_logits(backbone, episode.ids)[places - 1]
  scaled = logits / (temperature or 1.0)
  logprobs = scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)
  ids = episode.ids[places]
  rows = np.arange(len(ids))
  gaps = abs(logprobs[rows, ids] - episode.logprobs[places])
  if temperature == 0:
    return gaps, logits.max(1) - logits[rows, ids]
  key = shard_lib.sampling_key(SEED, 2, episode.request_id, episode.attempt)
  draws = np.asarray(uniforms(key), np.float64)[places]
  mass = np.exp(logprobs)
  above = np.cumsum(mass, 1)[rows, ids]
  below = above - mass[rows, ids]
  return gaps, np.maximum(0, np.maximum(below - draws, draws - above))


def compare(geometry, case, played, pauses):
  """Asserts that episodes are what the definition makes them.

  Returns:
    how many ids were sampled, and how many of them only a rounding chose.
  """
  order = [(r, a) for r in case.requests for a in range(r.attempts)]
  sampled = missed = 0
  for (request, attempt), episode in zip(order, played.episodes, strict=True):
    prompt = len(request.prompt_ids)
    assert (episode.request_id, episode.attempt) == (request.id, attempt)
    assert (episode.arm, episode.prompt_length) == ("test", prompt)
    assert episode.ids[:prompt].tolist() == list(request.prompt_ids)
    turns, asked, finish = follow(case, request, attempt, episode.ids)
    assert episode.turns == turns
    assert episode.finish == finish
    # Each of them once, also of what was thrown out and played on.
    assert pauses[request.id, attempt] == asked
    mask = np.zeros(len(episode.ids), bool)
    for turn in turns:
      mask[turn.start : turn.end] = True
    assert (episode.mask == mask).all()
    assert (episode.logprobs[~mask] == 0).all()
    gaps, misses = distances(
      geometry.backbone, request.sampling.temperature, episode
    )
    assert gaps.max() < CLOSE, f"a logprob is off by {gaps.max():.2g}"
    assert misses.max() < CLOSE, f"another id was due, by {misses.max():.2g}"
    sampled += len(misses)
    missed += int((misses > 0).sum())
  assert played.metrics["tokens/sampled"] == sampled
  return sampled, missed


# --- drawn cases --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(GEOMETRIES)))
def test_drawn_episodes_equal_the_full_forward(number):
  geometry = GEOMETRIES[number]
  seen = collections.Counter()

  @hypothesis.seed(number)
  @hypothesis.settings(max_examples=6)
  @hypothesis.given(cases(geometry))
  def plays(case):
    played, pauses = play(geometry, case)
    sampled, missed = compare(geometry, case, played, pauses)
    seen.update(sampled=sampled, missed=missed)
    seen.update(p.reason for asked in pauses.values() for p in asked)
    seen.update({k: int(v) for k, v in played.metrics.items() if v})

  plays()
  assert seen["sampled"] > 200
  assert seen["missed"] <= seen["sampled"] / 1000
  assert seen["tokens/shared"] > 0
  assert {"stop", "turn_tokens", "episode_tokens"} <= set(seen)


# --- fixed cases --------------------------------------------------------------


def fixed(page_size, count, most=150):
  """Prompts on both sides of a page's end, and observations of all sizes."""
  rng = random.Random(1)
  sizes = [page_size + 2, 2 * page_size + 1, 1, 45, page_size, page_size + 1]
  requests, moves = [], {}
  for number in range(count):
    size = sizes[number % len(sizes)]
    request = types.Request(
      id=f"f{number}",
      prompt_ids=tuple(rng.randrange(VOCABULARY) for _ in range(size)),
      attempts=3,
      sampling=types.Sampling((1.0, 0.0, 0.7)[number % 3]),
      limits=types.Limits(9, LENGTH, 6),
      arm="test",
    )
    requests.append(request)
    for attempt in range(request.attempts):
      moves[request.id, attempt] = [
        Move(rng.randrange(most), ignored=rng.randrange(2))
        for _ in range(rng.randrange(2, 5))
      ]
  return Case(requests, moves)


def starved(geometry, count):
  """A case whose episodes do not fit beside each other."""
  return fixed(geometry.page_size, count, most=250)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 4])
def test_two_deterministic_runs_are_byte_equal(number):
  """Tools answer from threads, in another order each time; pages run out."""
  geometry = GEOMETRIES[number]
  case = starved(geometry, 4)
  (first, asked), (second, again) = (
    play(geometry, case, jitter=0.01) for _ in range(2)
  )
  assert first.metrics["preempted"] > 0
  compare(geometry, case, first, asked)
  assert asked == again
  for one, other in zip(first.episodes, second.episodes, strict=True):
    for field in dataclasses.fields(types.Episode):
      a, b = getattr(one, field.name), getattr(other, field.name)
      if isinstance(a, np.ndarray):
        a, b = (a.dtype, a.tobytes()), (b.dtype, b.tobytes())
      assert a == b, field.name
  for name, value in first.metrics.items():
    assert "second" in name or second.metrics[name] == value, name


@functools.cache
def wide():
  """One device, three slots: what all others are held against."""
  geometry = Geometry(1, 1, 3, 16, 0, 4, 16, WIDE)
  case = fixed(16, 6, most=60)
  played, pauses = play(geometry, case)
  compare(geometry, case, played, pauses)
  return case, {(e.request_id, e.attempt): e for e in played.episodes}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("data", "tensor", "slots"),
  [
    (1, 1, 8),
    (4, 1, 4),
    (2, 2, 6),
    (8, 1, 8),
    (4, 2, 8),
    (2, 4, 4),
    (1, 8, 5),
  ],
)
def test_slots_order_and_devices_change_roundings_alone(data, tensor, slots):
  case, expected = wide()
  geometry = Geometry(data, tensor, slots, 16, 0, 4, 16, WIDE)
  order = random.Random(data * slots).sample(case.requests, len(case.requests))
  played, _ = play(geometry, case._replace(requests=order))
  temperatures = {r.id: r.sampling.temperature for r in order}
  assert len(played.episodes) == len(expected)
  parted = 0
  for episode in played.episodes:
    other = expected[episode.request_id, episode.attempt]
    size = min(len(episode.ids), len(other.ids))
    differ = np.flatnonzero(episode.ids[:size] != other.ids[:size])
    if differ.size:
      # Both ids were due but for a rounding, so the margin is one.
      size = differ[0]
      temperature = temperatures[episode.request_id]
      assert distances(WIDE, temperature, episode)[1].max() < CLOSE
      parted += 1
    else:
      assert episode.turns == other.turns
      assert episode.finish == other.finish
    gaps = abs(episode.logprobs[:size] - other.logprobs[:size])
    assert gaps.max() < CLOSE
  assert parted <= 1


# --- mutants ------------------------------------------------------------------


def skip_the_copy(patch):
  patch.setattr(play_lib.Play, "_copy", lambda self, copies: None)


def copy_the_page_before(patch):
  copies = shard_lib.Shard.copies

  def mutant(self):
    before = {
      page: previous
      for prompt in self.prompts.values()
      for previous, page in itertools.pairwise([0, *prompt.pages])
    }
    return [(before[source], target) for source, target in copies(self)]

  patch.setattr(shard_lib.Shard, "copies", mutant)


def copy_no_page_of_one_token(patch):
  copies = shard_lib.Shard.copies

  def mutant(self):
    few = {
      prompt.pages[-1]
      for prompt in self.prompts.values()
      if len(prompt.ids) % self._layout.page_size == 1
    }
    return [pair for pair in copies(self) if pair[0] not in few]

  patch.setattr(shard_lib.Shard, "copies", mutant)


def keep_a_stale_page(patch):
  """A table names a page that an episode which ended has given back."""
  grow, release, freed = shard_lib.Shard._grow, shard_lib.Shard.release, []

  def mutant(self, playing, count):
    grow(self, playing, count)
    if count and freed:
      playing.table[len(playing.pages) - 1] = freed[-1]

  def noting(self, playing):
    freed[:] = playing.pages
    release(self, playing)

  patch.setattr(shard_lib.Shard, "_grow", mutant)
  patch.setattr(shard_lib.Shard, "release", noting)


def free_a_shared_page(patch):
  """Tables name a free page where they should name a prompt's."""
  drop = shard_lib.Shard._drop

  def mutant(self, request_id):
    pages = list(self.prompts[request_id].pages)
    drop(self, request_id)
    taken = [page for page in pages if self.pages._owners[page]]
    for resident in self.residents():
      shared = [i for i, page in enumerate(resident.pages) if page in taken]
      resident.table[shared] = min(self.pages._free, default=0)

  patch.setattr(shard_lib.Shard, "_drop", mutant)


def prefill_from_position(patch, first):
  """Keys and values are written where they belong, but rotated as others."""
  pack = play_lib.Play._pack

  def mutant(self, batch, shard, todo):
    pack(self, batch, shard, todo)
    for begin, end in itertools.pairwise(batch.cu[shard]):
      if begin < end:
        positions = batch.positions[shard, begin:end]
        positions -= first(positions[0])

  patch.setattr(play_lib.Play, "_pack", mutant)


def forget_the_offset(patch):
  prefill_from_position(patch, lambda start: start)


def offset_by_one(patch):
  prefill_from_position(patch, lambda start: 1 if start else 0)


MUTANTS = [
  skip_the_copy,
  copy_the_page_before,
  copy_no_page_of_one_token,
  keep_a_stale_page,
  free_a_shared_page,
  forget_the_offset,
  offset_by_one,
]


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_the_comparison_catches_a_mutant(monkeypatch, mutant):
  """Of episodes alone: the invariants of the pages are not checked here."""
  geometry = GEOMETRIES[1]
  case = fixed(geometry.page_size, 4)
  if mutant:
    mutant(monkeypatch)
  played, pauses = play(geometry, case, check=False)
  if mutant is None:
    compare(geometry, case, played, pauses)
    return
  with pytest.raises(AssertionError, match="a logprob is off by"):
    compare(geometry, case, played, pauses)
