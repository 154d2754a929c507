"""Bands that say whether a run learned, and the demo of one that does."""

import io
import json
import re
import subprocess
import sys

import absl.flags
import numpy as np
import pytest
import rich.console
from ml_collections import config_flags

from benchmarks import demo_learn, learn
from configs import microworld as setting
from sesa_jax import metrics
from tests.test_show import make_row


def rows(scale=1.0):
  return [
    {
      "iteration": i,
      "solver/reward/mean": scale * i / 10,
      "challenger/valid_rate": 0.5,
      **({"solver/kl/mean": 0.25} if i < 6 else {}),
    }
    for i in range(1, 8)
  ]


def evaluated(before, after):
  return [
    dict(iteration=i, set=name, bank=bank, em=em)
    for i, ems in ((0, before), (3, None), (7, after))
    if ems
    for (name, bank), em in zip(
      (("a", "none"), ("b", "none"), ("a", "final")), ems, strict=True
    )
  ]


def test_a_run_is_measured_by_hand(tmp_path):
  folder = metrics.RunFolder(tmp_path)
  folder.append("metrics.jsonl", rows())
  folder.write_json("eval.json", evaluated((0.25, 0.75, 1.0), (0.5, 1.0, 0.0)))
  found = learn.measure(tmp_path)
  # The last third of 7 iterations is 5, 6 and 7.
  assert found == pytest.approx(
    {
      "accuracy without skills, after": 0.75,
      "accuracy without skills, gained": 0.25,
      "accuracy with skills, after": 0.0,
      "accuracy with skills, gained": -1.0,
      "solver's reward": 0.6,
      "valid proposals": 0.5,
      "solver's KL": 0.25,
    }
  )
  assert learn.measure(tmp_path / "absent") == {}


def test_bands_by_hand():
  """Of 1, 2, 3: mean 2, deviation 1, t(2, .95) = 2.91999 for one number."""
  runs = [{"x": float(x)} for x in (1, 2, 3)]
  half = 2.919986 * (4 / 3) ** 0.5
  assert learn.bands(runs)["x"] == pytest.approx((2 - half, 2 + half))
  # Of two numbers each has half of the tail: t(2, .975) = 4.302653.
  wide = [run | {"y": 0.0} for run in runs]
  half = 4.302653 * (4 / 3) ** 0.5
  assert learn.bands(wide)["x"] == pytest.approx((2 - half, 2 + half))
  assert learn.bands(wide)["y"] == (0, 0)
  with pytest.raises(ValueError, match="3 or more"):
    learn.bands(runs[:2])


def test_rounding_has_room_for_other_machines():
  runs = [{"x": float(x), "engine against learner": x / 10} for x in (1, 2, 3)]
  found = learn.bands(runs)
  assert found["engine against learner"] == pytest.approx((0.0, 3.0))
  # The others' band is that of one number.
  assert found["x"] == learn.bands([{"x": run["x"]} for run in runs])["x"]
  recorded = learn.read(learn.BANDS)
  assert recorded["bands"]["engine against learner"][1] < 1e-4


def test_the_bands_are_those_of_the_recorded_runs():
  recorded = json.loads(learn.BANDS.read_text())
  found = learn.bands(recorded["runs"])
  assert found.keys() == recorded["bands"].keys()
  for name, band in found.items():
    assert recorded["bands"][name] == pytest.approx(list(band))
  assert learn.false_alarms(recorded["runs"]) <= 1


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (["--record=abc"], "'abc' is no list"),
    (["--record=1,2"], "fewer than 3 seeds"),
    (["--world=-4"], "-4 is no seed: they are 0 or more"),
    (["--foo=3"], "unknown: --foo=3"),
  ],
)
def test_bad_flags_are_told_before_anything_is_made(flags, said, capsys):
  job = Job(1)
  with pytest.raises(SystemExit):
    learn.main(flags, job)
  assert said in capsys.readouterr().err
  assert not job.called


@pytest.mark.parametrize("flag", ["--foo=3", "--seed=-1"])
def test_the_demo_takes_no_flag_that_it_does_not_know(flag, capsys):
  with pytest.raises(SystemExit):
    demo_learn.main([flag])
  assert flag.removeprefix("--seed=") in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"bands": {}}'])
def test_damaged_bands_are_told_before_anything_is_made(text, tmp_path, capsys):
  path, job = tmp_path / "bands.json", Job(1)
  path.write_text(text)
  assert learn.main([f"--bands={path}"], job) == 2
  assert "bands.json holds no bands" in capsys.readouterr().out
  assert not job.called


def test_good_runs_rarely_fail():
  rng = np.random.default_rng(0)
  failed = 0
  for _ in range(300):
    *runs, one = ({k: rng.normal() for k in "abcdefgh"} for _ in range(11))
    failed += bool(learn.outside(one, learn.bands(runs)))
  assert 10 < failed < 45  # a tenth of 300, or a little fewer
  runs = [{"x": x} for x in (1.0, 1.1, 0.9, 1.05, 9.0)]
  assert learn.false_alarms(runs) == 1


def test_a_run_stays_in_its_world_whatever_its_seed(monkeypatch):
  """All that a config takes from its own world is taken from that one."""
  config = setting.get_config()
  config.unlock()
  config.seed = 9
  own = len(re.findall("microworld:9/", str(config.to_dict())))
  flags = learn.pinned(3)
  assert len(flags) == own > 6
  assert all("microworld:3/" in flag for flag in flags)
  assert "--config.policy.path=microworld:3/policy" in flags
  # Flags that a run takes, whatever seed it has besides.
  given, words = absl.flags.FlagValues(), ["run", "--config.seed=5", *flags]
  monkeypatch.setattr(sys, "argv", words)  # where overrides are looked for
  config_flags.DEFINE_config_dict("config", config, flag_values=given)
  given(words)
  known = str(given.config.copy_and_resolve_references().to_dict())
  assert set(re.findall(r"microworld:(\d+)/", known)) == {"3"}
  assert given.config.seed == 5


def test_what_is_missing_or_not_a_number_is_outside():
  known = {"x": (0.0, 1.0), "y": (0.0, 1.0), "z": (0.0, 1.0)}
  found = learn.outside({"x": 1.0, "y": float("nan"), "w": 7.0}, known)
  assert found == ["y", "z"]


class Job:
  """Leaves a run whose rewards grow with the seed."""

  def __init__(self, scale):
    self.scale, self.called = scale, []

  def __call__(self, words):
    self.called.append(words)
    flags = dict(word.lstrip("-").split("=", 1) for word in words)
    folder = metrics.RunFolder(flags["workdir"])
    if not folder.read("metrics.jsonl"):
      scale = self.scale + int(flags["config.seed"]) / 100
      folder.append("metrics.jsonl", rows(scale))
    return 1.0


def test_recording_and_judging(tmp_path, capsys):
  # Of no world, so that none is made.
  given = [f"--bands={tmp_path / 'bands.json'}", "--config=c.py"]
  assert learn.main(given, Job(1)) == 2
  assert "holds no bands" in capsys.readouterr().out
  job = Job(1)
  more = ["--record=0,1,2,3", "--config.iterations=7"]
  where = f"--workdir={tmp_path / 'recorded'}"
  assert learn.main([*given, where, *more], job) == 0
  assert len(job.called) == 4
  assert all(words[-1] == "--config.iterations=7" for words in job.called)
  kept = json.loads((tmp_path / "bands.json").read_text())
  assert kept["seeds"] == [0, 1, 2, 3]
  assert kept["flags"] == ["--config.iterations=7"]
  for scale, code, said in ((1.01, 0, "pass"), (0.5, 1, "FAIL: solver's")):
    # In one folder: what stands there from before is not measured again.
    where, job = f"--workdir={tmp_path / 'judged'}", Job(scale)
    assert learn.main([*given, where, "--config.questions=2"], job) == code
    assert said in capsys.readouterr().out
    # As the recorded runs were, unless it is told otherwise.
    (words,) = job.called
    assert words[-2:] == ["--config.iterations=7", "--config.questions=2"]


# --- the demo ----------------------------------------------------------------


def kept(number, iteration, verdict, bank):
  return {
    "episode": make_row(
      number, arm=f"eval/{bank}", iteration=iteration, verdict=verdict
    )
  }


def cells():
  return [
    dict(
      iteration=iteration,
      bank=bank,
      predictions=[
        kept(1, iteration, "right", bank),
        kept(2, iteration, "right" if iteration else "wrong", bank),
        {"verdict": "wrong"},
      ],
    )
    for iteration in (0, 2, 4)
    for bank in ("final", "none")
  ]


def test_pairs_are_of_one_question_and_what_was_learned_comes_first():
  found = demo_learn.pairs(cells(), "none")
  assert [[row["request_id"] for row in pair] for pair in found] == [
    ["q2", "q2"],
    ["q1", "q1"],
  ]
  assert [[row["iteration"] for row in pair] for pair in found] == [[0, 4]] * 2
  assert demo_learn.pairs(cells()[:2], "none") == []


def test_the_demo_watches_and_tells(tmp_path):
  folder = metrics.RunFolder(tmp_path)
  folder.append("metrics.jsonl", rows())
  job = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
  assert demo_learn.watch(job, tmp_path, 0.05) == 3
  assert (tmp_path / "plots/all.png").exists()
  folder.write_json("eval.json", cells())
  folder.write_lines("skills.jsonl", [])
  out = io.StringIO()
  demo_learn.tell(tmp_path, rich.console.Console(file=out, width=160))
  text = out.getvalue()
  assert text.index("q2 #2") < text.index("q1 #1")
  # As the policy is meant to be used: with its bank.
  assert "iteration 4, eval/final" in text
  line = next(line for line in text.splitlines() if "verdict" in line)
  assert line.index("wrong") < line.index("right")


def test_the_newest_born_skills_are_told():
  history = [
    dict(event=event, skill=f"s{i}")
    for i, event in enumerate(
      ("prime", "admit", "credit", "admit", "reject", "admit", "retire")
    )
  ]
  source = demo_learn.life.Source([], history)
  assert demo_learn.newest(source, 2) == ["s3", "s5"]
