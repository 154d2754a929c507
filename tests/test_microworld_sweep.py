"""The microworld's sweep and report, on runs that a stand-in writes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import microworld as sweep_lib
from benchmarks import microworld_report as report_lib
from benchmarks import paired
from sesa_jax import metrics

QUESTIONS = [f"Who made thing {i}?" for i in range(8)]
# Iterations of a run, and ids that each of them samples.
ITERATIONS, TOKENS = 4, {"sesa": 100, "ssp_paper": 30}


class MainJob:
  """Writes what the main job would leave, and notes how it was called."""

  def __init__(self):
    self.called, self.fails = [], False
    self.valid = {}  # by step of the warm start

  def __call__(self, words):
    flags = dict(word.lstrip("-").split("=", 1) for word in words)
    self.called.append(flags)
    if self.fails:
      raise RuntimeError("cut off")
    folder = metrics.RunFolder(flags["workdir"])
    if flags.get("mode") == "export":
      (path := Path(flags["out"])).mkdir(parents=True)
      (path / "step").write_text(flags["iteration"])
      return 1.0
    if flags.get("mode") == "sft":
      for step in (10, 20, 30):
        place = folder.path / f"checkpoints/{step}"
        place.mkdir(parents=True, exist_ok=True)
      return 10.0
    path = Path(flags.get("config.policy.path", "none")) / "step"
    step = int(path.read_text()) if path.exists() else 0
    variant = flags["config"].split(":")[1]
    folder.write_json(
      "manifest.json",
      dict(
        commit="0123456789",
        dirty=False,
        config=dict(name="micro", sha256="c"),
        hashes={"corpus": "d"},
      ),
    )
    folder.write_json("config.json", {"solver": {"group_size": 2}})
    iterations = int(flags.get("config.iterations", ITERATIONS))
    banks = eval(flags.get("config.eval.banks", "('none', 'final')"))
    hot = float(flags.get("config.eval.temperature", 0))
    done = folder.read("metrics.jsonl")
    if flags.get("mode") == "eval":
      cells = [self.cell(len(done), bank, hot) for bank in banks]
      name = f"eval_{len(done):05d}.json"
      folder.write_json(name, dict(eval={}, cells=cells))
      return 2.0
    tokens = TOKENS.get(variant, 50)
    rows = [
      {
        "iteration": i,
        "challenger/valid_rate": self.valid.get(step, i / 8),
        "challenger/entropy/mean": 2.0,
        "challenger/engine/tokens/sampled": tokens // 2,
        "solver/engine/tokens/sampled": tokens - tokens // 2,
      }
      for i in range(len(done) + 1, iterations + 1)
    ]
    folder.append("metrics.jsonl", rows)
    folder.append("questions.jsonl", [dict(iteration=1, success=0.5)])
    steps = (0, iterations) if iterations else (0,)
    cells = [self.cell(i, bank, hot) for i in steps for bank in banks]
    folder.write_json("eval.json", cells)
    return 10.0

  def cell(self, iteration, bank, temperature):
    """Half of the questions right, and with iterations one more each."""
    right = 2 + iteration + (bank == "final")
    predictions = [
      dict(
        id=f"w/held_out_2/{i}",
        question=question,
        prediction="x" if i < 7 else None,
        verdict="right" if i < right else "wrong" if i < 7 else "unknown",
        searches=i,
        found=i > 0,
      )
      for i, question in enumerate(QUESTIONS)
    ]
    return dict(
      iteration=iteration,
      set="held_out_2",
      bank=bank,
      n=8,
      em=right / 8,
      em_interval=[0, 1],
      temperature=temperature,
      predictions=predictions,
    )


@pytest.fixture
def job():
  return MainJob()


@pytest.fixture
def fresh(tmp_path, job):
  return sweep_lib.Sweep(
    config="c.py",
    work=tmp_path / "work",
    results=tmp_path / "results",
    flags=("--config.questions=3",),
    seeds=(7, 8),
    launch=job,
    gate={},
  )


@pytest.fixture
def sweep(fresh, job):
  """With the cells that all others need."""
  for seed in fresh.seeds:
    fresh.make("start", seed)
  job.called.clear()
  return fresh


def made(sweep, name, seed):
  return json.loads(sweep.result(name, seed).read_text())


def test_a_cell_is_a_run_and_two_evaluations(sweep, job):
  assert sweep.make("invalid_mask", 7)
  train, greedy, sampled = job.called
  assert train["config"] == greedy["config"] == "c.py:sesa"
  assert train["workdir"] == sampled["workdir"]
  assert "mode" not in train
  for flags in job.called:
    assert flags["config.seed"] == "7"
    assert flags["config.questions"] == "3"
    assert flags["config.challenger.invalid"] == "mask"
  assert [f["mode"] for f in (greedy, sampled)] == ["eval"] * 2
  hot = [float(f["config.eval.temperature"]) for f in (greedy, sampled)]
  assert hot == [0.0, 1.0]
  assert eval(greedy["config.eval.banks"]) == sweep_lib.BANKS
  cell = made(sweep, "invalid_mask", 7)
  assert (cell["arm"], cell["seed"]) == ("invalid_mask", 7)
  assert cell["commit"] == "0123456789"
  assert cell["config"]["sha256"] == "c"
  assert cell["iterations"] == 4
  assert cell["cpu_seconds"] == {"train": 10, "greedy": 2, "sampled": 2}
  assert (cell["traps"], cell["hops"]) == ("h" * 8, "2" * 8)
  assert set(cell["evaluations"]["greedy"]) == set(sweep_lib.BANKS)
  assert cell["evaluations"]["sampled"]["none"] == {
    "answered": "11111110",
    "searches": "01234567",
    "found": "01111111",
    "right": "11111100",
  }
  assert cell["evaluations"]["greedy"]["final"]["right"] == "11111110"
  assert cell["panels"]["valid_rate"]["valid"] == [
    [1, 2, 3, 4],
    [0.125, 0.25, 0.375, 0.5],
  ]
  assert cell["panels"]["success"] == [[0, 1, 0]]


def test_a_world_s_curve_asks_fewer_questions_than_its_end(sweep, job):
  sweep_lib.dataclasses.replace(sweep, config="x/microworld.py").make("sesa", 7)
  train, greedy, sampled = job.called
  for traps in ("taught_1", "taught_2", "held_out_1", "held_out_2"):
    size = f"config.eval.sets.{traps}.size"
    assert (train[size], size in greedy, size in sampled) == (
      "50",
      False,
      False,
    )


def test_a_second_start_does_only_what_is_left(sweep, job):
  real, times = job.cell, []

  def cut_off(*args):
    times.append(args)
    if len(times) == 5:  # in the second evaluation
      raise RuntimeError("cut off")
    return real(*args)

  job.cell = cut_off
  job.fails = True
  with pytest.raises(RuntimeError):
    sweep.make("sesa", 7)
  assert not sweep.result("sesa", 7).exists()
  job.fails = False
  with pytest.raises(RuntimeError):
    sweep.make("sesa", 7)
  assert not sweep.result("sesa", 7).exists()
  job.cell = real
  calls = len(job.called)
  assert sweep.make("sesa", 7)
  assert all(f["mode"] == "eval" for f in job.called[calls:])
  calls = len(job.called)
  assert not sweep.make("sesa", 7)
  assert len(job.called) == calls


def test_the_start_is_evaluated_without_training(fresh, job):
  sweep = fresh
  with pytest.raises(ValueError, match="needs start of seed 7 first"):
    sweep.make("sesa", 7)
  sweep.make("start", 7)
  posed, *evaluated = job.called
  # What the challenger poses in the one iteration is its own from before it.
  assert posed["config.iterations"] == "1"
  assert [f["config.iterations"] for f in evaluated] == ["0", "0"]
  assert len({f["workdir"] for f in job.called}) == 3
  for flags in evaluated:
    assert flags["config.eval.other"] == "mined:microworld:7/right.jsonl"
  cell = made(sweep, "start", 7)
  assert set(cell["evaluations"]["sampled"]) == {*sweep_lib.BANKS, "other"}
  assert cell["evaluations"]["greedy"]["none"]["right"] == "11000000"


def test_nothing_is_trained_from_a_warm_start_out_of_the_gate(fresh, job):
  fresh.make("start", 7)
  # By hand: 1/8 of the proposals valid, 2 of 8 two-hop questions right.
  assert sweep_lib.standing(made(fresh, "start", 7)) == {
    "valid proposals": 0.125,
    "two hops, greedy": 0.25,
    "two hops, sampled": 0.25,
  }
  calls = len(job.called)
  strict = sweep_lib.dataclasses.replace(fresh, gate=sweep_lib.GATE)
  with pytest.raises(ValueError, match="valid proposals 0.12, wanted 0.5"):
    strict.make("sesa", 7)
  assert len(job.called) == calls
  bounds = sweep_lib.GATE | {"valid proposals": (0.1, 0.2)}
  assert sweep_lib.dataclasses.replace(fresh, gate=bounds).make("sesa", 7)
  bounds |= {"two hops, sampled": (0.3, 0.5)}
  with pytest.raises(ValueError, match="two hops, sampled"):
    sweep_lib.dataclasses.replace(fresh, gate=bounds).make("ssp", 7)
  fresh.make("ssp", 7)
  with pytest.raises(ValueError, match="valid proposals 0.12, wanted 0.5"):
    strict.make("ssp_matched", 7)
  for name in bounds:  # on the other side of what was found
    with pytest.raises(ValueError, match=f"{name} 0.[12]., wanted 0.0 to 0.1"):
      sweep_lib.check_gate(made(fresh, "start", 7), {name: (0.0, 0.1)})


def test_without_a_gate_any_start_will_do(fresh):
  """Also one that has posed nothing, or whose questions are of one hop."""
  fresh.make("start", 7)
  cell = made(fresh, "start", 7) | {"hops": "1" * 8, "panels": {}}
  sweep_lib.check_gate(cell, {})


def test_the_matched_run_samples_as_much(sweep, job):
  with pytest.raises(ValueError, match="needs sesa of seed 7 first"):
    sweep.make("ssp_matched", 7)
  for name in ("sesa", "ssp", "ssp_matched"):
    sweep.make(name, 7)
  wanted = made(sweep, "sesa", 7)["sampled_tokens"]
  cell = made(sweep, "ssp_matched", 7)
  assert wanted == 400
  assert wanted <= cell["sampled_tokens"] < wanted + TOKENS["ssp_paper"]
  assert made(sweep, "ssp", 7)["sampled_tokens"] == 120
  steps = [step for step in cell["cpu_seconds"] if step.startswith("train")]
  assert steps == ["train to 12", "train to 13", "train to 14"]
  assert set(cell["evaluations"]["greedy"]) == {"none"}


def test_a_matched_run_that_stands_still_is_not_tried_for_ever(sweep, job):
  for name in ("sesa", "ssp"):
    sweep.make(name, 7)
  idle = sweep_lib.dataclasses.replace(sweep, launch=lambda words: 1.0)
  with pytest.raises(RuntimeError, match="goes on no more: remove its folder"):
    idle.make("ssp_matched", 7)


def test_another_worlds_bank(sweep, job):
  sweep.make("sesa", 7)
  with pytest.raises(ValueError, match="sesa-8/run/skills.jsonl is missing"):
    sweep.make("other_bank", 7)
  alone = sweep_lib.dataclasses.replace(sweep, seeds=(7,))
  with pytest.raises(ValueError, match="name two seeds or more"):
    alone.make("other_bank", 7)
  sweep.make("sesa", 8)
  for seed in (7, 8):
    bank = sweep.folder("sesa", seed) / "run/skills.jsonl"
    bank.write_text("")
  sweep.make("other_bank", 7)
  assert made(sweep, "other_bank", 7)["notes"] == {"bank of": 8}
  other = sweep.folder("sesa", 8) / "run/skills.jsonl"
  for flags in job.called[-2:]:
    assert flags["config.eval.other"] == f"mined:{other}"
    assert flags["workdir"] == str(sweep.folder("sesa", 7) / "run")
    assert flags["config"] == "c.py:sesa"
  assert set(made(sweep, "other_bank", 7)["evaluations"]["greedy"]) == {"other"}
  sweep.make("right_bank", 7)
  assert {f["config.eval.other"] for f in job.called[-2:]} == {
    "mined:microworld:7/right.jsonl"
  }


def test_the_bank_alone_is_what_the_warm_start_makes_of_it(sweep, job):
  sweep.make("sesa", 7)
  with pytest.raises(ValueError, match=r"run/skills.jsonl is missing"):
    sweep.make("start_bank", 7)
  bank = sweep.folder("sesa", 7) / "run/skills.jsonl"
  bank.write_text("")
  job.called.clear()
  sweep.make("start_bank", 7)
  assert [f["config.eval.temperature"] for f in job.called] == ["0.0", "1.0"]
  for flags in job.called:
    assert flags["config.iterations"] == "0"
    assert flags["config.eval.other"] == f"mined:{bank}"
    assert flags["config.eval.banks"] == "('other',)"
  assert len({f["workdir"] for f in job.called}) == 2
  cell = made(sweep, "start_bank", 7)
  assert cell["iterations"] == 0
  assert cell["evaluations"]["greedy"]["other"]["right"] == "11000000"


def test_a_penalty_is_another_than_the_one_by_default(sweep, job):
  sweep.make("invalid_penalty", 7)
  assert job.called[0]["config.challenger.invalid"] == "penalty"
  assert job.called[0]["config.challenger.invalid_penalty"] == "1.0"


@pytest.fixture
def world(fresh, job, tmp_path, monkeypatch):
  """A sweep of worlds whose files lie in the folder of the test."""

  def locate(path, exists=True):
    return tmp_path / path.removeprefix("microworld:").replace("/", "-")

  monkeypatch.setattr(sweep_lib.config_lib, "locate", locate)
  return sweep_lib.dataclasses.replace(fresh, config="x/microworld.py")


def modes(job):
  return [flags.get("mode") for flags in job.called]


def test_the_warm_start_is_made_once(world, job, tmp_path):
  world.make("start", 7)
  first, *others = job.called
  folder = world.folder("warm", 7)
  assert first == {
    "mode": "sft",
    "config": "x/microworld.py:warm_start",
    "workdir": str(folder / "run"),
    "config.seed": "7",
    "episodes": str(tmp_path / "7-episodes.jsonl"),
    "out": str(folder / "policy"),
  }
  # Without a gate the last of its checkpoints will do.
  assert modes(job)[1:] == ["export", None, None, None, "export"] + [None] * 3
  trial, final = (flags for flags in others if "mode" in flags)
  assert final == trial | {"out": str(tmp_path / "7-policy")}
  assert trial == {
    "mode": "export",
    "workdir": str(folder / "run"),
    "iteration": "30",
    "out": str(folder / "step 30/policy"),
  }
  for flags in job.called[2:5]:
    assert flags["config.policy.path"] == str(folder / "step 30/policy")
    assert flags["config.eval.banks"] == "('none',)"
  assert len({flags["workdir"] for flags in others if "mode" not in flags}) == 6
  for flags in others[-3:]:
    assert flags["config"] == "x/microworld.py:sesa"
    assert "config.policy.path" not in flags
  cell = made(world, "start", 7)
  steps = ("warm start", "pose", "greedy", "sampled")
  taken = dict.fromkeys(steps, 10)
  assert cell["cpu_seconds"] == taken
  assert cell["notes"] == {"step": 30, "of": 30, "tried": {"30": {}}}
  (tmp_path / "8-policy").mkdir()
  job.called.clear()
  world.make("start", 8)
  assert modes(job) == [None] * 3
  assert made(world, "start", 8)["notes"] == {}


def test_the_last_checkpoint_within_the_gate_is_taken(world, job, capsys):
  """Of 10, 20 and 30 steps: the stand-in's questions are valid by number."""
  bounds = {"valid proposals": (0.2, 0.3), "two hops, sampled": (0.2, 0.3)}
  gated = sweep_lib.dataclasses.replace(world, gate=bounds)
  job.valid = {30: 0.5, 20: 0.25, 10: 0.25}
  gated.make("start", 7)
  out = [flags for flags in job.called if flags.get("mode") == "export"]
  assert [flags["iteration"] for flags in out] == ["30", "20", "20"]
  said = capsys.readouterr().out
  assert "After step 30: The warm start of seed 7: valid proposals 0.50" in said
  notes = made(gated, "start", 7)["notes"]
  tried = notes.pop("tried")
  assert notes == {"step": 20, "of": 30}
  assert {k: v["valid proposals"] for k, v in tried.items()} == {
    "30": 0.5,
    "20": 0.25,
  }
  assert tried["20"]["two hops, greedy"] == 0.25


def test_where_none_is_within_the_gate_the_last_one_is_taken(world, job):
  gated = sweep_lib.dataclasses.replace(world, gate={"valid proposals": (1, 1)})
  gated.make("start", 7)
  out = [flags for flags in job.called if flags.get("mode") == "export"]
  assert [flags["iteration"] for flags in out] == ["30", "20", "10", "30"]
  notes = made(gated, "start", 7)["notes"]
  assert (notes["step"], notes["of"]) == (30, 30)
  assert set(notes["tried"]) == {"30", "20", "10"}
  with pytest.raises(ValueError, match="valid proposals 0.12, wanted 1 to 1"):
    gated.make("sesa", 7)


def test_a_choice_that_was_cut_off_goes_on(world, job, monkeypatch):
  gated = sweep_lib.dataclasses.replace(world, gate={"valid proposals": (1, 1)})
  export, calls = sweep_lib.Sweep._export, []

  def cut(self, warm, step, out):
    calls.append(step)
    if len(calls) == 3:
      raise RuntimeError("cut off")
    export(self, warm, step, out)

  monkeypatch.setattr(sweep_lib.Sweep, "_export", cut)
  with pytest.raises(RuntimeError, match="cut off"):
    gated.make("start", 7)
  before = len(job.called)
  gated.make("start", 7)
  # Imitation has ended, and two checkpoints are seen: the third is left.
  again = job.called[before:]
  trials = [f for f in again if "config.policy.path" in f]
  assert len(trials) == 3
  assert all("step 10" in flags["config.policy.path"] for flags in trials)


def test_another_policy_is_measured_anew(world, job, tmp_path):
  """What was measured of the one before is of no use."""
  (tmp_path / "7-policy").mkdir()
  world.make("start", 7)
  assert modes(job) == [None] * 3
  (tmp_path / "7-policy").rmdir()
  world.result("start", 7).unlink()
  # A run that is there would be resumed, and so not be played.
  (left := world.folder("start", 7) / "run/left").touch()
  job.called.clear()
  world.make("start", 7)
  assert modes(job) == ["sft", "export", *[None] * 3, "export", *[None] * 3]
  assert made(world, "start", 7)["notes"]["step"] == 30
  assert not left.exists()
  # A warm start that has ended is asked whether it still fits its episodes.
  sweep_lib.shutil.rmtree(tmp_path / "7-policy")
  world.result("start", 7).unlink()
  job.called.clear()
  world.make("start", 7)
  assert modes(job) == ["sft", "export", *[None] * 3]
  # One that was removed is made, and its checkpoints are tried, again.
  sweep_lib.shutil.rmtree(tmp_path / "7-policy")
  sweep_lib.shutil.rmtree(world.folder("warm", 7) / "run")
  world.result("start", 7).unlink()
  job.called.clear()
  world.make("start", 7)
  assert modes(job) == ["sft", "export", *[None] * 3, "export", *[None] * 3]


def test_kinds_of_questions():
  sets = ("taught_1", "held_out_2", "held_out_1", "taught", "nq")
  found = sweep_lib.kinds([(name, "id") for name in sets])
  assert found == {"traps": "thh--", "hops": "12111"}


def test_order_puts_what_needs_others_last():
  cells = sweep_lib.order(tuple(sweep_lib.ARMS), (1, 2))
  for place, (name, seed) in enumerate(cells):
    needs = sweep_lib.ARMS[name].needs
    for needed in needs if name == "start" else (*needs, "start"):
      assert (needed, seed) in cells[:place]
  last = {"other_bank", "right_bank", "start_bank"}
  assert {name for name, _ in cells[-6:]} == last


def test_unknown_arms_and_flags(capsys):
  for flags, said in (
    (["--arms=ses"], "arms are start, sesa"),
    (["--work=w", "--wrok=w"], "unknown: --wrok=w"),
    (["--seeds=abc"], "'abc' is no list like 100,101"),
    (["--seeds="], "'' is no list like 100,101"),
    (["--config.seed=7"], "--config.seed=7: seeds and banks are the cells'"),
    (["--report", "--results=nowhere"], "nowhere has no finished cell"),
  ):
    with pytest.raises(SystemExit):
      sweep_lib.main(flags)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"arm": "start"}'])
def test_a_damaged_cell_is_named(sweep, text, tmp_path):
  sweep.result("start", 7).write_text(text)
  strict = sweep_lib.dataclasses.replace(sweep, gate=sweep_lib.GATE)
  for arm in ("sesa", "start"):
    with pytest.raises(ValueError, match=r"start-7.json is no finished cell"):
      strict.make(arm, 7)
  with pytest.raises(ValueError, match=r"start-7.json is no finished cell"):
    report_lib.report(sweep.results)


def test_a_cell_that_cannot_be_made_stops_no_other(tmp_path, capsys):
  flags = ["--config=c.py", "--seeds=7", "--arms=sesa,ssp"]
  with pytest.raises(SystemExit) as stopped:
    sweep_lib.main([*flags, f"--work={tmp_path}", f"--results={tmp_path}"])
  assert stopped.value.code == 1
  said = capsys.readouterr().out.splitlines()
  assert [line.split(":")[0] for line in said] == ["sesa 7", "ssp 7"]


# --- the report --------------------------------------------------------------


def packed(answered, searches, found, right):
  return dict(answered=answered, searches=searches, found=found, right=right)


def cell(arm, seed, evaluations, **more):
  return dict(
    arm=arm,
    seed=seed,
    commit="abcdef0123",
    dirty=arm == "sesa",
    questions="a hash",
    generator="another",
    traps="tthh",
    hops="1212",
    evaluations={how: evaluations for how in ("greedy", "sampled")},
    curve=[
      dict(iteration=i, set=name, bank="none", n=n, em=em)
      for i, name, n, em in (
        (0, "x", 10, 0.0), (0, "y", 30, 0.4),
        (8, "x", 10, 1.0), (8, "y", 30, 0.4),
      )
    ],
    panels={
      "valid_rate": {"valid": [[1, 2, 3], [0.2, 0.5, 0.9]]},
      "entropy": {"challenger": [[1, 2, 3, 4], [3.0, None, 2.0, 1.0]]},
      "success": [[0.5, 0.5, 0.0], [None] * 3, [0.25, 0.25, 0.5]],
      "bank": {
        "active": [[0, 1, 2, 3], [6.0, 6.0, 9.0, 8.0]],
        "active, null": [[0, 1, 2, 3], [6.0, 6.0, 9.0, 8.64]],
      },
    },
    cpu_seconds={"train": 10.0, "greedy": 5.0},
    iterations=3,
    sampled_tokens=1000,
  ) | more  # fmt: skip


START = {
  "none": packed("1110", "1110", "1100", "1000"),
  "final": packed("1110", "1110", "1100", "1100"),
}
SESA = {
  "none": packed("1111", "1212", "1110", "1100"),
  "final": packed("1111", "1212", "1111", "1111"),
  "placebo": packed("1111", "1212", "1110", "1100"),
  "scrambled": packed("1111", "1212", "1110", "1110"),
}
SSP = {"none": packed("1111", "1212", "1110", "0100")}


@pytest.fixture
def finished(tmp_path):
  for seed in (1, 2):
    for arm, found in (("start", START), ("sesa", SESA), ("ssp", SSP)):
      path = tmp_path / f"{arm}-{seed}.json"
      # SSP's accuracy is 20 % all through its training, in the other world 40.
      points = cell(arm, seed, found)["curve"]
      flat = [dict(point, em=0.2 * seed) for point in points]
      more = {"curve": flat} if arm == "ssp" else {}
      if (arm, seed) == ("start", 2):
        more = {"notes": {"step": 20, "of": 30}}
      path.write_text(json.dumps(cell(arm, seed, found, **more)))
  return tmp_path


def rows(text, title):
  """The rows of a table, by their first cells."""
  body = text.split(f"### {title}")[1].split("###")[0]
  lines = [line for line in body.splitlines() if line.startswith("|")][2:]
  return [[c.strip() for c in line.strip("|").split("|")] for line in lines]


def test_report_by_hand(finished):
  text = report_lib.report(finished)
  # Questions are taught 1 hop (right), taught 2 hops, held out 1 and 2 hops.
  table = rows(text, "The warm start")
  assert [row[1] for row in table] == ["-", "-", "20 of 30", "20 of 30"]
  starts = {(row[0], *row[2:4]): row[4:] for row in table}
  shares = ["100.0 / 0.0", "0.0 / 0.0"]
  assert starts["2", "20.0", "none"] == shares + shares
  assert starts["2", "20.0", "final"] == ["100.0 / 0.0"] * 4
  gains = {tuple(row[:3]): row[3:] for row in rows(text, "What training")}
  assert gains["sesa", "none", "greedy"][0] == "25.0 to 50.0"
  assert gains["sesa", "none", "greedy"][1].startswith("+25.0 [")
  taught, held_out = gains["sesa", "none", "greedy"][2:4]
  assert taught == "+50.0 [+0.0, +100.0]"
  assert held_out == "+0.0 [+0.0, +0.0]"
  # 1 of 3 answers right before, 2 of 4 after.
  assert gains["sesa", "none", "T = 1"][4].startswith("+16.7 [")
  assert gains["sesa", "final", "T = 1"][0] == "50.0 to 100.0"
  assert gains["ssp", "none", "greedy"][1].startswith("+0.0 [")
  assert gains["sesa", "final", "greedy"][5:] == [
    "+50.0 [+50.0, +50.0]",
    "+50 +50",
  ]
  pairs = {tuple(row[:2]): row[2:] for row in rows(text, "Paired")}
  everything, taught, held_out, students, seeds = pairs["On - Off", "T = 1"]
  assert everything.startswith("+50.0 [")
  assert taught == "+0.0 [+0.0, +0.0]"
  assert held_out == "+100.0 [+100.0, +100.0]"
  assert students == "+50.0 [+50.0, +50.0]"
  assert seeds == "+50 +50"
  assert pairs["Off - SSP", "greedy"][0].startswith("+25.0 [")
  assert pairs["final - scrambled", "greedy"][0].startswith("+25.0 [")
  assert ("On - without priming", "greedy") not in pairs
  areas = {tuple(row[:2]): row[2:] for row in rows(text, "Mean accuracy")}
  # (0 + 12) / 40 at first, (10 + 12) / 40 at the end.
  assert areas["sesa", "none"] == ["42.5", "42.5 42.5", ""]
  # 42.5 less 20 and less 40: s = 20 / sqrt(2), t of one degree 12.706.
  less = "-12.5 [-139.6, +114.6]"
  assert areas["ssp", "none"] == ["30.0", "20.0 40.0", less]
  challenger = {row[0]: row[1:] for row in rows(text, "The challenger")}
  assert challenger["sesa"] == ["20.0 to 90.0", "3.00 to 1.00", "50.0 to 25.0"]
  posed = {tuple(row[:2]): row[2:] for row in rows(text, "Questions by")}
  assert posed["ssp", "first"] == ["50.0", "50.0", "0.0"]
  assert posed["ssp", "last"] == ["25.0", "25.0", "50.0"]
  assert "| p = 0 | p = 0.5 | p = 1 |" in text
  active = {tuple(row[:2]): row[2:] for row in rows(text, "Active skills")}
  assert active["sesa", "2"] == ["6", "8", "8.6"]
  costs = {row[0]: row[1:] for row in rows(text, "What it cost")}
  assert costs["sesa"] == ["1, 2", "3", "1,000", "15", "abcdef01+"]
  assert costs["ssp"][-1] == "abcdef01"


# What the words of a difference mean: an arm, with a bank.
MEANT = {
  "On": ("sesa", "final"),
  "Off": ("sesa", "none"),
  "SSP": ("ssp", "none"),
  "SSP, same tokens": ("ssp_matched", "none"),
  "without priming": ("no_priming", "final"),
  "without frontier": ("no_frontier", "final"),
  "without distillation": ("no_distillation", "final"),
  "On with contrast": ("contrast", "final"),
  "trained on placebo, Off": ("placebo", "none"),
  "final": ("sesa", "final"),
  "placebo": ("sesa", "placebo"),
  "scrambled": ("sesa", "scrambled"),
  "the true rules": ("right_bank", "other"),
  "another world's": ("other_bank", "other"),
  "the warm start": ("start", "final"),
  "warm start with its bank": ("start_bank", "other"),
}


@pytest.mark.slow
def test_the_tables_of_the_docs_are_those_of_the_cells():
  tables = (sweep_lib.ROOT / "docs/microworld_tables.md").read_text("utf-8")
  assert tables == report_lib.report(sweep_lib.RESULTS) + "\n"


def test_a_difference_is_what_its_name_says():
  for said, before, after in report_lib.PAIRS:
    assert [after, before] == [MEANT[words] for words in said.split(" - ")]
    for arm, bank in (before, after):
      assert bank in sweep_lib.ARMS[arm].banks


def test_the_split_of_the_report_adds_up(finished):
  text = report_lib.report(finished)
  (row,) = [r for r in rows(text, "The gain") if r[:2] == ["sesa", "none"]]
  shares = [float(re.match(r"[+-][\d.]+", text)[0]) for text in row[2:]]
  assert sum(shares) == pytest.approx(25, abs=0.3)
  cells = report_lib.read(finished)
  (table,) = [
    t
    for seed, t in report_lib.joined(
      cells, ("start", "none"), ("sesa", "none"), "sampled"
    ).items()
    if seed == 1
  ]
  # Question b takes two hops: one search is not enough before.
  assert table[:, :5].tolist() == [
    [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0],
  ]  # fmt: skip
  assert table[:, 5:].sum(0).tolist() == [4, 4, 3, 2, 2]
  found = paired.split(table.mean(0)[None])[0]
  np.testing.assert_allclose(100 * found, shares, atol=0.06)


def test_what_begins_without_skills_gains_on_none(finished):
  for seed in (1, 2):
    path = finished / f"no_priming-{seed}.json"
    path.write_text(json.dumps(cell("no_priming", seed, SESA)))
  found = rows(report_lib.report(finished), "What training")
  gains = {tuple(row[:3]): row[3] for row in found}
  assert gains["no_priming", "final", "greedy"] == "25.0 to 100.0"
  assert gains["sesa", "final", "greedy"] == "50.0 to 100.0"
  assert gains["no_priming", "none", "greedy"] == "25.0 to 50.0"


def test_a_gain_among_no_answers_is_none(finished):
  silent = {bank: packed(*["0000"] * 4) for bank in START}
  for seed in (1, 2):
    path = finished / f"start-{seed}.json"
    path.write_text(json.dumps(cell("start", seed, silent)))
  gains = rows(report_lib.report(finished), "What training")
  assert {row[7] for row in gains} == {"-"}
  assert "nan" not in report_lib.report(finished)


@pytest.mark.parametrize("of_the_world", ["questions", "generator"])
def test_other_questions_are_no_pair(finished, of_the_world):
  other = cell("ssp", 1, SSP, **{of_the_world: "changed"})
  (finished / "ssp-1.json").write_text(json.dumps(other))
  with pytest.raises(ValueError, match="other questions"):
    report_lib.report(finished)


def test_no_cells(tmp_path):
  with pytest.raises(ValueError, match="no finished cell"):
    report_lib.report(tmp_path)
