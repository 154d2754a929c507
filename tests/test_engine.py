"""The engine against a plain loop over the full forward."""

import concurrent.futures
import dataclasses
import functools
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sesa_jax import types
from sesa_jax.engine import attention, decode, shard
from sesa_jax.engine import engine as engine_lib
from sesa_jax.policy import backbones, model, sharding

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


def make(**changes):
  """An engine of few pages' size; equal ones share their compiled programs."""
  chosen = dict(
    slots=4,
    length=160,
    prefill_chunk=16,
    steps_per_dispatch=8,
    page_size=16,
    deterministic=True,
    dtype=jnp.float32,
    seed=SEED,
    check=True,
  )
  chosen |= changes
  backbone = chosen.pop("backbone", BACKBONE)
  return engine_lib.Engine(
    model.build(backbone),
    backbone,
    NoText(),
    chosen.pop("token_bytes", token_bytes()),
    (END,),
    **chosen,
  )


@pytest.fixture(scope="module")
def weights(params):
  """For all engines on one device."""
  return make().load(params)


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


@functools.partial(jax.jit, static_argnums=0)
def score(graphdef, params, ids, positions, segments):
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


def full_forward(params, ids, graphdef=GRAPHDEF):
  """Logits [T, V] of a whole sequence, in one pass of the training forward."""
  padded = np.zeros((1, 192), np.int32)
  padded[0, : len(ids)] = ids
  positions = np.arange(192, dtype=np.int32)[None]
  segments = (positions < len(ids)).astype(np.int32)
  logits = score(graphdef, params, padded, positions, segments)
  return np.asarray(logits[0, : len(ids)])


def check_draw(episode, place, logprobs, iteration):
  """The id is the one that the key and its position draw, by definition."""
  key = shard.sampling_key(SEED, iteration, episode.request_id, episode.attempt)
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
def test_equals_the_full_forward(params, weights, temperature):
  engine = make()
  played = engine.play(weights, requests(temperature), Script(), iteration=0)
  assert len(played.episodes) == 8
  for episode in played.episodes:
    check_against_full_forward(params, episode, temperature)
  metrics = played.metrics
  assert metrics["tokens/sampled"] == sum(e.mask.sum() for e in played.episodes)
  assert metrics["tokens/shared"] > 0


def test_turns_cover_the_episode(weights):
  engine = make()
  played = engine.play(weights, requests(1.0), Script(), iteration=0)
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


def check_near(some, others):
  """The same ids, by episode, and logprobs but for numerics."""
  match = {(e.request_id, e.attempt): e for e in others}
  assert len(match) == len(others) == len(some)
  for episode in some:
    other = match[episode.request_id, episode.attempt]
    assert episode.ids.tolist() == other.ids.tolist()
    np.testing.assert_allclose(episode.logprobs, other.logprobs, atol=1e-4)


def test_two_runs_are_byte_equal_and_threads_change_nothing(weights):
  engine = make()
  first = engine.play(weights, requests(1.0), Script(), iteration=0)
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    second = engine.play(weights, requests(1.0), Script(pool), iteration=0)
  for a, b in zip(first.episodes, second.episodes, strict=True):
    assert same(a, b)
  counts = [
    {
      name: value
      for name, value in played.metrics.items()
      if not name.startswith("seconds")
    }
    for played in (first, second)
  ]
  assert counts[0] == counts[1]
  assert len(counts[0]) > 10


def test_an_episode_depends_on_its_key_alone(weights):
  """Other slots, batches, pages, steps and neighbours: the same ids."""
  few = make()
  many = make(
    slots=5,
    prefill_chunk=128,  # and batches of 32
    steps_per_dispatch=3,
    page_size=32,
    deterministic=False,
  )
  a = few.play(weights, requests(1.0), Script(), iteration=0)
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    b = many.play(weights, requests(1.0)[::-1], Script(pool), iteration=0)
  check_near(a.episodes, b.episodes)


class Late(Script):
  """Answers from threads: some at once, some late, not in order."""

  def respond(self, pause):
    reply = super().respond(pause)
    rng = random.Random(f"{pause.attempt}{pause.request_id}{pause.turn}")
    wait = rng.choice((0, 0, 0.01, 0.05))
    if wait == 0 and rng.random() < 0.5:
      return reply.result()
    return self.pool.submit(lambda: (time.sleep(wait), reply.result())[1])


def test_tools_may_answer_late_and_out_of_order(weights):
  asked = requests(1.0, attempts=3)
  usual = make().play(weights, asked, Script(), iteration=0)
  script = Late(concurrent.futures.ThreadPoolExecutor(8))
  with script.pool:
    played = make(deterministic=False).play(weights, asked, script, iteration=0)
  check_near(played.episodes, usual.episodes)
  assert played.metrics["seconds/tool_wait"] > 0


def test_a_tool_that_fails_ends_the_play(weights):
  class Failing(Script):
    def respond(self, pause):
      future = concurrent.futures.Future()
      future.set_exception(OSError("the disk is gone"))
      return future

  with pytest.raises(OSError, match="the disk is gone"):
    make().play(weights, requests(1.0), Failing(), iteration=0)


# --- pages -----------------------------------------------------------------


def test_attempts_share_their_prompt(weights):
  """It is computed once, also for attempts that find no slot at first."""

  class Once(Script):
    def respond(self, pause):
      return types.Reply("finish", finish="answer")

  asked = [
    dataclasses.replace(request, prompt_ids=(7,) * size, attempts=attempts)
    for request, size, attempts in zip(
      requests(1.0), (40, 33, 1, 5), (6, 3, 2, 1), strict=True
    )
  ]
  played = make().play(weights, asked, Once(), iteration=0)
  # The last id of a prompt is decoded.
  assert played.metrics["tokens/prefilled"] == 39 + 32 + 0 + 4
  assert played.metrics["tokens/shared"] == 5 * 39 + 2 * 32
  assert played.metrics["tokens/recomputed"] == 0


def test_the_work_is_counted(weights):
  """Each id but those after the last draw is one token, over all before it."""
  asked = requests(1.0, attempts=1, count=6)
  played = make().play(weights, asked, Script(), iteration=0)
  computed = [int(np.flatnonzero(e.mask)[-1]) for e in played.episodes]
  metrics = played.metrics
  assert metrics["tokens/sampled"] + metrics["tokens/prefilled"] == (
    sum(computed)
  )
  assert metrics["pairs/decode"] + metrics["pairs/prefill"] == sum(
    place + 1 for count in computed for place in range(count)
  )
  assert metrics["pairs/decode"] == sum(
    place for e in played.episodes for place in np.flatnonzero(e.mask)
  )
  # All batches are of 16 ids, all steps of 4 rows.
  assert (metrics["tokens/prefilled"] + metrics["tokens/padding"]) % 16 == 0
  places = metrics["tokens/sampled"] + metrics["tokens/idle"]
  assert places == 4 * metrics["steps"]
  assert metrics["slot_steps"] == places


def test_flops_are_those_of_the_useful_work(weights, monkeypatch):
  """Two operations for each multiply-add, worked out layer by layer."""
  monkeypatch.setattr(engine_lib, "matmul_rate", lambda mesh, dtype: 4e6)
  asked = requests(1.0, attempts=1, count=2)
  played = make().play(weights, asked, Script(), iteration=0)
  b, flops = BACKBONE, 0
  for episode in played.episodes:
    computed = int(np.flatnonzero(episode.mask)[-1])
    mixed = b.head_dim * (2 * b.heads + 2 * b.kv_heads) + 3 * b.ffn
    for place in range(computed):
      attended = 2 * b.heads * b.head_dim * (place + 1)  # scores and values
      flops += 2 * b.layers * (b.dim * mixed + attended)
    flops += 2 * b.dim * b.vocab_size * int(episode.mask.sum())
  assert played.metrics["flops"] == pytest.approx(flops, rel=1e-12)
  assert played.metrics["seconds/matmul"] == pytest.approx(flops / 4e6)


def test_rates_are_ratios_of_sums():
  found = engine_lib.rates(
    {
      "tokens/sampled": 30,
      "tokens/prefilled": 70,
      "slot_steps": 40,
      "seconds": 5.0,
      "seconds/matmul": 2.0,
    }
  )
  assert found == dict(occupancy=0.75, tokens_per_second=20, matmul_share=0.4)


def test_a_matmul_s_rate_is_the_machine_s():
  """Virtual devices share their machine's cores: one rate for all of them."""
  meshes = [sharding.rollout_mesh(1, jax.devices()[:n]) for n in (1, 8)]
  one, eight = (engine_lib.matmul_rate(mesh, "float32") for mesh in meshes)
  assert one > 1e8
  assert 0.2 < eight / one < 5


@pytest.fixture(scope="module")
def yielded():
  """Notes who yields, and that nobody older than all others does."""
  found = []
  plain = shard.Shard._yield

  def noting(self, playing):
    residents = self.residents()
    assert playing is max(residents, key=lambda p: p.age)
    assert len(residents) > 1
    found.append(playing.age)
    plain(self, playing)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(shard.Shard, "_yield", noting)
    yield found


@pytest.mark.parametrize("late", [False, True])
def test_a_starved_pool_changes_no_token(weights, yielded, late):
  """Eight pages, which is what one episode needs at its longest."""
  asked = requests(1.0, attempts=3)
  usual = make().play(weights, asked, Script(), iteration=0)
  engine = make(pages=9, deterministic=not late)
  yielded.clear()
  if late:
    script = Late(concurrent.futures.ThreadPoolExecutor(8))
    with script.pool:
      played = engine.play(weights, asked, script, iteration=0)
  else:
    script = Script()
    played = engine.play(weights, asked, script, iteration=0)
  check_near(played.episodes, usual.episodes)
  assert played.metrics["preempted"] == len(yielded) > 0
  assert usual.metrics["preempted"] == usual.metrics["tokens/recomputed"] == 0
  # All that was computed beyond the usual had been computed before.
  again = played.metrics["tokens/recomputed"]
  assert again > 0
  assert (
    played.metrics["tokens/prefilled"] - again
    == (usual.metrics["tokens/prefilled"])
  )
  # No tool is asked twice.
  calls = [(p.request_id, p.attempt, p.turn, len(p.ids)) for p in script.pauses]
  assert len(set(calls)) == len(calls)


def test_a_request_that_no_pool_holds_is_an_error(weights):
  engine = make(pages=8)
  with pytest.raises(ValueError, match="120 tokens, 8 pages of 16.*has 7"):
    engine.play(weights, requests(1.0), Script(), iteration=0)
  with pytest.raises(ValueError, match="at least 9 .*or lower .* to 113"):
    engine.play(weights, requests(1.0), Script(), iteration=0)


# --- sampling --------------------------------------------------------------


def test_padding_of_the_vocabulary_is_never_drawn(weights):
  """At this temperature a draw is all but uniform; 212 of 512 are padding."""
  engine = make()
  assert weights["embed"]["embedding"].shape[0] == 512
  asked = requests(50.0, attempts=4)
  played = engine.play(weights, asked, Script(), iteration=0)
  drawn = np.concatenate([e.ids[e.mask] for e in played.episodes])
  assert 250 < drawn.max() < VOCABULARY
  logprobs = np.concatenate([e.logprobs[e.mask] for e in played.episodes])
  assert abs(logprobs.mean() + np.log(VOCABULARY)) < 0.1


def test_cut_offs_are_for_those_who_ask(params, weights):
  """The likeliest id alone is what greedy takes; others draw as ever."""
  engine = make()
  plain = requests(1.0)
  cut = [
    dataclasses.replace(
      request, sampling=types.Sampling(1.0, **how), id=request.id + "!"
    )
    for request, how in zip(
      plain,
      (dict(top_k=1), dict(top_p=1e-6), dict(top_k=9), dict(top_p=0.5)),
      strict=True,
    )
  ]
  script = Script()
  played = engine.play(weights, plain + cut, script, iteration=0)
  usual = engine.play(weights, plain, Script(), iteration=0)
  size = len(usual.episodes)
  check_near(played.episodes[:size], usual.episodes)
  ranks = {}
  for episode in played.episodes[size:]:
    logits = full_forward(params, episode.ids)
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    for place in np.flatnonzero(episode.mask):
      token, before = episode.ids[place], logprobs[place - 1]
      assert episode.logprobs[place] == pytest.approx(before[token], abs=1e-4)
      rank = int((before > before[token]).sum())
      likelier = float(np.exp(before[before > before[token]]).sum())
      found = ranks.setdefault(episode.request_id, [])
      found.append((rank, likelier))
  assert max(rank for rank, _ in ranks["r0!"] + ranks["r1!"]) == 0
  assert 0 < max(rank for rank, _ in ranks["r2!"]) < 9
  assert 0.1 < max(likelier for _, likelier in ranks["r3!"]) < 0.5


@pytest.mark.parametrize(
  "how",
  [
    dict(temperature=-1.0),
    dict(temperature=float("nan")),
    dict(temperature=float("inf")),
    dict(top_p=0.0),
    dict(top_p=1.5),
    dict(top_k=-1),
  ],
)
def test_sampling_that_there_is_not_is_an_error(weights, how):
  asked = dataclasses.replace(requests(1.0)[0], sampling=types.Sampling(**how))
  with pytest.raises(ValueError, match="'r0' asks for Sampling"):
    make().play(weights, [asked], Script(), iteration=0)


# --- episodes --------------------------------------------------------------


def test_iterations_and_attempts_draw_differently(weights):
  engine = make()
  one = engine.play(weights, requests(1.0), Script(), iteration=0).episodes
  two = engine.play(weights, requests(1.0), Script(), iteration=1).episodes
  assert one[0].ids.tolist() != two[0].ids.tolist()
  assert one[0].ids.tolist() != one[1].ids.tolist()


def test_go_on_samples_on_in_the_same_turn(params, weights):
  """Stop strings that mean nothing leave no trace in ids or logprobs."""
  engine = make()
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
  params, weights, stop, go_on
):
  """Also over turns: an observation between two halves does not join them."""
  heavy = [b"q"] * 140 + [b"z"] * 140 + [b""] * 20
  engine = make(token_bytes=heavy)
  log = []
  asked = [
    dataclasses.replace(r, limits=types.Limits(6, 150, 9))
    for r in requests(1.0, attempts=4)
  ]
  played = engine.play(
    weights, asked, stop_heavy(log, go_on, stop), iteration=1
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


def test_limits_end_turns_and_episodes(weights):
  engine = make()
  script = Script()
  played = engine.play(weights, requests(1.0, count=8), script, iteration=0)
  for pause in script.pauses:
    assert len(pause.ids) <= 9
    assert (pause.reason == "turn_tokens") <= (len(pause.ids) == 9)
  assert all(len(e.ids) <= 120 for e in played.episodes)


def test_an_end_token_pauses(weights):
  engine = make()
  script = Script()
  engine.play(weights, requests(1.0, count=24), script, iteration=3)
  ends = [p for p in script.pauses if p.ids and p.ids[-1] == END]
  assert ends
  assert all(p.reason == "eos" for p in ends)
  assert all(END not in p.ids[:-1] for p in script.pauses)


def test_a_request_that_cannot_fit_is_an_error(weights):
  engine = make(length=40)
  request = dataclasses.replace(requests(1.0)[0], prompt_ids=(1,) * 40)
  with pytest.raises(ValueError, match="prompt of 40 tokens.*holds 40"):
    engine.play(weights, [request], Script(), iteration=0)


@pytest.mark.parametrize("bad", [-1, VOCABULARY])
def test_ids_of_no_vocabulary_are_an_error(weights, bad):
  """300, of tables that are padded beyond it."""
  request = dataclasses.replace(requests(1.0)[0], prompt_ids=(1, bad, 2))
  says = f"has the id {bad}; ids are from 0 to 299"
  with pytest.raises(ValueError, match=f"Request 'r0' {says}"):
    make().play(weights, [request], Script(), iteration=0)

  class Sly(Script):
    def respond(self, pause):
      return types.Reply("append", ids=(1, bad))

  with pytest.raises(ValueError, match=f"A reply to request 'r0' {says}"):
    make().play(weights, requests(1.0, 1, 1), Sly(), iteration=0)


@pytest.mark.parametrize(
  "changes",
  [
    dict(attempts=0),
    dict(limits=types.Limits(0, 100, 1)),
    dict(limits=types.Limits(10, 100, 0)),
  ],
)
def test_limits_that_leave_nothing_are_an_error(weights, changes):
  request = dataclasses.replace(requests(1.0)[0], **changes)
  with pytest.raises(ValueError, match="'r0' asks for .* are 1 or more"):
    make().play(weights, [request], Script(), iteration=0)


def test_two_requests_of_one_id_are_an_error(weights):
  engine = make()
  request = requests(1.0)[0]
  with pytest.raises(ValueError, match="share an id.*r0"):
    engine.play(weights, [request] * 2, Script(), iteration=0)


def test_a_stop_string_that_meant_nothing_at_a_limit_ends_the_turn(
  params, weights
):
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
  played = engine.play(weights, requests_, script, iteration=5)
  limits = {r.id: r.limits for r in requests_}
  hit = 0
  for episode in played.episodes:
    limit = limits[episode.request_id]
    assert len(episode.ids) <= limit.episode_tokens
    for turn in episode.turns:
      assert turn.end - turn.start <= limit.turn_tokens
    hit += episode.finish in ("turn_tokens", "episode_tokens")
  assert hit


def test_ids_that_the_tokenizer_does_not_know_stop_nothing(weights):
  """Tables of weights may have more rows than there are tokens."""
  engine = make(token_bytes=[b"a"] * 199 + [b"q>"])
  script = Script(ignore_stops=True)
  engine.play(weights, requests(1.0, count=8), script, iteration=0)
  stops = [p for p in script.pauses if p.reason == "stop"]
  assert stops
  assert {p.ids[-1] for p in stops} == {199}
  assert max(max(p.ids) for p in script.pauses) > 199


def test_a_reply_may_limit_the_next_turn(weights):
  """And that one alone: the turn after it has the request's limit again."""

  class Limiting(Script):
    def respond(self, pause):
      self.pauses.append(pause)
      if pause.turn == 3 or pause.reason == "episode_tokens":
        return types.Reply("finish", finish="answer")
      return types.Reply(
        "append", (1, 2), turn_tokens=4 if pause.turn == 0 else None
      )

  script = Limiting()
  make().play(weights, requests(1.0, count=8), script, iteration=0)
  longest = {
    turn: max(len(p.ids) for p in script.pauses if p.turn == turn)
    for turn in range(4)
  }
  assert longest == {0: 9, 1: 4, 2: 9, 3: 9}
  for pause in script.pauses:
    limit = 4 if pause.turn == 1 else 9
    assert (pause.reason == "turn_tokens") <= (len(pause.ids) == limit)


def test_nothing_to_play(weights):
  assert make().play(weights, [], Script(), iteration=0).episodes == ()


def test_the_probe_plays_the_weights_it_is_given(params, weights):
  engine = make()
  probed = engine.probe(weights)
  assert len({tuple(e.ids[: e.prompt_length]) for e in probed}) == 1
  assert all(e.mask.any() for e in probed)
  for episode in probed:
    logits = full_forward(params, episode.ids)
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    for place in np.flatnonzero(episode.mask):
      assert episode.logprobs[place] == pytest.approx(
        logprobs[place - 1, episode.ids[place]], abs=1e-4
      )


# --- meshes and kinds of attention -----------------------------------------

WIDE = dataclasses.replace(BACKBONE, heads=8, kv_heads=8, head_dim=8)


@pytest.fixture(scope="module")
def alone():
  """A model that 8 devices can cut, and what one device makes of it."""
  drawn = jax.jit(model.init, static_argnums=0)(WIDE, jax.random.key(5))
  drawn = jax.tree.map(lambda x: x * 6 if x.ndim > 1 else x, drawn)
  engine = make(backbone=WIDE, slots=8)
  played = engine.play(
    engine.load(drawn), requests(1.0, attempts=3), Script(), iteration=0
  )
  return drawn, played


@pytest.mark.parametrize(
  "tensor",
  [
    2,
    pytest.param(1, marks=pytest.mark.slow),
    pytest.param(4, marks=pytest.mark.slow),
    pytest.param(8, marks=pytest.mark.slow),
  ],
)
def test_a_mesh_changes_no_token(alone, tensor, monkeypatch):
  """8 devices: 8 / tensor data shards, each cut over tensor."""
  shards = {}  # of each request
  plain = shard.Shard.enqueue

  def enqueue(self, playing):
    shards.setdefault(playing.request.id, set()).add(id(self))
    plain(self, playing)

  monkeypatch.setattr(shard.Shard, "enqueue", enqueue)
  drawn, usual = alone
  mesh = sharding.rollout_mesh(tensor, jax.devices())
  engine = make(backbone=WIDE, slots=8, mesh=mesh)
  training = sharding.mesh(4, 2)
  spread = jax.device_put(drawn, sharding.shardings(training, drawn))
  weights = engine.load(spread)
  up = weights["layers"][0]["up"]["kernel"]
  assert up.sharding.shard_shape(up.shape) == (64, 128 // tensor)
  asked = requests(1.0, attempts=3)
  played = engine.play(weights, asked, Script(), iteration=0)
  check_near(played.episodes, usual.episodes)
  # Attempts of a request are on one data shard, requests on all of them.
  assert {len(where) for where in shards.values()} == {1}
  assert len(set.union(*shards.values())) == min(4, 8 // tensor)
  for name in ("tokens/sampled", "tokens/shared", "tokens/prefilled"):
    assert played.metrics[name] == usual.metrics[name]
  assert len(engine.probe(weights)) == 2 * 8 // tensor


def test_slots_divide_over_data_shards():
  mesh = sharding.rollout_mesh(2, jax.devices())
  for slots, way_out in ((6, "4 or 8"), (0, "4 or 8"), (9, "8 or 12")):
    with pytest.raises(ValueError, match=f"4 data shards .*: {way_out}"):
      make(slots=slots, mesh=mesh)


@pytest.mark.parametrize("name", ["cudnn", "cudnn_contiguous"])
def test_kinds_of_a_gpu(params, weights, name, monkeypatch):
  """One row a prefill batch; contiguous rows own their pages, and share none.

  By the compiler's attention in the place of cuDNN's.
  """
  kind = attention.cudnn(name == "cudnn_contiguous", implementation="xla")
  monkeypatch.setitem(attention.KINDS, name, kind)
  monkeypatch.setattr(attention, "resolve", lambda kind, *_: kind)
  engine = make(attention=name)
  played = engine.play(
    weights, requests(1.0, attempts=3), Script(), iteration=0
  )
  for episode in played.episodes:
    check_against_full_forward(params, episode, 1.0)
  assert (played.metrics["tokens/shared"] == 0) == engine.layout.contiguous
  decode.programs.cache_clear()  # they hold the other attention


def test_shapes_of_batches():
  """On a CPU a decode loop has as many rows as run, or a few more."""
  sizes = make(slots=64, prefill_chunk=512).layout
  assert sizes.rows == (8, 16, 32, 64)
  assert sizes.prefill_tokens == (128, 512)
  assert make(slots=12).layout.rows == (12,)
