"""A policy that plays from a script, for tests of what stands on the engine.

It writes what the script says, through the real tokenizer and the real
environment, and scores its ids with the real model: episodes are whole, with
masks, turns and logprobs, but what happens in them is chosen by the test.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sesa_jax import distributed, types
from sesa_jax.engine import engine as engine_lib
from sesa_jax.policy import model, sharding

# (request, attempt, turn) -> what the policy writes in that turn
Script = Callable[[types.Request, int, int], str]
_LENGTH = 256


class ScriptedEngine:
  """Stands in for `engine.Engine`: same methods, same results."""

  def __init__(self, graphdef, tokenizer, script: Script):
    self._graphdef = graphdef
    self._tokenizer = tokenizer
    self._script = script

  def load(self, params):
    if len(jax.tree.leaves(params)[0].devices()) == 1:
      return params
    # A copy on each of the host's devices, of which one plays.
    mesh = sharding.rollout_mesh(1)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    places = jax.tree.map(lambda _: everywhere, params)
    copies = distributed.onto_host_mesh(lambda tree: tree, places)(params)
    return jax.tree.map(lambda x: x.addressable_shards[0].data, copies)

  def probe(self, weights):
    return ()  # a script has no copy that could be wrong

  def play(
    self,
    weights,
    requests: Sequence[types.Request],
    environment: types.Environment,
    *,
    iteration: int,
    on_episode=lambda episode: None,
  ) -> engine_lib.Played:
    episodes = []
    for request in requests:
      for attempt in range(request.attempts):
        episode = self._episode(weights, request, attempt, environment)
        on_episode(episode)
        episodes.append(episode)
    sampled = sum(int(e.mask.sum()) for e in episodes)
    metrics = {
      "tokens/sampled": sampled,
      "tokens/prefilled": 0,
      "slot_steps": sampled,
      "seconds": 1.0,
      "seconds/matmul": 0.5,
    }
    return engine_lib.Played(tuple(episodes), metrics)

  def _episode(self, weights, request, attempt, environment) -> types.Episode:
    ids, mask = list(request.prompt_ids), [False] * len(request.prompt_ids)
    turns: list[types.Turn] = []
    finish = ""
    while not finish:
      text = self._script(request, attempt, len(turns))
      own = self._tokenizer.encode(text, add_special_tokens=False)
      own = own[: request.limits.turn_tokens]
      ended = any(text.endswith(stop) for stop in environment.stops)
      full = len(own) == request.limits.turn_tokens
      reason = "turn_tokens" if full else "stop" if ended else "eos"
      start = len(ids)
      ids += own
      mask += [True] * len(own)
      reply = environment.respond(
        types.Pause(
          request.id,
          attempt,
          len(turns),
          sum(t.action == "malformed" for t in turns),
          tuple(own),
          reason,
          request.limits.episode_tokens - len(ids),
          request.limits.turns,
        )
      )
      if isinstance(reply, concurrent.futures.Future):
        reply = reply.result()
      end = len(ids)
      ids += reply.ids
      mask += [False] * len(reply.ids)
      turns.append(
        types.Turn(
          start,
          end,
          len(ids),
          text,
          reply.action,
          reply.argument,
          reply.passages,
          reply.note,
        )
      )
      finish = reply.finish
    ids = np.array(ids, np.int32)
    mask = np.array(mask)
    return types.Episode(
      request.id,
      attempt,
      request.arm,
      ids,
      len(request.prompt_ids),
      mask,
      np.where(mask, self._scores(weights, request, ids), 0).astype(np.float32),
      tuple(turns),
      finish,
    )

  def _scores(self, weights, request, ids) -> np.ndarray:
    length = _LENGTH * -(-len(ids) // _LENGTH)
    padded = np.zeros((1, length), np.int32)
    padded[0, : len(ids)] = ids
    temperature = request.sampling.temperature or 1.0
    found = _logprobs(self._graphdef, weights, padded, len(ids), temperature)
    return np.asarray(found)[: len(ids)]


# Of no engine: each test makes its own, and one compilation is enough.
@functools.partial(jax.jit, static_argnums=0)
def _logprobs(graphdef, weights, ids, length, temperature):
  positions = jnp.arange(ids.shape[1])[None]
  hidden = model.hidden(
    graphdef,
    weights,
    ids,
    positions,
    (positions < length).astype(jnp.int32),
    compute_dtype=jnp.float32,
    remat=False,
  )
  logits = model.logits(graphdef, weights, hidden)[0] / temperature
  logprobs = jax.nn.log_softmax(logits)
  own = jnp.take_along_axis(logprobs[:-1], ids[0, 1:, None], 1)[:, 0]
  return jnp.concatenate([jnp.zeros(1), own])


# --- a script that meets every case ----------------------------------------

_QUESTION = (
  "Which thing of this world, the one that a short article of this small "
  "encyclopedia number {} describes in two sentences, is meant here?"
)


# What it writes where it is asked for a skill.
SKILL = dict(
  category="two candidates",
  description="Read on until a sentence tells what was asked.",
  trigger="A page names more than one thing.",
  evidence="The verb of the question beside it.",
  avoidance="Taking the first.",
  templates=["{thing} {verb}"],
)


def _answers() -> dict[str, str]:
  """Question id -> a right answer, for the files of tests/world."""
  found = {}
  for name, file in (
    ("tiny_pool", "pool"),
    ("tiny_eval", "eval"),
    ("again", "eval"),
  ):
    lines = Path(f"tests/world/{file}.jsonl").read_text().splitlines()
    for i, line in enumerate(lines):
      found[f"{name}/{i}"] = json.loads(line)["golden_answers"][0]
  return found


def _target(name: str) -> str:
  """The answer of a seed or of the question posed for it."""
  return name.split("title/")[1].split("/")[0]


def world_script(request: types.Request, attempt: int, turn: int) -> str:
  """Valid, invalid, malformed and truncated play, by the request's id."""
  name = request.id.removeprefix("control/")
  case = zlib.crc32(f"l{name}".encode()) % 4
  if request.arm == "challenger":
    if turn == 0:
      return f"<search>{_target(request.id)}</search>"
    if case == 3:
      return "I would rather not ask."
    return f"<question>{_QUESTION.format(case)}</question>"
  if request.arm == "text":
    return json.dumps(SKILL)
  if request.arm == "evidence":
    return f"<answer>{_target(request.id)}</answer>"
  known = _answers().get(name) or _target(name)
  if turn == 0:
    return "<think>look</think><search>capital river wrote planet</search>"
  if request.arm == "control":  # skills help there alone where all is right
    return f"<answer>{known if case else 'Atlantis'}</answer>"
  if case == 0:  # all attempts are right
    return f"<answer>{known}</answer>"
  if case == 1:  # all wrong: in substance, malformed, truncated
    return (
      "<answer>Atlantis</answer>",
      "<search></search>",
      "no end " * 60,
      "<answer>Atlantis</answer>",
    )[attempt % 4]
  if attempt % 2 == 0:
    return f"<answer>{known}</answer>"
  if attempt % 4 == 1:
    return "<answer>Nowhere at all</answer>"
  return f"<answer>almost {known}</answer>"  # right, to a judge alone
