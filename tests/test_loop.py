"""The whole loop on the tiny config: invariants, resume, information flow."""

import copy
import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from configs import common, tiny
from sesa_jax import experiment, loop, metrics, report, tools, types
from sesa_jax import state as state_lib
from sesa_jax.policy import model, weights
from sesa_jax.policy.backbones import tiny as tiny_backbone
from sesa_jax.skills import bank as skill_bank
from sesa_jax.skills import history
from tests import driver

ROOT = Path(__file__).parents[1]
# The scripted policy writes longer turns than the babbling one may.
SCRIPTED = {
  "solver.turn_tokens": 160,
  "challenger.turn_tokens": 160,
  "eval.turns": 3,
  # Few, so that earlier questions are replayed too.
  "pool.fixed.tiny_pool.size": 2,
  # Apart, so that no value of one policy can stand in for the other's.
  "challenger.temperature": 1.25,
  "solver.temperature": 0.8,
  "challenger.learning_rate": 2e-3,
  "challenger.episode_tokens": 752,
  "challenger.advantage_std": False,
}


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
  monkeypatch.chdir(ROOT)


def tiny_config(**changes):
  config = tiny.get_config().copy_and_resolve_references()
  config.unlock()
  config.update_from_flattened_dict(changes)
  return config


def begin(config, tmp_path):
  texts = tools.read(config)
  world = tools.assemble(config, texts)
  state, _ = state_lib.start(config, world)
  return world, state


def silent(total=1):
  return metrics.Progress(total)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
  """Three iterations of the scripted policy, with all that they left."""
  folder = tmp_path_factory.mktemp("scripted") / "run"
  here = Path.cwd()
  os.chdir(ROOT)
  with driver.playing_the_script():
    experiment.run(tiny_config(**SCRIPTED, iterations=3), str(folder))
  os.chdir(here)
  return metrics.RunFolder(folder)


def rows_of(folder, iteration):
  files = metrics.episode_files(folder.path)
  return list(metrics.read_episodes(files[iteration - 1]))


# --- one iteration -----------------------------------------------------------


def test_every_case_is_met(scripted):
  """Else the tests below would hold of nothing."""
  rows = [r for i in (1, 2, 3) for r in rows_of(scripted, i)]
  finishes = {row["finish"] for row in rows}
  assert {"answer", "question", "turn_tokens"} <= finishes
  actions = {turn["action"] for row in rows for turn in row["turns"]}
  assert {"search", "answer", "question", "malformed"} <= actions
  arms = {row["arm"] for row in rows}
  assert arms == {"challenger", "solver", "evidence"}
  groups = {}
  for row in rows:
    if row["arm"] == "solver":
      key = (row["iteration"], row["request_id"])
      groups.setdefault(key, []).append(row["verdict"])
  assert ["right"] * 4 in groups.values()
  assert ["wrong"] * 4 in groups.values()
  assert any(len(set(group)) > 1 for group in groups.values())
  states = {row["state"] for row in scripted.read("questions.jsonl")}
  assert {"valid", "no_question"} <= states
  origins = scripted.read("metrics.jsonl")
  assert any(row["solver/origin/challenger"] for row in origins)
  assert any(row["solver/origin/fixed"] for row in origins)
  assert any(row["solver/origin/replay"] for row in origins)
  outcomes = {
    row["outcome"]
    for row in scripted.read("skills_history.jsonl")
    if "outcome" in row
  }
  assert "admitted" in outcomes


def test_masks_and_logprobs_of_every_episode(scripted):
  for row in (r for i in (1, 2, 3) for r in rows_of(scripted, i)):
    episode = metrics.episode_from_row(row)
    own = np.zeros(len(episode.ids), bool)
    at = episode.prompt_length
    for turn in episode.turns:
      assert turn.start == at
      own[turn.start : turn.end] = True
      at = turn.stop
    assert at == len(episode.ids)
    assert (own == episode.mask).all()
    assert (episode.logprobs[~own] == 0).all()
    assert (episode.logprobs[own] < 0).all()


def test_text_is_a_view_of_ids(scripted):
  words = tools.tokenizer.load("random", "")
  for row in rows_of(scripted, 1):
    assert words.decode(row["ids"][: row["prompt_length"]]) == row["prompt"]
    for turn in row["turns"]:
      seen = words.decode(row["ids"][turn["end"] : turn["stop"]])
      assert seen == turn["observation"]
      if turn["passages"]:
        assert turn["passages"][0]["title"] in seen


def test_rewards_and_advantages_of_solver_groups(scripted):
  """(r - mean) / std of each question's attempts, by numpy."""
  groups = {}
  for row in (r for i in (1, 2, 3) for r in rows_of(scripted, i)):
    if row["arm"] == "solver":
      key = (row["iteration"], row["request_id"])
      groups.setdefault(key, []).append(row)
  for group in groups.values():
    rewards = np.array([row["reward"] for row in group])
    expected = [float(row["verdict"] == "right") for row in group]
    assert rewards.tolist() == expected
    spread = rewards.std(ddof=1)
    want = (
      (rewards - rewards.mean()) / (spread + 1e-6) if spread else 0 * rewards
    )
    np.testing.assert_allclose([r["advantage"] for r in group], want, atol=1e-5)


def test_challengers_advantages_are_over_its_batch_and_not_scaled(scripted):
  """r - mean over an iteration's proposals, where they differ."""
  seen = False
  for iteration in (1, 2, 3):
    rows = rows_of(scripted, iteration)
    rows = [row for row in rows if row["arm"] == "challenger"]
    rewards = np.array([row["reward"] for row in rows])
    seen |= bool(rewards.std() > 0.1)
    np.testing.assert_allclose(
      [row["advantage"] for row in rows], rewards - rewards.mean(), atol=1e-6
    )
  assert seen


def test_challenger_is_paid_the_bell(scripted):
  for row in scripted.read("questions.jsonl"):
    p = row["success"]
    if row["state"] == "valid" and 0 < p < 1:
      assert row["reward"] == pytest.approx(4 * p * (1 - p))
    else:
      assert row["reward"] == pytest.approx(-0.1)


def test_both_policies_learn_and_the_gap_is_small(scripted):
  for row in scripted.read("metrics.jsonl"):
    for role in ("challenger", "solver"):
      assert row[f"{role}/updates"] == 1
      assert row[f"{role}/skipped"] == 0
      assert row[f"{role}/logprob_gap/max"] < 1e-4
  last = scripted.read("metrics.jsonl")[-1]
  assert last["solver/kl/mean"] > 0
  assert last["challenger/kl/mean"] > 0


def test_each_policy_learns_at_its_own_rate(scripted):
  for row in scripted.read("metrics.jsonl"):
    assert row["challenger/lr"] == pytest.approx(2e-3)
    assert row["solver/lr"] == pytest.approx(1e-3)


def test_kl_is_to_the_weights_that_both_started_from(scripted):
  """k3 of both policies' episodes, from scratch: e^d - d - 1, d = ref - new."""
  config = tiny_config(**SCRIPTED)
  _, params = weights.load("random", "", jax.random.key(config.seed))
  graphdef = model.build(tiny_backbone())
  for role in ("challenger", "solver"):
    temperature = config[role].temperature
    per_token = []
    for row in rows_of(scripted, 2):
      if row["arm"] != role:
        continue
      episode = metrics.episode_from_row(row)
      ids = np.zeros((1, 768), np.int32)
      ids[0, : len(episode.ids)] = episode.ids
      place = np.arange(768)[None]
      hidden = model.hidden(
        graphdef,
        params,
        ids,
        place,
        (place < len(episode.ids)).astype(np.int32),
        compute_dtype=np.float32,
        remat=False,
      )
      logits = np.asarray(model.logits(graphdef, params, hidden)[0], np.float64)
      logits /= temperature
      logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
      for t in np.flatnonzero(episode.mask):
        d = logprobs[t - 1, episode.ids[t]] - episode.logprobs[t]
        per_token.append(np.exp(d) - d - 1)
    got = scripted.read("metrics.jsonl")[1][f"{role}/kl/mean"]
    assert got == pytest.approx(np.mean(per_token), rel=1e-2)
    assert got > 0


def test_no_question_leaves_two_records(scripted):
  """Not even one that was replayed, and failed again."""
  failures = [row["question_id"] for row in scripted.read("failures.jsonl")]
  assert len(set(failures)) == len(failures)
  again = [
    row["request_id"]
    for row in rows_of(scripted, 3)
    if row["arm"] == "solver" and not row["request_id"].startswith("3/")
  ]
  mixed = {
    name
    for name in again
    if len(
      {r["verdict"] for r in rows_of(scripted, 3) if r["request_id"] == name}
    )
    == 2
  }
  assert mixed & set(failures)


def equal(one, other):
  """Whether two trees hold the same numbers, whatever their containers."""
  pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return all(bool((a == b).all()) for a, b in pairs)


def test_checkpoints_hold_each_policy(scripted):
  """Weights and optimizer of each; and no role's are the other's."""
  config = tiny_config(**SCRIPTED)
  world = tools.assemble(config, tools.read(config))
  store = experiment.checkpoint.Checkpoints(
    scripted.path / "checkpoints", read_only=True
  )
  state, _ = state_lib.restore(world, store, 3, 800)
  abstract = world.solver.abstract().params
  found = store.restore_milestone(
    3, {"challenger": abstract, "solver": abstract}
  )
  whole = {role: getattr(world, role).abstract() for role in found}
  trees = store.restore(3, whole)[0]
  store.close()
  for role in found:
    assert equal(found[role], getattr(state, role).params)
    assert equal(trees[role], getattr(state, role))
  for part in ("params", "opt_state"):
    one, other = (getattr(getattr(state, role), part) for role in found)
    assert not equal(one, other)


def test_metrics_hold_what_must_be_seen(scripted):
  row = scripted.read("metrics.jsonl")[0]
  for name in (
    "rollout/searches/mean",
    "rollout/malformed",
    "rollout/truncated",
    "rollout/unknown",
    "challenger/valid_rate",
    "solver/logprob_gap/mean",
    "solver/logprob_gap/max",
    "solver/informative_groups",
    "bank/active",
    "solver/engine/tokens/sampled",
  ):
    assert row[name] is not None, name
  rows = rows_of(scripted, 1)
  played = [r for r in rows if r["arm"] in ("challenger", "solver")]
  searches = [sum(t["action"] == "search" for t in r["turns"]) for r in played]
  assert row["rollout/searches/mean"] == pytest.approx(np.mean(searches))


def test_a_bank_row_and_the_history_agree(scripted):
  bank = {
    row["id"]: row
    for row in map(
      json.loads, (scripted.path / "skills.jsonl").read_text().splitlines()
    )
  }
  helpful = dict.fromkeys(bank, 0)
  for event in scripted.read("skills_history.jsonl"):
    if event["event"] == "credit":
      helpful[event["skill"]] += event["helpful"]
  assert {name: row["helpful"] for name, row in bank.items()} == helpful
  assert sum(helpful.values()) > 0


def test_the_run_leaves_all_its_files(scripted):
  names = {path.name for path in scripted.path.iterdir()}
  assert names == {
    "config.json",
    "manifest.json",
    "run.lock",
    "metrics.jsonl",
    "episodes",
    "questions.jsonl",
    "skills.jsonl",
    "plots",
    "skills_history.jsonl",
    "failures.jsonl",
    "eval.json",
    "checkpoints",
  }
  cells = json.loads((scripted.path / "eval.json").read_text())
  seen = {(c["iteration"], c["bank"], c["set"]) for c in cells}
  assert seen == {
    (i, bank, "tiny_eval") for i in (0, 3) for bank in ("none", "final")
  }
  assert all(len(c["predictions"]) == 4 for c in cells)
  on = [c for c in cells if c["bank"] == "final"]
  assert all(p["skill_ids"] for c in on for p in c["predictions"])


# --- asymmetry ---------------------------------------------------------------


def test_the_bank_reaches_the_solver_and_never_the_challenger(tmp_path):
  """One state, two banks: the same proposals, other solver prompts."""
  config = tiny_config()
  world, state = begin(config, tmp_path)
  bank = state.bank
  halved = skill_bank.create(bank.capacity, bank.embeddings.shape[1])
  skills = [
    dataclasses.replace(skill, description="Count the vowels first.")
    for skill in bank.skills[:3]
  ]
  vectors = world.tools.encoder.encode(
    [skill_bank.embedded_text(skill) for skill in skills], "passage"
  )
  halved, _ = skill_bank.prime(halved, skills, vectors)
  records = []
  for each in (bank, halved):
    fresh = dataclasses.replace(
      state,
      bank=each,
      challenger=world.challenger.init(world.references["challenger"]),
      solver=world.solver.init(world.references["solver"]),
    )
    with silent() as progress:
      records.append(loop.iteration(fresh, world, config, progress)[1])
  one, two = ([metrics.line(r) for r in record.episodes] for record in records)
  posed = [
    [x for x in rows if b'"arm":"challenger"' in x] for rows in (one, two)
  ]
  assert posed[0]
  assert posed[0] == posed[1]
  solved = [
    [r["prompt"] for r in record.episodes if r["arm"] == "solver"]
    for record in records
  ]
  assert len(solved[0]) == len(solved[1]) == 12
  assert all(a != b for a, b in zip(*solved, strict=True))
  assert all("Count the vowels" in prompt for prompt in solved[1])


# --- same seed, same run -----------------------------------------------------

_TIMES = ("seconds", "tokens_per_second", "matmul_share")


def content(folder: Path) -> dict[str, object]:
  """All that a run left, without what tells the time."""
  run = metrics.RunFolder(folder)
  out: dict[str, object] = {
    path.name: path.read_bytes() for path in metrics.episode_files(folder)
  }
  for name in ("skills.jsonl", *metrics.LOGS):
    out[name] = (folder / name).read_bytes()
  out["metrics.jsonl"] = [
    {k: v for k, v in row.items() if not any(t in k for t in _TIMES)}
    for row in run.read("metrics.jsonl")
  ]
  out["eval.json"] = [
    {k: v for k, v in cell.items() if not any(t in k for t in _TIMES)}
    for cell in run.read_json("eval.json", [])
  ]
  config = tiny_config(**SCRIPTED)
  store = experiment.checkpoint.Checkpoints(
    folder / "checkpoints", read_only=True
  )
  world = tools.assemble(config, tools.read(config))
  state, _ = state_lib.restore(world, store, store.latest(), 800)
  store.close()
  out["state"] = metrics.plain(
    (state.iteration, state.queue, state.pool.to_json(), state.position)
  )
  out["bank"] = metrics.plain(skill_bank.to_tree(state.bank))
  out["weights"] = [
    np.asarray(leaf).tobytes()
    for leaf in jax.tree.leaves((state.challenger, state.solver))
  ]
  return out


def command(kill, folder, *more):
  flags = [f"--config.{name}={value}" for name, value in SCRIPTED.items()]
  return subprocess.run(
    [
      sys.executable,
      "-m",
      "tests.driver",
      kill,
      "--config=configs/tiny.py",
      f"--workdir={folder}",
      "--config.iterations=3",
      "--config.distillation.every=2",
      *flags,
      *more,
    ],
    capture_output=True,
    text=True,
    cwd=ROOT,
    timeout=280,
  )


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory):
  folder = tmp_path_factory.mktemp("unkilled") / "run"
  done = command("never", folder)
  assert done.returncode == 0, done.stderr
  found = content(folder)
  # Else a resume that forgets them would pass.
  rows = metrics.RunFolder(folder).read("metrics.jsonl")
  assert rows[0]["distillation/pending"] > 0  # kills in iteration 2
  assert rows[0]["pool/size"] > 2
  assert rows[0]["bank/shown"] > 0
  assert rows[1]["bank/active"] > 15  # kills in iteration 3
  return folder, found


@pytest.mark.slow
@pytest.mark.parametrize(
  "place",
  [
    "rollout:4",
    "update:3",
    "distillation:3",
    "checkpoint:5",
  ],
)
def test_kill_and_resume_equals_no_kill(unkilled, tmp_path, place):
  folder = tmp_path / "run"
  killed = command(place, folder)
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  assert experiment.checkpoint.has_steps(folder / "checkpoints")
  resumed = command("never", folder)
  assert resumed.returncode == 0, resumed.stderr
  assert "Resumed after iteration" in resumed.stderr
  expected, found = unkilled[1], content(folder)
  assert found.keys() == expected.keys()
  for name in expected:
    assert found[name] == expected[name], name


@pytest.mark.slow
def test_start_from_continues_another_run(unkilled, tmp_path):
  folder = tmp_path / "run"
  done = command("never", folder, f"--start_from={unkilled[0]}@2")
  assert done.returncode == 0, done.stderr
  expected, found = unkilled[1], content(folder)
  for name in ("iteration_00003.jsonl.zst", "state", "bank", "weights"):
    assert found[name] == expected[name], name
  assert found["metrics.jsonl"] == expected["metrics.jsonl"][2:]
  parent = json.loads((folder / "manifest.json").read_text())["parent"]
  assert parent.endswith("run@2")
  # Its history alone tells what the bank is, that of the other run included.
  events = metrics.RunFolder(folder).read("skills_history.jsonl")
  assert {e["iteration"] for e in events if e["event"] == "inherit"} == {2}
  bank = (folder / "skills.jsonl").read_text().splitlines()
  assert history.at(events) == [json.loads(row) for row in bank]
  assert (folder / "plots/bank.png").exists()
  again = command("never", folder, f"--start_from={unkilled[0]}@2")
  assert again.returncode == 0, again.stderr
  assert content(folder) == found


def test_start_from_without_such_a_checkpoint(scripted, tmp_path):
  config = tiny_config(**SCRIPTED)
  with pytest.raises(ValueError, match=r"no checkpoint of iteration 7.*2, 3"):
    experiment.run(config, str(tmp_path / "w"), start_from=f"{scripted.path}@7")
  with pytest.raises(ValueError, match="RUN@ITERATION"):
    experiment.run(config, str(tmp_path / "w"), start_from=str(scripted.path))


@pytest.mark.slow
def test_two_runs_give_the_same_bytes(tmp_path):
  """With the real engine."""
  found = []
  for name in ("a", "b"):
    experiment.run(tiny_config(iterations=1), str(tmp_path / name))
    found.append(content(tmp_path / name))
  assert found[0] == found[1]


# --- wiring: each value reaches the place that it is meant for ---------------


class Spy:
  """Stands before an engine, and notes what it is asked for."""

  def __init__(self, engine):
    self.engine, self.loaded, self.played = engine, [], []

  def load(self, params):
    self.loaded.append(params)
    return self.engine.load(params)

  def probe(self, weights):
    return self.engine.probe(weights)

  def play(self, weights, requests, environment, **more):
    self.played.append((weights, requests, environment, more["iteration"]))
    return self.engine.play(weights, requests, environment, **more)


# No part of a world depends on these.
_LATER = ("bank.", "distillation.", "encoder.threshold", "eval.banks")


@functools.cache
def assembled(changes):
  """The world of some changes, which tests share."""
  config = tiny_config(**SCRIPTED | dict(changes))
  with driver.playing_the_script():
    return tools.assemble(config, tools.read(config))


def spied(**changes):
  config = tiny_config(**SCRIPTED | changes)
  early = {n: x for n, x in changes.items() if not n.startswith(_LATER)}
  world = assembled(tuple(sorted(early.items())))
  # Copies of what tests bend.
  spy = Spy(copy.copy(world.tools.engine))
  places = {k: copy.copy(x) for k, x in world.tools.environments.items()}
  world = dataclasses.replace(
    world,
    tools=dataclasses.replace(world.tools, engine=spy, environments=places),
  )
  state, _ = state_lib.start(config, world)
  return config, world, state, spy


def test_each_policy_plays_its_own_part():
  config, world, state, spy = spied(**{"challenger.group_size": 2})
  state = dataclasses.replace(state, iteration=4)
  with silent() as progress:
    _, record = loop.iteration(state, world, config, progress)
  weights = {"challenger": state.challenger, "solver": state.solver}
  del weights  # donated: compare what was loaded before
  posed, checked, solved = spy.played
  assert posed[0] is spy.loaded[0]
  assert checked[0] is spy.loaded[1]
  assert solved[0] is spy.loaded[1]
  assert spy.loaded[0] is not spy.loaded[1]
  for role, (_, requests, environment, iteration) in (
    ("challenger", posed),
    ("evidence", checked),
    ("solver", solved),
  ):
    assert environment is world.tools.environments[role]
    assert iteration == 5
    for request in requests:
      if role == "evidence":
        assert request.sampling.temperature == 0.0
        assert request.limits.turn_tokens == config.verifier.tokens
        continue
      assert request.sampling.temperature == config[role].temperature
      assert request.limits.episode_tokens == config[role].episode_tokens
      assert request.attempts == config[role].group_size
  # Every proposal has a slot, also where a seed has two.
  assert len(posed[1]) == 3
  assert record.metrics["pool/empty_slots"] == max(
    0, 6 - record.metrics["solver/questions"]
  )
  assert record.metrics["solver/questions"] > 3


def test_the_solver_is_evaluated():
  config, world, state, spy = spied()
  with silent() as progress:
    experiment._evaluate(config, world, state, progress)
  assert spy.loaded == [state.solver.params]
  for _, requests, _, _ in spy.played:
    assert all(r.sampling.temperature == 0.0 for r in requests)
    assert all(r.limits.turns == config.eval.turns for r in requests)


def test_settings_reach_the_engine():
  for seed in (0, 1):
    for deterministic in (True, False):
      config = tiny_config(seed=seed, **{"engine.deterministic": deterministic})
      world = tools.assemble(config, tools.read(config))
      engine = world.tools.engine
      assert (engine._seed, engine._deterministic) == (seed, deterministic)
  zero = tools.assemble(tiny_config(), tools.read(tiny_config()))
  differs = jax.tree.map(
    lambda a, b: bool((a != b).any()),
    zero.references["solver"],
    world.references["solver"],
  )
  assert any(jax.tree.leaves(differs))


def test_a_harmful_skill_is_retired_within_the_iteration():
  config, world, state, _ = spied()
  bad = dataclasses.replace(
    state.bank.skills[0], id="", origin="offline", description="Guess."
  )
  vector = world.tools.encoder.encode(["Guess."], "passage")
  bank, _ = skill_bank.admit(state.bank, [bad], vector, 2.0, 1)
  arrays, document = skill_bank.to_tree(bank)
  arrays["retrieved"][15], arrays["harmful"][15] = 3, 50
  bank = skill_bank.from_tree(arrays, document)
  with silent() as progress:
    after, record = loop.iteration(
      dataclasses.replace(state, bank=bank), world, config, progress
    )
  assert after.bank.records[15].state == "retired"
  assert record.metrics["bank/retired"] == 1


def test_floor_and_fields_of_the_bank_reach_the_prompt():
  config, world, state, _ = spied(**{"bank.fields": ("avoidance",)})
  questions = world.texts.fixed
  shown, blocks, _ = loop.evaluation.show_skills(
    state.bank, questions, world.tools, config
  )
  skill = shown[questions[0].id][0]
  assert blocks[questions[0].id].splitlines()[1] == f"Avoid: {skill.avoidance}"
  config.bank.min_score = 0.999
  assert loop.evaluation.show_skills(
    state.bank, questions, world.tools, config
  ) == ({}, {}, 0)


def test_a_question_must_leave_room_for_skills_and_a_turn():
  config, world, _, _ = spied()
  render, room = world.tools.render, config.solver.episode_tokens
  words = 1
  while tools.fits_solver(config, render, "why " * words):
    words += 1
  size = len(
    render(tools.prompts.solver("why " * words, tools.prompts.HEADING))
  )
  over = size + config.bank.block_tokens + config.solver.turn_tokens - room
  assert 0 < over < 8


# --- stops -------------------------------------------------------------------


class Broken:
  """A search engine that is down."""

  def search(self, queries, k):
    return [types.SearchFailure("connection refused")] * len(queries)


def test_an_outage_stops_before_the_update(tmp_path):
  config = tiny_config(**SCRIPTED)
  with driver.playing_the_script():
    world, state = begin(config, tmp_path)
  for environment in world.tools.environments.values():
    environment._search = Broken()
  before = np.asarray(state.solver.params["norm"]["scale"]).copy()
  with (
    silent() as progress,
    pytest.raises(types.Stopped, match="connection refused"),
  ):
    loop.iteration(state, world, config, progress)
  assert (np.asarray(state.solver.params["norm"]["scale"]) == before).all()


def test_an_outage_of_the_solvers_searches_alone_stops_too():
  config, world, state, _ = spied()
  world.tools.environments["solver"]._search = Broken()
  with silent() as progress, pytest.raises(types.Stopped, match="stayed lost"):
    loop.iteration(state, world, config, progress)


def test_a_parser_that_misses_every_call_stops_the_first_iteration():
  config, world, state, spy = spied()
  spy.engine._script = lambda request, attempt, turn: "</search>"
  with silent() as progress, pytest.raises(types.Stopped, match="no search"):
    loop.iteration(state, world, config, progress)
  later = dataclasses.replace(state, iteration=1)
  with silent() as progress:
    loop.iteration(later, world, config, progress)


def test_updates_that_are_no_numbers_stop_at_a_checkpoint_that_is(
  tmp_path, monkeypatch
):
  """One update an iteration: those of 2 and 3 are skipped, that of 4 stops."""
  config = tiny_config(
    **SCRIPTED, iterations=5, **{"eval.sets": {}, "checkpoint.keep": 9}
  )
  shape = loop._shape

  def broken(checked, attempts, tools, config, number):
    edge = shape(checked, attempts, tools, config, number)
    if number == 1:
      return edge
    lessons = [dataclasses.replace(a, advantage=np.nan) for a in edge.attempts]
    return dataclasses.replace(edge, attempts=tuple(lessons))

  monkeypatch.setattr(loop, "_shape", broken)
  with (
    driver.playing_the_script(),
    pytest.raises(types.Stopped) as stopped,
  ):
    experiment.run(config, str(tmp_path / "run"))
  said = str(stopped.value)
  assert said.startswith("3 updates in a row had a non-finite loss")
  assert "last good checkpoint is the one of iteration 3" in said
  rows = metrics.RunFolder(tmp_path / "run").read("metrics.jsonl")
  assert [row["solver/skipped"] for row in rows] == [0, 1, 1]
  world = tools.assemble(config, tools.read(config))
  store = experiment.checkpoint.Checkpoints(
    tmp_path / "run" / "checkpoints", read_only=True
  )
  assert store.latest() == 3
  first, last = (
    state_lib.restore(world, store, step, 800)[0].solver for step in (1, 3)
  )
  store.close()
  jax.tree.map(np.testing.assert_array_equal, first.params, last.params)
  assert int(last.opt_state.skipped) == 2


def test_a_collapse_is_warned_of(tmp_path, caplog):
  config = tiny_config(
    **SCRIPTED,
    iterations=2,
    **{"eval.sets": {}, "alarms.entropy_most": 0.5, "alarms.valid_rate": 1.0}
    | {"alarms.valid_iterations": 2},
  )
  with driver.playing_the_script(), caplog.at_level("WARNING"):
    experiment.run(config, str(tmp_path / "run"))
  warned = [m for m in caplog.messages if m.startswith("Iteration ")]
  assert [m.split(" = ")[0] for m in warned] == [
    "Iteration 1: challenger/entropy/mean",
    "Iteration 1: solver/entropy/mean",
    "Iteration 2: challenger/entropy/mean",
    "Iteration 2: solver/entropy/mean",
    "Iteration 2: challenger/valid_rate",
  ]


def test_searches_that_are_never_executed_stop_the_first_iteration():
  turn = types.Turn(0, 1, 1, "<search>x</search>", "malformed", "", (), "")
  episode = types.Episode(
    "a", 0, "solver", np.zeros(1, np.int32), 0, np.ones(1, bool),
    np.zeros(1, np.float32), (turn,), "malformed",
  )  # fmt: skip
  with pytest.raises(types.Stopped, match="no search was executed"):
    loop._stop_if_nothing_searched([episode])
  searched = dataclasses.replace(turn, action="search")
  loop._stop_if_nothing_searched(
    [dataclasses.replace(episode, turns=(searched,))]
  )


# --- budget ------------------------------------------------------------------


def test_budget_counts_passes_by_hand():
  config = tiny_config()
  found = report.budget(config)
  assert found["pose"] == 3 * 768
  assert found["solve"] == 3 * 4 * 768
  # forward 1, backward 2, reference 1; no remat, one update
  assert found["update solver"] == 3 * 4 * 768 * 4
  assert report.evaluations(tiny_config(iterations=5, **{"eval.every": 2})) == [
    0, 2, 4, 5,
  ]  # fmt: skip


def test_the_bill_of_the_papers_setting():
  config = common.get_config()
  assert config.iterations == 200
  assert report.bill(config) == {
    "searches": 2_764_800,  # 200 x (256 x 9 + 256 x 5 x 9)
    "verdicts": 256_000,
    "evidence checks": 51_200,
    "probes": 12_800,  # 200 x 32 x 2
    "distillations": 600,
  }
  config.search.engine = "google"
  said = report.plan(config, {"a": range(100)}).caption
  assert "2,764,800 searches, 256,000 verdicts" in said
  # 21 evaluations of two banks; a thousand searches cost 1.
  assert "4,200 answers and 37,800 searches. The searches cost 2,802.60" in said
  assert "the judge costs is not known without judge.prompt_price." in said
  config.judge.prompt_price, config.judge.completion_price = 0.5, 2.0
  # Prompts: 260,200 x 600 + 64,000 x (600 + 8,192) + 600 x (600 + 1,500),
  # replies: 260,200 x 512 + 64,000 x 70 + 600 x 1,024: at most.
  said = report.plan(config, {"a": range(100)}).caption
  assert said.endswith("The judge costs about 636.67.")


@pytest.mark.parametrize(
  ("changes", "wanted"),
  [
    # 2 x (3 x 2 + 3 x 4 x 2), and nobody else is asked.
    ({}, (60, 0, 0, 0, 0)),
    ({"bank.control_attempts": 2}, (84, 0, 0, 0, 0)),
    ({"selfplay": False}, (48, 0, 0, 0, 0)),
    (
      {
        "verifier.answerer": "judge",
        "verifier.probes": 2,
        "distillation.distiller": "chat",
        "judge.base_url": "http://x",
      },
      (60, 24, 6, 8, 60),
    ),
    (
      {
        "selfplay": False,
        "verifier.answerer": "judge",
        "distillation.distiller": "chat",
        "judge.base_url": "http://x",
        "frontier.gate": "off",
      },
      (48, 24, 0, 0, 0),
    ),
    (
      {"distillation.distiller": "chat", "distillation.every": 2},
      (60, 0, 0, 0, 30),
    ),
    ({"distillation.distiller": "chat", "bank.frozen": True}, (60, 0, 0, 0, 0)),
    ({"challenger.group_size": 2, "challenger.turns": 1}, (96, 0, 0, 0, 0)),
  ],
)
def test_the_bill_follows_the_config(changes, wanted):
  config = tiny_config(**{"judge.base_url": ""} | changes)
  assert tuple(report.bill(config).values()) == wanted


def test_old_checkpoints_go_and_milestones_stay(scripted):
  steps = sorted(
    int(p.name)
    for p in (scripted.path / "checkpoints").iterdir()
    if p.name.isdigit()
  )
  assert steps == [2, 3]
  milestones = scripted.path / "checkpoints" / "milestones"
  assert sorted(p.name for p in milestones.iterdir()) == ["2", "3"]


def test_seeds_move_on_and_the_queue_is_carried(scripted):
  """Against the records alone: not only killed against unkilled."""
  posed = [
    {
      r["seed_id"]
      for r in scripted.read("questions.jsonl")
      if r["iteration"] == i
    }
    for i in (1, 2, 3)
  ]
  assert len(set.union(*posed)) == 9
  pending = 0
  history = scripted.read("skills_history.jsonl")
  for row in scripted.read("metrics.jsonl"):
    taken = [
      e
      for e in history
      if e["iteration"] == row["iteration"] and "outcome" in e
    ]
    pending += row["frontier/recorded"] - len(taken)
    assert row["distillation/pending"] == pending
    assert len(taken) <= row["distillation/pending"] + len(taken)
  failed = {r["question_id"] for r in scripted.read("failures.jsonl")}
  assert {e["question"] for e in history if "outcome" in e} <= failed


def test_records_of_shown_skills_match_the_prompts(scripted):
  """Only what stands in the prompt is recorded, and credited."""
  texts = {
    row["id"]: row["description"]
    for row in map(
      json.loads, (scripted.path / "skills.jsonl").read_text().splitlines()
    )
  }
  credited = {}
  for event in scripted.read("skills_history.jsonl"):
    if event["event"] == "credit":
      for name in event["questions"]:
        credited.setdefault((event["iteration"], name), set()).add(
          event["skill"]
        )
  for i in (1, 2, 3):
    for row in rows_of(scripted, i):
      if row["arm"] == "solver":
        shown = {name for name, text in texts.items() if text in row["prompt"]}
        assert set(row["skill_ids"]) == shown
        assert credited[i, row["request_id"]] == shown


def test_shares_of_an_iteration_by_hand(scripted):
  for i, found in enumerate(scripted.read("metrics.jsonl"), 1):
    rows = [r for r in rows_of(scripted, i) if r["arm"] == "solver"]
    ends = ("turn_tokens", "episode_tokens", "turns")
    cut = sum(r["finish"] in ends for r in rows)
    wrong = sum(
      any(t["action"] == "malformed" for t in r["turns"]) for r in rows
    )
    assert found["solver/rollout/truncated"] == pytest.approx(cut / len(rows))
    assert found["solver/rollout/malformed"] == pytest.approx(wrong / len(rows))
    assert found["solver/rollout/unknown"] == 0


class Flaky:
  """Loses every search of one question."""

  def __init__(self, search, query):
    self.search_, self.query = search, query

  def search(self, queries, k):
    if self.query in queries:
      return [types.SearchFailure("timed out")] * len(queries)
    return self.search_.search(queries, k)


@pytest.mark.slow
def test_a_lost_question_is_out_as_a_whole():
  """UNKNOWN, end to end: no reward, no lesson, no credit, no record."""
  config, world, state, spy = spied(lost_limit=0.9)
  script = spy.engine._script

  def own_query(request, attempt, turn):
    if request.arm == "solver" and turn == 0:
      return f"<search>about {request.id}</search>"
    return script(request, attempt, turn)

  spy.engine._script = own_query
  with silent() as progress:
    _, whole = loop.iteration(state, world, config, progress)
  solved = [r for r in whole.episodes if r["arm"] == "solver"]
  lost = next(r["request_id"] for r in solved if r["verdict"] == "right")
  _, world, state, spy = spied(lost_limit=0.9)
  spy.engine._script = own_query
  environment = world.tools.environments["solver"]
  environment._search = Flaky(environment._search, f"about {lost}")
  with silent() as progress:
    after, record = loop.iteration(state, world, config, progress)
  rows = [r for r in record.episodes if r["request_id"] == lost]
  assert len(rows) == config.solver.group_size
  for row in rows:
    assert row["verdict"] == "unknown"
    assert row["reward"] is None
    assert row["advantage"] is None
    assert not any("timed out" in turn["observation"] for turn in row["turns"])
  others = [
    r for r in record.episodes if r["arm"] == "solver" and r not in rows
  ]
  assert all(r["advantage"] is not None for r in others)
  found = record.metrics
  assert found["solver/questions_unknown"] == 1
  assert found["solver/rollout/unknown"] == pytest.approx(
    4 / len(rows + others)
  )
  assert not [f for f in record.failures if f["question_id"] == lost]
  credits = [e for e in record.history if e["event"] == "credit"]
  assert lost not in {q for e in credits for q in e["questions"]}
  proposal = [r for r in record.questions if r["id"] == lost]
  assert all(r["reward"] is None and r["success"] is None for r in proposal)


@pytest.mark.slow
def test_a_run_that_was_lengthened_equals_a_straight_one(tmp_path):
  """With the real engine: its keys and states survive a restart."""
  small = {"eval.banks": ("none",)}
  experiment.run(tiny_config(iterations=1, **small), str(tmp_path / "a"))
  experiment.run(tiny_config(iterations=2, **small), str(tmp_path / "a"))
  experiment.run(tiny_config(iterations=2, **small), str(tmp_path / "b"))
  one, two = (content(tmp_path / name) for name in "ab")
  for name in ("eval.json", "metrics.jsonl"):
    one.pop(name), two.pop(name)  # one more evaluation, other shapes of a log
  assert one == two


# --- folders that live on ----------------------------------------------------


@pytest.mark.slow
def test_a_run_of_no_iteration_evaluates_what_it_begins_with(tmp_path):
  small = SCRIPTED | {"eval.banks": ("none",)}
  with driver.playing_the_script():
    experiment.run(tiny_config(iterations=0, **small), str(tmp_path))
    folder = metrics.RunFolder(tmp_path)
    (first,) = folder.read_json("eval.json", [])
    assert first["iteration"] == 0
    assert not folder.read("metrics.jsonl")
    experiment.run(tiny_config(iterations=1, **small), str(tmp_path))
  assert len(folder.read("metrics.jsonl")) == 1
  again, last = folder.read_json("eval.json", [])
  assert (again, last["iteration"]) == (first, 1)


def test_a_run_can_be_lengthened_and_keeps_its_manifests(tmp_path):
  folder = tmp_path / "run"
  with driver.playing_the_script():
    experiment.run(tiny_config(**SCRIPTED, iterations=1), str(folder))
    experiment.run(tiny_config(**SCRIPTED, iterations=2), str(folder))
  run = metrics.RunFolder(folder)
  assert [r["iteration"] for r in run.read("metrics.jsonl")] == [1, 2]
  cells = run.read_json("eval.json", [])
  assert sorted({c["iteration"] for c in cells}) == [0, 1, 2]
  manifest = run.read_json("manifest.json", {})
  assert len(manifest["earlier"]) == 1
  assert (
    manifest["earlier"][0]["config"]["sha256"] != (manifest["config"]["sha256"])
  )
  assert {"prompts", "template", "corpus", "index", "encoder"} <= set(
    manifest["hashes"]
  )


@pytest.fixture
def finished(scripted, tmp_path):
  """A copy of the scripted run, to damage; and its config."""
  folder = tmp_path / "run"
  shutil.copytree(scripted.path, folder)
  return folder, tiny_config(**SCRIPTED, iterations=3)


@pytest.mark.parametrize(
  ("damage", "says"),
  [
    (lambda w: shutil.rmtree(w / "checkpoints"), "3 iterations, but no check"),
    (lambda w: (w / "eval.json").write_text("{}"), "eval.json holds a dict"),
    (lambda w: (w / "config.json").write_text("[]"), "config.json is not JSON"),
    (
      lambda w: (w / "manifest.json").write_text("[1]"),
      "manifest.json holds a list",
    ),
    (
      lambda w: shutil.rmtree(w / "checkpoints" / "3" / "solver"),
      r"iteration 3.*damaged.*whole ones may be those of iterations \[2\]",
    ),
    (
      lambda w: shutil.rmtree(w / "checkpoints" / "3" / "record"),
      r"iteration 3.*damaged.*whole ones may be those of iterations \[2\]",
    ),
  ],
)
def test_a_damaged_folder_is_named_and_left_alone(finished, damage, says):
  folder, config = finished
  damage(folder)
  before = sorted(p.name for p in folder.rglob("*.jsonl*"))
  with driver.playing_the_script(), pytest.raises(ValueError, match=says):
    experiment.run(config, str(folder))
  assert sorted(p.name for p in folder.rglob("*.jsonl*")) == before


def test_fewer_iterations_than_finished_is_an_error(finished):
  folder, config = finished
  config.iterations = 2
  with (
    driver.playing_the_script(),
    pytest.raises(ValueError, match="iterations = 2, but 3 are finished"),
  ):
    experiment.run(config, str(folder))


def test_two_runs_in_one_folder_are_refused(finished):
  folder, config = finished
  with (
    driver.playing_the_script(),
    metrics.RunFolder(folder).lock(),
    pytest.raises(ValueError, match="Another process runs in"),
  ):
    experiment.run(config, str(folder))
  with driver.playing_the_script():
    experiment.run(config, str(folder))


def test_a_refused_start_leaves_no_folder(tmp_path):
  config = tiny_config(**{"solver.episode_tokens": 330})
  with pytest.raises(ValueError, match="too long"):
    experiment.run(config, str(tmp_path / "w"))
  assert not (tmp_path / "w").exists()


def test_a_disk_that_is_full_stops_the_run(finished, monkeypatch):
  folder, config = finished
  config.iterations = 4

  def full(*args, **more):
    raise ValueError("RESOURCE_EXHAUSTED: no space left on device")

  monkeypatch.setattr(experiment.checkpoint.Checkpoints, "save", full)
  with (
    driver.playing_the_script(),
    pytest.raises(types.Stopped, match="iteration 4 could not be written.*RES"),
  ):
    experiment.run(config, str(folder))


def test_a_checkpoint_without_room_is_not_begun(finished, monkeypatch):
  """Before Orbax: of several processes, all but one would wait in it."""
  folder, config = finished
  config.iterations = 4
  monkeypatch.setattr(
    experiment.checkpoint.shutil,
    "disk_usage",
    lambda path: SimpleNamespace(free=9),
  )
  monkeypatch.setattr(experiment.checkpoint.Checkpoints, "save", None)
  said = r"iteration 4 could not be written.* 0\.\d\d GB are needed, 0.00 GB"
  with (
    driver.playing_the_script(),
    pytest.raises(types.Stopped, match=said),
  ):
    experiment.run(config, str(folder))


@pytest.mark.slow
def test_force_new_goes_on_and_evaluates_anew(tmp_path):
  folder = tmp_path / "run"
  with driver.playing_the_script():
    experiment.run(tiny_config(**SCRIPTED, iterations=1), str(folder))
    other = tiny_config(**SCRIPTED, iterations=2, questions=2)
    with pytest.raises(ValueError, match="questions: 3 -> 2"):
      experiment.run(other, str(folder))
    experiment.run(other, str(folder), force_new=True)
  run = metrics.RunFolder(folder)
  assert {c["iteration"] for c in run.read_json("eval.json", [])} == {2}
  assert run.read_json("config.json.1", {})["questions"] == 3
  assert run.read_json("config.json", {})["questions"] == 2
  rows = run.read("metrics.jsonl")
  assert [row["challenger/proposals"] for row in rows] == [3, 2]


def test_a_restored_state_with_an_evaluation_question_is_refused(tmp_path):
  config = tiny_config()
  world, state = begin(config, tmp_path)
  question = world.texts.sets["tiny_eval"][0]
  again = dataclasses.replace(question, text=question.text.upper())
  pool = dataclasses.replace(state.pool, questions=(again,))
  failure = types.FailureRecord(
    "q", "s", again.text, ("a",), "b", (), (), 0, 1, 0.5, (), 1
  )
  born = dataclasses.replace(
    state.bank.records[0].skill, source_question=again.text
  )
  bank = dataclasses.replace(
    state.bank, records=(skill_bank.Record(born), *state.bank.records[1:])
  )
  for changes in ({"pool": pool}, {"queue": (failure,)}, {"bank": bank}):
    with pytest.raises(ValueError, match=f"{question.id}.*pool, queue or bank"):
      state_lib.check_contamination(
        dataclasses.replace(state, **changes), world.texts.sets
      )
  state_lib.check_contamination(state, world.texts.sets)


def test_eval_mode_tries_other_sets_and_leaves_the_runs_scores(
  scripted, tmp_path
):
  folder = tmp_path / "run"
  shutil.copytree(scripted.path, folder)
  config = tiny_config(**SCRIPTED, iterations=3, **{"eval.banks": ("none",)})
  config.eval.sets = {"again": config.eval.sets.tiny_eval}
  with driver.playing_the_script():
    experiment.evaluate_checkpoint(config, str(folder))
  run = metrics.RunFolder(folder)
  found = run.read_json("eval_00003.json", {})
  assert found["eval"]["banks"] == ["none"]
  assert [(c["set"], c["bank"]) for c in found["cells"]] == [("again", "none")]
  assert run.read_json("eval.json", []) == scripted.read_json("eval.json", [])


def test_a_posed_evaluation_question_is_out(tmp_path):
  """Nothing of an evaluation set is trained on, even if a policy writes it."""
  config = tiny_config(**SCRIPTED)
  tested = "Which thing is it that nobody of all the people here would know?"

  def posing(request, attempt, turn):
    if request.arm == "challenger" and turn:
      return f"<question>{tested}</question>"
    return driver.scripted.world_script(request, attempt, turn)

  texts = tools.read(config)
  question = dataclasses.replace(texts.sets["tiny_eval"][0], text=tested)
  texts = dataclasses.replace(texts, sets={"one": (question,)})
  with driver.playing_the_script():
    world = tools.assemble(config, texts)
  world.tools.engine._script = posing
  state, _ = state_lib.start(config, world)
  with silent() as progress:
    after, record = loop.iteration(state, world, config, progress)
  assert record.metrics["challenger/state/contaminated"] == 3
  assert record.metrics["challenger/state/valid"] == 0
  assert not after.pool.questions
  state_lib.check_contamination(after, texts.sets)


def test_evaluation_turns_are_those_of_eval(scripted):
  """Two turns more or less show in the searches of a policy that only asks."""

  def searching(request, attempt, turn):
    return f"<search>river {turn}</search>"

  config = tiny_config(**SCRIPTED | {"eval.turns": 4, "solver.turns": 2})
  texts = tools.read(config)
  with driver.playing_the_script():
    world = tools.assemble(config, texts)
  world.tools.engine._script = searching
  state, _ = state_lib.start(config, world)
  cells = loop.evaluation.evaluate(
    world.references["solver"],
    state.bank,
    texts.sets,
    world.tools,
    config,
    iteration=0,
  )
  assert {cell["searches"] for cell in cells} == {3.0}  # the last is not made
