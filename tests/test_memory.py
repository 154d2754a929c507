"""The skill memory in the loop: what reaches it, and what it leaves."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from sesa_jax import experiment, loop, metrics, prompts, types
from sesa_jax.retrieval import index
from sesa_jax.skills import bank as skill_bank
from sesa_jax.skills import credit, history
from tests import driver
from tests.test_loop import SCRIPTED, silent, spied, tiny_config

ROOT = Path(__file__).parents[1]
# Several skills fit into a prompt.
ROOM = {
  "bank.fields": ("description", "avoidance"),
  "bank.block_tokens": 400,
  "solver.episode_tokens": 1000,
  "challenger.episode_tokens": 1000,
  "learner.row_multiple": 1000,
}
# A skill that did harm goes at once, so that replays have something to do.
CONTROL = ROOM | {
  "bank.control_attempts": 2,
  "bank.credit": "control",
  "bank.retire_after": 1,
  "bank.prime": "authored157",
}


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
  monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def controlled(tmp_path_factory):
  """Three iterations with attempts without skills beside the others."""
  folder = tmp_path_factory.mktemp("controlled") / "run"
  here = Path.cwd()
  os.chdir(ROOT)
  with driver.playing_the_script():
    experiment.run(tiny_config(**SCRIPTED | CONTROL, iterations=3), str(folder))
  os.chdir(here)
  return metrics.RunFolder(folder)


# --- the history -------------------------------------------------------------


def test_the_history_of_a_run_is_its_bank(controlled):
  lines = (controlled.path / "skills.jsonl").read_text().splitlines()
  events = controlled.read("skills_history.jsonl")
  assert history.at(events) == [json.loads(line) for line in lines]


def test_a_replay_of_a_run_as_it_was_is_the_run(controlled):
  """Rankings are those of retrieval, and stand in the iteration they tell of.

  Were one missing, of another iteration or in another order, skills would be
  shown, and retired, that were not.
  """
  events = controlled.read("skills_history.jsonl")
  run = history.curves(events)
  again = history.replay(
    events,
    capacity=800,
    retire_after=1,
    order=lambda questions, iteration: np.arange(questions)[None],
  )
  assert run.retired[-1] > 2
  np.testing.assert_array_equal(again.active[0], run.active)
  np.testing.assert_array_equal(again.retired[0], run.retired)
  asked = {
    (row["iteration"], row["request_id"])
    for row in driver.rows_of(controlled, "solver")
  }
  ranked = [event for event in events if event["event"] == "rank"]
  assert [event["iteration"] for event in ranked] == [1, 2, 3]
  assert asked == {
    (e["iteration"], name) for e in ranked for name in e["ranked"]
  }


def test_each_run_ends_with_its_plots(controlled):
  picture = controlled.path / "plots/bank.png"
  assert picture.read_bytes().startswith(b"\x89PNG")
  picture.unlink()
  with driver.playing_the_script():  # resumed, with nothing left to do
    experiment.run(
      tiny_config(**SCRIPTED | CONTROL, iterations=3), str(controlled.path)
    )
  assert picture.exists()


# --- attempts without skills -------------------------------------------------


def test_control_attempts_have_no_skills_and_teach_nothing():
  changes = {"bank.control_attempts": 2, "bank.credit": "control"}
  records = []
  for more in ({}, changes):
    config, world, state, spy = spied(**more)
    with silent() as progress:
      after, record = loop.iteration(state, world, config, progress)
    records.append((after, record))
  plain, extra = (record for _, record in records)
  posed, checked, solved, control = spy.played
  assert control[0] is solved[0]
  assert control[2] is world.tools.environments["solver"]
  assert [r.id for r in control[1]] == [f"control/{r.id}" for r in solved[1]]
  for request in control[1]:
    assert request.attempts == 2
    assert request.sampling.temperature == config.solver.temperature
    assert request.limits.episode_tokens == config.solver.episode_tokens
    text = world.tools.tokenizer.decode(request.prompt_ids)
    assert prompts.HEADING not in text
  rows = [row for row in extra.episodes if row["arm"] == "control"]
  assert len(rows) == 2 * len(solved[1])
  for row in rows:
    assert row["reward"] is None
    assert row["advantage"] is None
    assert row["skill_ids"] == ()
    assert row["verdict"] in ("right", "wrong")
  rest = [row for row in extra.episodes if row["arm"] != "control"]
  assert [*map(metrics.line, rest)] == [*map(metrics.line, plain.episodes)]
  for name in ("solver/loss", "solver/reward/mean", "frontier/recorded"):
    assert extra.metrics[name] == plain.metrics[name], name
  for one, two in zip(
    *(after.solver.params["norm"].values() for after, _ in records), strict=True
  ):
    np.testing.assert_array_equal(one, two)


def test_control_credit_and_effects_by_hand(controlled):
  """p with skills less p without, from the episodes alone."""
  success = {}
  for arm in ("solver", "control"):
    right = {}
    for row in driver.rows_of(controlled, arm):
      key = row["iteration"], row["request_id"].removeprefix("control/")
      right.setdefault(key, []).append(row["verdict"] == "right")
    success[arm] = {key: np.mean(found) for key, found in right.items()}
  primed = {
    (row["iteration"], row["request_id"])
    for row in driver.rows_of(controlled, "solver")
    if row["skill_ids"]
  }
  assert success["control"].keys() == primed
  assert len({*success["control"].values()}) > 1
  found = {}
  for event in controlled.read("skills_history.jsonl"):
    if event["event"] != "credit":
      continue
    for name, pair, difference in zip(
      event["questions"], event["usage"], event["differences"], strict=True
    ):
      key = event["iteration"], name
      want = success["solver"][key] - success["control"][key]
      assert difference == pytest.approx(want)
      assert pair == pytest.approx([max(want, 0), max(-want, 0)])
      found.setdefault(event["skill"], []).append(want)
  effects = history.effects(controlled.read("skills_history.jsonl"))
  assert effects.keys() == found.keys()
  for name, differences in found.items():
    assert effects[name] == credit.effect(differences)
  last = controlled.read("metrics.jsonl")[-1]
  keys = [key for key in success["control"] if key[0] == 3]
  want = np.mean([success["solver"][k] - success["control"][k] for k in keys])
  assert last["bank/effect/mean"] == pytest.approx(want)
  assert last["bank/effect/questions"] == len(keys)


def test_without_a_bank_there_is_no_control():
  changes = {"bank.control_attempts": 2, "bank.prime": "none"}
  config, world, state, spy = spied(**changes)
  with silent() as progress:
    loop.iteration(state, world, config, progress)
  assert len(spy.played) == 3


class Down:
  """A search engine that is down."""

  def search(self, queries, k):
    return [types.SearchFailure("refused")] * len(queries)


def test_lost_control_attempts_count_as_lost():
  config, world, state, spy = spied(**{"bank.control_attempts": 1})
  play = spy.play

  def losing(weights, requests, environment, **more):
    if requests[0].arm == "control":
      environment._search = Down()
    return play(weights, requests, environment, **more)

  spy.play = losing
  with silent() as progress, pytest.raises(types.Stopped, match="stayed lost"):
    loop.iteration(state, world, config, progress)


# --- arms and index ----------------------------------------------------------


def test_the_arm_of_a_run_is_what_its_solver_sees():
  """Placebo and scrambled, in training: other blocks, credited as shown."""
  seen = {}
  for arm in ("skills", "placebo", "scrambled"):
    config, world, state, spy = spied(**ROOM | {"bank.arm": arm})
    _, record = unlearned(state, world, config)
    solved = [r for r in record.episodes if r["arm"] == "solver"]
    credited = {e["skill"] for e in record.history if e["event"] == "credit"}
    assert credited == {name for row in solved for name in row["skill_ids"]}
    seen[arm] = {r["request_id"]: (r["skill_ids"], r["prompt"]) for r in solved}
    ranked = [e for e in record.history if e["event"] == "rank"]
    assert len(ranked) == (arm == "skills")
    assert record.metrics["bank/placebo_missed"] <= len(solved)
  for name, (ids, prompt) in seen["skills"].items():
    assert not set(ids) & set(seen["placebo"][name][0])
    assert ids == seen["scrambled"][name][0]
    assert prompt != seen["scrambled"][name][1]


def test_bank_modes_of_evaluation():
  modes = ("none", "final", "placebo", "scrambled")
  config, world, state, spy = spied(**ROOM | {"eval.banks": modes})
  with silent() as progress:
    cells = experiment._evaluate(config, world, state, progress)
  assert tuple(cell["bank"] for cell in cells) == modes
  ids = [
    {p["id"]: p["skill_ids"] for p in cell["predictions"]} for cell in cells
  ]
  texts = [
    {r.id: world.tools.tokenizer.decode(r.prompt_ids) for r in played[1]}
    for played in spy.played
  ]
  for name in ids[0]:
    assert ids[0][name] == ()
    assert prompts.HEADING not in texts[0][name]
    assert len(ids[1][name]) > 1
    assert ids[2][name]
    assert not set(ids[1][name]) & set(ids[2][name])
    assert ids[3][name] == ids[1][name]
    assert texts[3][name] != texts[1][name]
    assert sorted(texts[3][name]) == sorted(texts[1][name])
  assert "placebo_missed" in cells[2]
  # Drawn by iteration too.
  again, *_ = loop.evaluation.show_skills(
    state.bank, world.texts.fixed, world.tools, config, arm="placebo"
  )
  later, *_ = loop.evaluation.show_skills(
    state.bank, world.texts.fixed, world.tools, config, arm="placebo",
    iteration=1,
  )  # fmt: skip
  assert again != later


def test_the_index_is_the_configs(monkeypatch):
  config, world, state, _ = spied(**{"bank.index": "exact"})
  asked = []
  monkeypatch.setattr(
    skill_bank.index_lib,
    "build",
    lambda *args: asked.append(args[2]) or index.Exact(*args[:2]),
  )
  loop.evaluation.show_skills(
    state.bank, world.texts.fixed, world.tools, config
  )
  assert asked == ["exact"]


def test_tokens_of_a_text_inside_a_prompt_are_its_own():
  """Llama's tokenizer puts one id before any text that it encodes alone."""

  class Llama:
    def encode(self, text, add_special_tokens=True):
      return [0] * add_special_tokens + text.split()

  _, world, _, _ = spied()
  tools = dataclasses.replace(world.tools, tokenizer=Llama())
  assert tools.count_tokens("one two") == 2


# --- values that reach their place -------------------------------------------


def unlearned(state, world, config):
  """One iteration without its updates, which take most of its time."""
  policies = dict(challenger=state.challenger, solver=state.solver)
  with silent() as progress, pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop, "_learn", lambda *_: (policies, {"solver": {}}))
    return loop.iteration(state, world, config, progress)


class Written:
  """A distiller that notes what it is asked, and writes one skill a case."""

  name = "offline"

  def __init__(self):
    self.cases = []

  def distill_all(self, cases):
    self.cases += cases
    return [
      types.Skill(
        "", "c", f"Rule {case.records[0].question_id}.", "t", "e", "a", (), ""
      )
      for case in cases
    ]


def failed(name, iteration=1):
  page = types.Passage("1", "Bonn", "Bonn lies on a river.")
  return types.FailureRecord(
    name, "", f"Which town is {name}?", ("Rome",), "Bonn", (), (page,), 1, 1,
    0.5, (), iteration,
  )  # fmt: skip


def distilled(iteration=1, queue=(), **changes):
  """One iteration, with a distiller that notes what it is asked."""
  config, world, state, _ = spied(**changes)
  written = Written()
  world = dataclasses.replace(
    world, tools=dataclasses.replace(world.tools, distiller=written)
  )
  state = dataclasses.replace(state, iteration=iteration, queue=tuple(queue))
  return written, *unlearned(state, world, config)


def test_the_encoders_threshold_decides_admission():
  queue = [failed("p"), failed("q")]
  for threshold, admitted in ((1.0, True), (-1.0, False)):
    _, after, record = distilled(
      queue=queue, **{"encoder.threshold": threshold}
    )
    assert bool(record.metrics["distillation/admitted"]) == admitted
    assert (len(after.bank.skills) > 15) == admitted


def test_contrast_reaches_the_records():
  for contrast in (False, True):
    _, _, record = distilled(**{"distillation.contrast": contrast})
    assert record.failures
    assert all(bool(f["right"]) == contrast for f in record.failures)


def test_clusters_reach_the_distiller():
  queue = [failed(name) for name in "abcdefg"]
  changes = {"frontier.gate": "off", "distillation.max_records": 6}
  for name, sizes in (("single", [1] * 6), ("cluster", [5, 1])):
    written, after, _ = distilled(
      queue=queue, **changes | {"distillation.consolidate": name}
    )
    assert [len(case.records) for case in written.cases] == sizes
    assert after.queue == (queue[-1],)


@pytest.mark.parametrize("wait", [True, False])
def test_what_is_due(wait):
  """After every second iteration; beside the next one if none waits."""
  changes = {"distillation.every": 2, "distillation.wait": wait}
  asked = [
    bool(distilled(done, [failed("p")], **changes)[0].cases)
    for done in (1, 2, 3)
  ]
  # The iterations are the 2nd, 3rd and 4th.
  assert asked == ([True, False, True] if wait else [False, True, False])


def test_draws_of_a_placebo_change_with_the_iteration(monkeypatch):
  keys = []
  real = loop.evaluation.arms.placebo

  def noted(*args, **more):
    keys.append((more["seed"], more["iteration"]))
    return real(*args, **more)

  monkeypatch.setattr(loop.evaluation.arms, "placebo", noted)
  for done in (1, 2):
    distilled(done, **{"bank.arm": "placebo", "seed": 7})
  assert keys == [(7, 2), (7, 3)]
