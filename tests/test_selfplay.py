"""Stage 2: who is shown what, and what becomes of lost calls."""

import dataclasses
import inspect

import numpy as np
import pytest

from sesa_jax import prompts, types
from sesa_jax.engine import engine as engine_lib
from sesa_jax.language import ENGLISH
from sesa_jax.stages import selfplay

LIMITS = types.Limits(8, 64, 2)
SAMPLING = types.Sampling(1.0)


def episode(request, attempt, finish="answer", answer="seven"):
  turn = types.Turn(1, 2, 2, "text", finish, answer, (), "")
  return types.Episode(
    request.id,
    attempt,
    request.arm,
    np.arange(2, dtype=np.int32),
    1,
    np.array([False, True]),
    np.zeros(2, np.float32),
    (turn,),
    finish,
  )


class Engine:
  """Loses the episodes that it is told to, so many times."""

  def __init__(self, losses=None, answer="seven"):
    self.losses = dict(losses or {})  # (request, attempt) -> times
    self.answer = answer
    self.finish = "answer"
    self.calls = []
    self.asked = []

  def play(self, weights, requests, environment, *, iteration, on_episode):
    self.calls.append([r.id for r in requests])
    self.asked.append((environment, iteration, requests))
    episodes = []
    for request in requests:
      for attempt in range(request.attempts):
        key = (request.id, attempt)
        lost = self.losses.get(key, 0) > 0
        self.losses[key] = self.losses.get(key, 0) - 1
        episodes.append(
          episode(request, attempt, "lost")
          if lost
          else episode(request, attempt, self.finish, self.answer)
        )
    metrics = {
      "tokens/sampled": 10,
      "tokens/prefilled": 20,
      "slot_steps": 20,
      "seconds": 2.0,
      "seconds/matmul": 0.5,
    }
    return engine_lib.Played(tuple(episodes), metrics)


class Words:
  def decode(self, ids, skip_special_tokens):
    assert skip_special_tokens  # an end token is no part of an answer
    return "own text"


def tools(engine):
  return types.Tools(
    engine=engine,
    environments={n: n for n in ("solver", "challenger", "evidence")},
    search=None,
    encoder=None,
    distiller=None,
    tokenizer=Words(),
    language=ENGLISH,
    render=lambda prompt: tuple(prompt.user.encode()),
    on_episode=None,
  )


def question(name, targets=("seven",)):
  return types.Question(name, f"What is {name}?", targets, 1, "s", "fixed")


def solve(engine, tasks, attempts=3, shown=None, blocks=None):
  return selfplay.solve(
    None,
    tasks,
    shown or {},
    blocks or {},
    tools(engine),
    iteration=1,
    attempts=attempts,
    sampling=SAMPLING,
    limits=LIMITS,
  )


def test_lost_episodes_are_replayed_and_only_they():
  engine = Engine({("a", 1): 1, ("b", 0): 2})
  found, metrics = solve(engine, [question("a"), question("b"), question("c")])
  assert engine.calls == [["a", "b", "c"], ["a", "b"], ["b"]]
  assert [a.verdict for a in found] == ["right"] * 9
  assert metrics["lost"] == 0
  assert metrics["tokens/sampled"] == 30
  assert metrics["seconds"] == 6.0
  assert metrics["tokens_per_second"] == (30 + 60) / 6
  assert metrics["occupancy"] == 0.5
  assert metrics["matmul_share"] == 0.25


def test_what_stays_lost_is_unknown_never_wrong():
  engine = Engine({("a", 1): 99})
  found, metrics = solve(engine, [question("a")])
  assert [a.verdict for a in found] == ["right", "unknown", "right"]
  assert metrics["lost"] == 1
  assert len(engine.calls) == 1 + selfplay.REPLAYS


def test_skills_stand_in_front_of_their_question_alone():
  engine = Engine()
  seen = {}
  held = tools(engine)
  held = dataclasses.replace(
    held, render=lambda prompt: seen.setdefault(prompt.user, (1, 2))
  )
  skill = types.Skill("k", "", "", "", "", "", (), "seed")
  found, _ = selfplay.solve(
    None,
    [question("a"), question("b")],
    {"a": (skill,)},
    {"a": "BLOCK"},
    held,
    iteration=1,
    attempts=2,
    sampling=SAMPLING,
    limits=LIMITS,
  )
  assert list(seen) == [
    "BLOCK\n\nQuestion: What is a?",
    "Question: What is b?",
  ]
  assert [a.skill_ids for a in found] == [("k",), ("k",), (), ()]


def test_no_answer_scores_nothing_even_if_the_prompt_names_it():
  """The worked example's own answer is the target: still wrong."""
  engine = Engine()
  engine.play_ = engine.play

  def without_answer(weights, requests, environment, **more):
    played = engine.play_(weights, requests, environment, **more)
    silent = tuple(
      dataclasses.replace(e, turns=(), finish="turns") for e in played.episodes
    )
    return engine_lib.Played(silent, played.metrics)

  engine.play = without_answer
  found, _ = solve(engine, [question("a", ("Canberra",))], attempts=1)
  assert found[0].prediction is None
  assert found[0].verdict == "wrong"


def test_pose_has_no_argument_that_could_hold_a_bank():
  names = set(inspect.signature(selfplay.pose).parameters)
  assert names == {
    "weights",
    "seeds",
    "tools",
    "iteration",
    "group_size",
    "searches",
    "sampling",
    "limits",
  }
  held = {field.name for field in dataclasses.fields(types.Tools)}
  assert not [n for n in held if "bank" in n or "skill" in n]


def test_pose_asks_for_the_seed_and_its_hops():
  engine, asked = Engine(), []
  held = dataclasses.replace(
    tools(engine), render=lambda prompt: asked.append(prompt) or (1, 2)
  )
  seeds = [types.Seed("x", ("X",), 1), types.Seed("y", ("Y",), 3)]
  found, _ = selfplay.pose(
    None,
    seeds,
    held,
    iteration=4,
    group_size=2,
    searches={1: 1, 3: 2},
    sampling=SAMPLING,
    limits=LIMITS,
  )
  assert engine.calls == [["4/x", "4/y"]]
  assert [(p.seed.id, p.attempt) for p in found] == [
    ("x", 0), ("x", 1), ("y", 0), ("y", 1),
  ]  # fmt: skip
  assert all(p.state == "posed" and p.text is None for p in found)
  one, other = asked
  assert one == prompts.challenger(seeds[0], 1)
  assert other == prompts.challenger(seeds[1], 2)
  assert "at least once" in one.system
  assert "one fact" in one.system
  assert "at least twice" in other.system
  assert "3 facts" in other.system


@pytest.mark.parametrize(
  ("finish", "expected"),
  [("answer", "seven"), ("lost", None), ("turns", "own text")],
)
def test_evidence_answers(finish, expected):
  losses = {("evidence/k", 0): 99} if finish == "lost" else {}
  engine = Engine(losses)
  engine.finish = "answer" if finish == "lost" else finish
  found, episodes, _ = selfplay.as_evidence(
    None,
    [("k", "Which?", ())],
    tools(engine),
    iteration=1,
    tokens=70,
    max_tokens=8192,
  )
  assert found == [expected]
  assert episodes[0].arm == "evidence"


def test_each_part_is_played_in_its_environment_and_iteration():
  engine = Engine()
  solve(engine, [question("a")])
  selfplay.pose(
    None,
    [types.Seed("x", ("X",), 1)],
    tools(engine),
    iteration=2,
    group_size=1,
    searches={1: 1},
    sampling=SAMPLING,
    limits=LIMITS,
  )
  selfplay.as_evidence(
    None,
    [("k", "Which?", ())],
    tools(engine),
    iteration=3,
    tokens=70,
    max_tokens=8192,
  )
  assert [(e, i) for e, i, _ in engine.asked] == [
    ("solver", 1),
    ("challenger", 2),
    ("evidence", 3),
  ]
  (request,) = engine.asked[-1][2]
  assert request.sampling == types.Sampling(0.0)
  assert request.limits == types.Limits(70, 8192, 1)
