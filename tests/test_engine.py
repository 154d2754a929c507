"""The engine against a plain loop over the full forward."""

import concurrent.futures
import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sesa_jax import types
from sesa_jax.engine import sampling
from sesa_jax.engine import engine as engine_lib
from sesa_jax.policy import backbones, model

VOCABULARY = 300
BACKBONE = dataclasses.replace(backbones.tiny(), vocab_size=VOCABULARY)
GRAPHDEF = model.build(BACKBONE)
END = 299
SEED = 7


class NoText:
  """A tokenizer stands in the engine for text views only."""

  def decode(self, ids):
    return " ".join(map(str, ids))


def token_bytes():
  """Ids below 256 are bytes; some later ones hold a stop string."""
  return [bytes([i]) for i in range(256)] + [b"q>"] * 20 + [b""] * 24


@pytest.fixture(scope="module")
def params():
  # Larger weights than at initialisation: else logits hardly differ.
  drawn = model.init(BACKBONE, jax.random.key(3))
  return jax.tree.map(lambda x: x * 6 if x.ndim > 1 else x, drawn)


def make(slots=3, chunk=16, steps=8, deterministic=True, length=160):
  return engine_lib.Engine(
    GRAPHDEF,
    BACKBONE,
    NoText(),
    token_bytes(),
    (END,),
    slots=slots,
    length=length,
    prefill_chunk=chunk,
    steps_per_dispatch=steps,
    deterministic=deterministic,
    dtype=jnp.float32,
    seed=SEED,
  )


class Script:
  """Forces each episode's turns, whatever the policy says.

  A turn ends at its token limit or at a stop string; the observation that
  follows is drawn by (request, attempt, turn), and so is the number of turns.
  """

  stops = ("q>",)

  def __init__(self, pool=None, ignore_stops=False):
    self.pool, self.ignore_stops = pool, ignore_stops
    self.pauses = []

  def respond(self, pause):
    self.pauses.append(pause)
    rng = random.Random(f"{pause.request_id}{pause.attempt}{pause.turn}")
    if pause.reason == "stop" and self.ignore_stops:
      return types.Reply("go_on")
    if pause.reason == "episode_tokens" or rng.random() < 0.3:
      reply = types.Reply("finish", finish="answer", action="answer")
    else:
      size = min(rng.randrange(0, 40), pause.room)
      ids = tuple(rng.randrange(VOCABULARY) for _ in range(size))
      reply = types.Reply("append", ids, action="search")
    return self.pool.submit(lambda: reply) if self.pool else reply


def requests(temperature, attempts=2, count=4):
  rng = random.Random(1)
  return [
    types.Request(
      id=f"r{i}",
      prompt_ids=tuple(
        rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 50))
      ),
      attempts=attempts,
      sampling=types.Sampling(temperature),
      limits=types.Limits(turn_tokens=9, episode_tokens=120, turns=6),
      arm="test",
    )
    for i in range(count)
  ]


def full_forward(params, ids):
  """Logits [T, V] of a whole sequence, in one pass of the training forward."""
  size = 192
  padded = np.zeros((1, size), np.int32)
  padded[0, : len(ids)] = ids
  positions = np.arange(size, dtype=np.int32)[None]
  segments = (positions < len(ids)).astype(np.int32)
  hidden = model.hidden(
    GRAPHDEF,
    params,
    padded,
    positions,
    segments,
    compute_dtype=jnp.float32,
    remat=False,
  )
  return np.asarray(model.logits(GRAPHDEF, params, hidden)[0, : len(ids)])


def check_draw(episode, place, logprobs, iteration):
  """The id is the one that the key and its position draw, by definition."""
  key = engine_lib.sampling_key(
    SEED, iteration, episode.request_id, episode.attempt
  )
  key = jax.random.wrap_key_data(key, impl="threefry2x32")
  draw = float(jax.random.uniform(jax.random.fold_in(key, place)))
  cumulative = np.cumsum(np.exp(logprobs))
  near = abs(cumulative - draw).min() < 1e-5
  assert near or episode.ids[place] == np.searchsorted(
    cumulative, draw, side="right"
  )


def check_against_full_forward(params, episode, temperature, iteration=0):
  logits = full_forward(params, episode.ids).astype(np.float64)
  scaled = logits / (temperature or 1.0)
  peak = scaled.max(-1, keepdims=True)
  logprobs = scaled - peak
  logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
  for place in np.flatnonzero(episode.mask):
    token = episode.ids[place]
    assert episode.logprobs[place] == pytest.approx(
      logprobs[place - 1, token], abs=1e-4
    )
    if temperature == 0:
      assert token == logits[place - 1].argmax()
    else:
      check_draw(episode, place, logprobs[place - 1], iteration)
  assert (episode.logprobs[~episode.mask] == 0).all()
  assert not episode.mask[: episode.prompt_length].any()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_equals_the_full_forward(params, temperature):
  engine = make()
  played = engine.play(
    engine.load(params), requests(temperature), Script(), iteration=0
  )
  assert len(played.episodes) == 8
  for episode in played.episodes:
    check_against_full_forward(params, episode, temperature)
  metrics = played.metrics
  assert metrics["tokens/sampled"] == sum(e.mask.sum() for e in played.episodes)
  assert metrics["tokens/shared"] > 0


def test_turns_cover_the_episode(params):
  engine = make()
  played = engine.play(
    engine.load(params), requests(1.0), Script(), iteration=0
  )
  for episode in played.episodes:
    mask = np.zeros(len(episode.ids), bool)
    at = episode.prompt_length
    for turn in episode.turns:
      assert turn.start == at
      mask[turn.start : turn.end] = True
      at = turn.stop
    assert at == len(episode.ids)
    assert (mask == episode.mask).all()


def same(a, b):
  return (
    a.request_id == b.request_id
    and a.attempt == b.attempt
    and (a.ids == b.ids).all()
    and (a.logprobs == b.logprobs).all()
  )


def test_two_runs_are_byte_equal_and_threads_change_nothing(params):
  engine = make()
  weights = engine.load(params)
  first = engine.play(weights, requests(1.0), Script(), iteration=0)
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    second = engine.play(weights, requests(1.0), Script(pool), iteration=0)
  for a, b in zip(first.episodes, second.episodes, strict=True):
    assert same(a, b)


def test_an_episode_depends_on_its_key_alone(params):
  """Other slots, chunks, steps and neighbours: the same ids."""
  few, many = make(), make(slots=5, chunk=32, steps=3, deterministic=False)
  a = few.play(few.load(params), requests(1.0), Script(), iteration=0)
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    b = many.play(
      many.load(params), requests(1.0)[::-1], Script(pool), iteration=0
    )
  other = {(e.request_id, e.attempt): e for e in b.episodes}
  for episode in a.episodes:
    match = other[episode.request_id, episode.attempt]
    assert episode.ids.tolist() == match.ids.tolist()
    np.testing.assert_allclose(episode.logprobs, match.logprobs, atol=1e-4)


def test_iterations_and_attempts_draw_differently(params):
  engine = make()
  weights = engine.load(params)
  one = engine.play(weights, requests(1.0), Script(), iteration=0).episodes
  two = engine.play(weights, requests(1.0), Script(), iteration=1).episodes
  assert one[0].ids.tolist() != two[0].ids.tolist()
  assert one[0].ids.tolist() != one[1].ids.tolist()


def test_go_on_samples_on_in_the_same_turn(params):
  """Stop strings that mean nothing leave no trace in ids or logprobs."""
  engine = make()
  weights = engine.load(params)
  script = Script(ignore_stops=True)
  played = engine.play(weights, requests(1.0, count=8), script, iteration=0)
  assert any(pause.reason == "stop" for pause in script.pauses)
  for episode in played.episodes:
    check_against_full_forward(params, episode, 1.0)


def stop_heavy(pause_log, go_on, stop):
  """An environment that notes pauses, and ends turns by limits else."""

  class Noting:
    stops = (stop,)

    def respond(self, pause):
      pause_log.append(pause)
      if pause.reason == "stop" and go_on:
        return types.Reply("go_on")
      if pause.turn >= 5 or pause.room < 20:
        return types.Reply("finish", finish="turns")
      return types.Reply("append", (0, 0), action="search")

  return Noting()


@pytest.mark.parametrize("stop", ["qz", "qq"])
@pytest.mark.parametrize("go_on", [False, True])
def test_pauses_are_where_text_search_finds_the_stop_string(
  params, stop, go_on
):
  """Also over turns: an observation between two halves does not join them."""
  heavy = [b"q"] * 140 + [b"z"] * 140 + [b""] * 20
  engine = engine_lib.Engine(
    GRAPHDEF,
    BACKBONE,
    NoText(),
    heavy,
    (END,),
    slots=4,
    length=160,
    prefill_chunk=16,
    steps_per_dispatch=8,
    deterministic=True,
    dtype=jnp.float32,
    seed=SEED,
  )
  log = []
  asked = [
    dataclasses.replace(r, limits=types.Limits(6, 150, 9))
    for r in requests(1.0, attempts=4)
  ]
  played = engine.play(
    engine.load(params), asked, stop_heavy(log, go_on, stop), iteration=1
  )
  found = {
    (p.request_id, p.attempt, p.turn, len(p.ids))
    for p in log
    if p.reason == "stop"
  }
  expected = set()
  for episode in played.episodes:
    for number, turn in enumerate(episode.turns):
      text = b""
      for size, token in enumerate(episode.ids[turn.start : turn.end], 1):
        before, text = text, text + heavy[token]
        if text != before and text.endswith(stop.encode()):
          expected.add((episode.request_id, episode.attempt, number, size))
  assert len(expected) > 20
  assert found == expected


def test_limits_end_turns_and_episodes(params):
  engine = make()
  script = Script()
  played = engine.play(
    engine.load(params), requests(1.0, count=8), script, iteration=0
  )
  for pause in script.pauses:
    assert len(pause.ids) <= 9
    assert (pause.reason == "turn_tokens") <= (len(pause.ids) == 9)
  assert all(len(e.ids) <= 120 for e in played.episodes)


def test_an_end_token_pauses(params):
  engine = make(slots=2)
  script = Script()
  engine.play(engine.load(params), requests(1.0, count=24), script, iteration=3)
  ends = [p for p in script.pauses if p.ids and p.ids[-1] == END]
  assert ends
  assert all(p.reason == "eos" for p in ends)
  assert all(END not in p.ids[:-1] for p in script.pauses)


def test_a_request_that_cannot_fit_is_an_error(params):
  engine = make(length=40)
  request = dataclasses.replace(requests(1.0)[0], prompt_ids=(1,) * 40)
  with pytest.raises(ValueError, match="prompt of 40 tokens.*holds 40"):
    engine.play(engine.load(params), [request], Script(), iteration=0)


def test_two_requests_of_one_id_are_an_error(params):
  engine = make()
  request = requests(1.0)[0]
  with pytest.raises(ValueError, match="share an id.*r0"):
    engine.play(engine.load(params), [request] * 2, Script(), iteration=0)


def test_sample_follows_the_distribution():
  logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
  logits = np.pad(logits, (0, 600), constant_values=-np.inf)[None]
  rows = 4000
  keys = np.stack([engine_lib.sampling_key(0, 0, "q", i) for i in range(rows)])
  ids, logprobs = jax.jit(sampling.sample)(
    jnp.repeat(logits, rows, 0),
    keys,
    jnp.zeros(rows, jnp.int32),
    jnp.full(rows, 0.5, jnp.float32),
  )
  # At temperature 1/2 probabilities go with their squares.
  expected = np.array([16, 4, 1, 1]) / 22
  seen = np.bincount(np.asarray(ids), minlength=4)
  assert len(seen) == 4
  sigma = np.sqrt(expected * (1 - expected) / rows)
  assert (abs(seen / rows - expected) < 4 * sigma).all()
  np.testing.assert_allclose(
    logprobs, np.log(expected)[np.asarray(ids)], atol=1e-5
  )


def test_sample_equals_a_plain_inverse_cdf():
  """One level of cumulative sums in float64 picks the same id."""
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(64, 1000)).astype(np.float32) * 3
  keys = rng.integers(0, 2**32, (64, 2), np.uint32)
  positions = np.arange(64, dtype=np.int32)
  ids, _ = jax.jit(sampling.sample)(
    logits, keys, positions, jnp.ones(64, jnp.float32)
  )
  for row in range(64):
    key = jax.random.wrap_key_data(keys[row], impl="threefry2x32")
    draw = float(jax.random.uniform(jax.random.fold_in(key, positions[row])))
    p = np.exp(logits[row].astype(np.float64))
    cumulative = np.cumsum(p / p.sum())
    expected = int(np.searchsorted(cumulative, draw, side="right"))
    near = abs(cumulative - draw).min() < 1e-5
    assert near or int(ids[row]) == expected


def test_a_stop_string_that_meant_nothing_at_a_limit_ends_the_turn(params):
  """Going on would sample one id more than the limit."""
  engine = make()
  script = Script(ignore_stops=True)
  requests_ = [
    dataclasses.replace(
      request,
      limits=types.Limits(turn_tokens=n, episode_tokens=cap, turns=6),
    )
    for n, cap in ((3, 120), (4, 120), (50, 60), (50, 61))
    for request in [
      dataclasses.replace(r, id=f"{r.id}/{n}/{cap}")
      for r in requests(1.0, attempts=6, count=4)
    ]
  ]
  played = engine.play(engine.load(params), requests_, script, iteration=5)
  limits = {r.id: r.limits for r in requests_}
  hit = 0
  for episode in played.episodes:
    limit = limits[episode.request_id]
    assert len(episode.ids) <= limit.episode_tokens
    for turn in episode.turns:
      assert turn.end - turn.start <= limit.turn_tokens
    hit += episode.finish in ("turn_tokens", "episode_tokens")
  assert hit
