"""The rollout engine of this package on the rollout workload.

A side of `benchmarks.rollout`, run as `python -m benchmarks.ours`. The last
settings switch one idea off each, or choose other work.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import sides, workload
from sesa_jax import types
from sesa_jax.config import locate
from sesa_jax.engine import attention, sampling
from sesa_jax.engine import engine as engine_lib
from sesa_jax.policy import backbones, model, sharding, tokenizer, weights

SETTINGS = dict(
  devices=2,  # virtual CPU devices: a core each
  tensor=2,  # of them that cut the heads of one model
  slots=64,
  page_size=128,
  pages=0,  # 0: ample
  prefill_chunk=512,
  steps_per_dispatch=32,
  deterministic=False,
  # Ideas, each of which can be switched off.
  share=True,  # False: every attempt is a request of its own
  resume=True,  # False: every turn is a request of its own, prefilled again
  refill=True,  # False: all slots play to their end before any is given anew
  sampling="inverse_cdf",  # or "gumbel", a key a row
  attention="auto",  # or "gather": XLA gathers all pages of a table at once
  # Other work.
  model="workload",  # or "tiny", "smollm2"
  questions=16,
  attempts=4,
  turns=None,  # of every episode, None: as drawn
  prompt=None,  # tokens of it, as the next two; None: as drawn
  sample=None,
  observation=None,
)
SMOLLM2 = "assets:smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
STOP = "</search>"


class NoText:
  """Stands where the engine wants a tokenizer; the work is ids alone."""

  def decode(self, ids: Sequence[int]) -> str:
    """Returns no text."""
    del ids
    return ""


class Forced:
  """An environment that gives turns their lengths and observations.

  Args:
    segments: of (request, attempt), for each turn the ids that it samples and
      the observation that follows.
  """

  stops = (STOP,)

  def __init__(
    self,
    segments: Mapping[tuple[str, int], Sequence[tuple[int, Sequence[int]]]],
  ):
    self._segments = segments

  def respond(self, pause: types.Pause) -> types.Reply:
    """Ends the turn once it has its length."""
    segments = self._segments[pause.request_id, pause.attempt]
    size, observation = segments[pause.turn]
    if len(pause.ids) < size:  # the model happened to write the stop string
      return types.Reply("go_on")
    assert len(pause.ids) == size, (pause, size)
    if pause.turn + 1 == len(segments):
      return types.Reply("finish", finish="answer", action="answer")
    after, _ = segments[pause.turn + 1]
    return types.Reply(
      "append", tuple(observation), action="search", turn_tokens=after
    )


def requests(
  episodes: Sequence[workload.Episode], share: bool
) -> tuple[list[types.Request], Forced]:
  """Makes the episodes' requests, and the environment that forces them.

  A request has one limit for the first turn of all its attempts: the shortest
  of theirs. A longer first turn is then played as two, with nothing observed
  in between, which costs a pause more than the workload asks for.

  Args:
    episodes: in the order of questions.
    share: make one request of all attempts at a question.

  Returns:
    The requests, whose attempts are in the order of the episodes.
  """
  groups: dict[Any, list[workload.Episode]] = collections.defaultdict(list)
  for number, episode in enumerate(episodes):
    groups[episode.question if share else number].append(episode)
  asked, segments = [], {}
  for name, group in groups.items():
    first = min(episode.turns[0].sample for episode in group)
    asked.append(
      types.Request(
        id=f"question-{name}",
        prompt_ids=group[0].prompt,
        attempts=len(group),
        sampling=types.Sampling(1.0),
        limits=types.Limits(
          turn_tokens=first,
          episode_tokens=max(episode.length for episode in group) + 1,
          turns=2 + max(len(episode.turns) for episode in group),
        ),
        arm="benchmark",
      )
    )
    for attempt, episode in enumerate(group):
      own = [(turn.sample, turn.observation) for turn in episode.turns]
      if own[0][0] > first:
        own[:1] = [(first, ()), (own[0][0] - first, own[0][1])]
      segments[asked[-1].id, attempt] = own
  return asked, Forced(segments)


def _ours(
  backbone: backbones.Backbone, params: Any, length: int, chosen: Mapping
) -> tuple[Any, Any]:
  """Makes the engine: all that knows how one is made.

  Returns:
    The engine, and its weights.
  """
  engine = engine_lib.Engine(
    model.build(backbone),
    backbone,
    NoText(),
    chosen["token_bytes"],
    (),  # no id ends a turn: lengths are forced
    mesh=sharding.rollout_mesh(chosen["tensor"], jax.devices()),
    slots=chosen["slots"],
    length=length,
    page_size=chosen["page_size"],
    pages=chosen["pages"],
    prefill_chunk=chosen["prefill_chunk"],
    steps_per_dispatch=chosen["steps_per_dispatch"],
    deterministic=chosen["deterministic"],
    dtype=jnp.float32,
    seed=0,
  )
  return engine, engine.load(params)


class Player:
  """Plays the workload with the engine, all ideas on or some of them off."""

  def __init__(self, chosen: dict[str, Any]):
    self._chosen = chosen
    backbone, params, token_bytes = _model(chosen["model"])
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {
      jnp.dtype("float32")
    }
    self.episodes = _episodes(chosen)
    self.shape = backbone
    length = max(episode.length for episode in self.episodes) + 1
    self._engine, self._weights = _ours(
      backbone, params, length, chosen | {"token_bytes": token_bytes}
    )

  def play(self, iteration: int) -> tuple[int, collections.Counter]:
    """Plays all episodes.

    Returns:
      The ids sampled, and the sums of what the engine counted.
    """
    counts: collections.Counter = collections.Counter()
    step = len(self.episodes) if self._chosen["refill"] else self._slots()
    for start in range(0, len(self.episodes), step):
      wave = self.episodes[start : start + step]
      play = self._resuming if self._chosen["resume"] else self._anew
      play(wave, iteration, counts)
    return int(counts["kept"]), counts

  def _slots(self) -> int:
    return self._chosen["slots"]

  def _resuming(self, episodes, iteration, counts) -> list[list[int]]:
    """Plays whole episodes; returns their ids."""
    asked, forced = requests(episodes, self._chosen["share"])
    played = self._engine.play(
      self._weights, asked, forced, iteration=iteration
    )
    for name, value in played.metrics.items():
      counts[name] += value
    for episode, wanted in zip(played.episodes, episodes, strict=True):
      assert len(episode.ids) == wanted.length
      assert episode.mask.sum() == wanted.sampled
      assert (episode.logprobs[episode.mask] < 0).all()
      counts["kept"] += wanted.sampled
    return [episode.ids.tolist() for episode in played.episodes]

  def _anew(self, episodes, iteration, counts) -> None:
    """Plays turn by turn, each a request from the whole context so far."""
    contexts = [list(episode.prompt) for episode in episodes]
    for turn in range(max(len(episode.turns) for episode in episodes)):
      active = [i for i, e in enumerate(episodes) if turn < len(e.turns)]
      now = [episodes[i].turns[turn] for i in active]
      # After the first turn, contexts differ within a question.
      asked = [
        workload.Episode(
          question=i if turn else episodes[i].question,
          prompt=tuple(contexts[i]),
          turns=(workload.Turn(forced.sample, ()),),
        )
        for i, forced in zip(active, now, strict=True)
      ]
      ids = self._resuming(asked, iteration * 8 + turn, counts)
      for i, forced, context in zip(active, now, ids, strict=True):
        contexts[i] = context + list(forced.observation)


def _episodes(chosen: Mapping[str, Any]) -> tuple[workload.Episode, ...]:
  lengths = {
    name: (chosen[name], chosen[name])
    for name in ("prompt", "sample", "observation")
    if chosen[name] is not None
  }
  if chosen["model"] == "tiny":
    lengths["greatest_id"] = backbones.tiny().vocab_size - 1
  if chosen["turns"] is not None:
    lengths["turns"] = (chosen["turns"],)
  return workload.draw(chosen["questions"], chosen["attempts"], **lengths)


def _model(name: str) -> tuple[backbones.Backbone, Any, list[bytes]]:
  """Returns the architecture, float32 masters and the bytes of each id."""
  if name == "smollm2":
    path = locate(SMOLLM2)
    backbone, params = weights.load("gguf", path, jax.random.key(0))
    return (
      backbone,
      params,
      tokenizer.token_bytes(tokenizer.load("gguf", path)),
    )
  if name == "tiny":
    backbone = dataclasses.replace(backbones.tiny(), context=2**16)
  elif name == "workload":
    backbone = backbones.Backbone(
      **dataclasses.asdict(workload.MODEL),
      tied=True,
      qk_norm=True,
      qkv_bias=False,
      context=4096,
    )
  else:
    raise sides.SideError(
      f"Unknown model {name!r}. Choices: workload, tiny, smollm2."
    )
  params = model.init(backbone, jax.random.key(0))
  return backbone, params, [b"x"] * backbone.vocab_size


# --- ideas switched off ----------------------------------------------------


def _switch_off(chosen: Mapping[str, Any]) -> None:
  """Puts the plain way in the place of an idea, before anything is traced."""
  if chosen["sampling"] == "gumbel":
    sampling.sample = _gumbel
  elif chosen["sampling"] != "inverse_cdf":
    raise sides.SideError(
      f"Unknown sampling {chosen['sampling']!r}. Choices: inverse_cdf, gumbel."
    )
  if chosen["attention"] == "gather":
    kind = attention.KINDS["xla"]
    attention.KINDS["xla"] = dataclasses.replace(
      kind, attend=_gathering(kind.attend)
    )
  elif chosen["attention"] != "auto":
    raise sides.SideError(
      f"Unknown attention {chosen['attention']!r}. Choices: auto, gather."
    )


def _gumbel(logits, keys, positions, temperature, cut=None, axis=None):
  """Draws by noise over the whole vocabulary, from a key a row."""
  del cut
  share = jax.lax.axis_index(axis) if axis else 0

  def noise(key, position):
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, position), share)
    return jax.random.gumbel(key, logits.shape[1:])

  scaled = logits / temperature[:, None]
  noisy = scaled + jax.vmap(noise)(keys, positions)
  place = jnp.argmax(noisy, -1)
  best, score = (
    jnp.take_along_axis(x, place[:, None], 1)[:, 0] for x in (noisy, scaled)
  )
  found = place + share * logits.shape[1], best, score
  # Of each share of the vocabulary; then of all of it.
  ids, best, score, total = (
    jax.lax.all_gather(x, axis) if axis else x[None]
    for x in (*found, jax.nn.logsumexp(scaled, -1))
  )
  ids, score = (
    jnp.take_along_axis(x, jnp.argmax(best, 0)[None], 0)[0]
    for x in (ids, score)
  )
  return ids.astype(jnp.int32), score - jax.nn.logsumexp(total, 0)


def _gathering(plain):
  """Attention of the decode loop over one gathered copy of all pages."""

  def attend(q, pool, kv_lens, tables, cu_q_lens, rows, *, decode):
    if not decode:
      return plain(q, pool, kv_lens, tables, cu_q_lens, rows, decode=False)
    count, heads, size = q.shape
    k, v = pool["k"][tables], pool["v"][tables]  # [R, W, K, ...]
    kv_heads, page = v.shape[2:4]
    grouped = q.reshape(count, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("rkgh,rwkhs->rkgws", grouped, k) * size**-0.5
    places = jnp.arange(tables.shape[1] * page).reshape(-1, page)
    seen = places < kv_lens[:, None, None, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    flat = scores.reshape(*scores.shape[:3], -1)
    shares = jax.nn.softmax(flat, -1).reshape(scores.shape)
    out = jnp.einsum("rkgws,rwksh->rkgh", shares, v)
    return out.reshape(q.shape)

  return attend


# --- orders ----------------------------------------------------------------


def start(settings: dict[str, Any]) -> dict[str, sides.Order]:
  """Builds engine and weights."""
  chosen = sides.merged(SETTINGS, settings)
  jax.config.update("jax_num_cpu_devices", chosen["devices"])
  compiled = sides.watch_compilation()
  _switch_off(chosen)
  player = Player(chosen)
  square = jax.random.normal(jax.random.key(1), (1024, 1024), jnp.float32)
  multiply = jax.jit(jnp.matmul)
  multiply(square, square).block_until_ready()

  def about() -> dict[str, Any]:
    done = workload.work(player.episodes)
    return dict(
      settings=chosen,
      versions=dict(jax=jax.__version__, numpy=np.__version__),
      work=dataclasses.asdict(done),
      flops=workload.flops(player.shape, done),
      longest=max(episode.length for episode in player.episodes),
    )

  def play(run: int = 0) -> dict[str, Any]:
    before, began = sum(compiled), time.perf_counter()
    kept, counts = player.play(run)
    return dict(
      seconds=time.perf_counter() - began,
      compile_seconds=sum(compiled) - before,
      tokens=kept,
      counts=dict(counts),
    )

  def matmul(repeats: int = 12) -> dict[str, Any]:
    """The rate of a 1024 x 1024 x 1024 product of float32, in FLOPs/s."""
    rates = []
    for _ in range(repeats):
      began = time.perf_counter()
      multiply(square, square).block_until_ready()
      rates.append(2 * 1024**3 / (time.perf_counter() - began))
    return dict(flops_per_second=rates)

  return dict(start=about, warm=play, play=play, matmul=matmul)


if __name__ == "__main__":
  sides.serve(start)
