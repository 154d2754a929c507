import dataclasses
import io
import json
import math
import os

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sesa_jax import metrics
from sesa_jax.types import Episode, Passage, Turn, Verdict

FLOATS = st.floats(-200, 0, width=32)


def make_episode(logprobs=(-0.1, -2.5, -1e-7), attempt=0):
  passage = Passage("d1", "Orl\u00e9ans", 'Joan\n"lifted" the siege.', 1.25)
  turns = (
    Turn(4, 6, 9, "<search>x</search>", "search", "x", (passage,), ""),
    Turn(9, 10, 10, "\udcff", "malformed", "", (), "no action"),
  )
  return Episode(
    request_id="q1",
    attempt=attempt,
    arm="solver",
    ids=np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 70000], np.int32),
    prompt_length=4,
    mask=np.array([0, 0, 0, 0, 1, 1, 0, 0, 0, 1], bool),
    logprobs=np.array(
      [0, 0, 0, 0, logprobs[0], logprobs[1], 0, 0, 0, logprobs[2]], np.float32
    ),
    turns=turns,
    finish="malformed",
  )


def assert_same(a, b):
  for field in dataclasses.fields(Episode):
    left, right = getattr(a, field.name), getattr(b, field.name)
    if isinstance(left, np.ndarray):
      assert left.dtype == right.dtype
      np.testing.assert_array_equal(left, right)
    else:
      assert left == right


def json_lines(path):
  return [json.loads(text) for text in path.read_text("utf-8").split("\n")[:-1]]


# --- rows ------------------------------------------------------------------


@given(st.tuples(FLOATS, FLOATS, FLOATS))
def test_an_episode_survives_its_row_bit_by_bit(logprobs):
  episode = make_episode(logprobs)
  row = json.loads(metrics.line(metrics.episode_row(episode, reward=1.0)))
  assert_same(metrics.episode_from_row(row), episode)


def test_a_row_says_what_was_sampled_and_what_was_observed():
  row = metrics.episode_row(
    make_episode(),
    decode=lambda ids: " ".join(map(str, ids)),
    verdict=Verdict.WRONG,
    skill_ids=("s1",),
  )
  row = json.loads(metrics.line(row))
  assert row["mask"] == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1]
  assert row["logprobs"][4:6] == [-0.1, -2.5]  # not -0.10000000149011612
  assert row["prompt"] == "1 2 3 4"
  assert [turn["observation"] for turn in row["turns"]] == ["7 8 9", ""]
  assert row["turns"][0]["passages"][0]["title"] == "Orl\u00e9ans"
  assert row["turns"][1]["text"] == "\udcff"
  assert (row["verdict"], row["skill_ids"]) == ("wrong", ["s1"])


def test_an_extra_may_not_hide_a_field():
  with pytest.raises(AssertionError, match="finish"):
    metrics.episode_row(make_episode(), finish="answer")


def test_another_schema_is_an_error():
  row = metrics.episode_row(make_episode()) | {"schema": 2}
  with pytest.raises(ValueError, match="schema 2"):
    metrics.episode_from_row(row)


def test_lines_are_canonical_and_hold_json_only():
  row = {
    "b/mean": float("nan"),
    "a": np.float32(0.5),
    "c": [jnp.int32(3), np.array([[1.5, np.inf]])],
    "d": {"z": 1, "y": (None, True)},
  }
  want = (
    '{"a":0.5,"b/mean":null,"c":[3,[[1.5,null]]],"d":{"y":[null,true],"z":1}}'
  )
  assert metrics.line(row) == (want + "\n").encode()
  assert metrics.line(dict(reversed(row.items()))) == metrics.line(row)


def test_describe():
  assert metrics.describe([1, 2, 6], "r") == {"r/mean": 3.0, "r/max": 6.0}
  empty = metrics.describe([], "r")
  assert list(empty) == ["r/mean", "r/max"]
  assert all(map(math.isnan, empty.values()))


# --- folder ----------------------------------------------------------------


def test_append_and_read(tmp_path):
  folder = metrics.RunFolder(tmp_path / "new" / "run")
  assert folder.read("metrics.jsonl") == []
  folder.append("metrics.jsonl", [{"i": 0}, {"i": 1}])
  folder.append("metrics.jsonl", [{"i": 2}])
  assert folder.read("metrics.jsonl") == [{"i": 0}, {"i": 1}, {"i": 2}]


def test_a_torn_last_line_is_left_out_and_replaced(tmp_path):
  folder = metrics.RunFolder(tmp_path)
  folder.append("metrics.jsonl", [{"i": 0}])
  with (tmp_path / "metrics.jsonl").open("ab") as file:
    file.write(b'{"i": 1, "torn": "' + b"x" * 100_000)
  assert folder.read("metrics.jsonl") == [{"i": 0}]
  assert folder.lengths() == {"metrics.jsonl": len('{"i":0}\n')}
  folder.append("metrics.jsonl", [{"i": 2}])
  assert json_lines(tmp_path / "metrics.jsonl") == [{"i": 0}, {"i": 2}]


def test_a_damaged_line_is_named(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"i":0}\nnonsense\n{"i":1}\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not JSON"):
    metrics.RunFolder(tmp_path).read("metrics.jsonl")


def test_truncate_goes_back_to_a_checkpoint(tmp_path):
  folder = metrics.RunFolder(tmp_path)
  folder.append("metrics.jsonl", [{"i": 0}])
  folder.write_episodes(0, [{"e": 0}])
  folder.write_lines("skills.jsonl", [{"id": "s1"}])
  (tmp_path / "mine.jsonl").write_text("a note\n")
  lengths = json.loads(json.dumps(folder.lengths()))
  before = {p.name: p.read_bytes() for p in tmp_path.rglob("*.*")}

  folder.append("metrics.jsonl", [{"i": 1}])
  folder.append("failures.jsonl", [{"f": 1}])
  folder.write_episodes(1, [{"e": 1}])
  folder.truncate(lengths)
  assert {p.name: p.read_bytes() for p in tmp_path.rglob("*.*")} == before

  folder.truncate({})
  left = sorted(p.name for p in tmp_path.rglob("*.*"))
  assert left == ["mine.jsonl", "skills.jsonl"]


def test_a_log_that_lost_lines_is_an_error(tmp_path):
  folder = metrics.RunFolder(tmp_path)
  folder.append("metrics.jsonl", [{"i": 0}])
  with pytest.raises(ValueError, match="has 8 bytes, but 9 when"):
    folder.truncate({"metrics.jsonl": 9})
  assert folder.read("metrics.jsonl") == [{"i": 0}]


def test_json_is_replaced_whole(tmp_path, monkeypatch):
  folder = metrics.RunFolder(tmp_path)
  folder.write_json("config.json", {"b": 1, "a": {"c": None}})

  def die(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, "fsync", die)
  with pytest.raises(KeyboardInterrupt):
    folder.write_json("config.json", {"b": 2})
  got = json.loads((tmp_path / "config.json").read_text())
  assert got == {"b": 1, "a": {"c": None}}


def test_only_the_lead_writes(tmp_path):
  folder = metrics.RunFolder(tmp_path / "run", writes=False)
  folder.append("metrics.jsonl", [{"i": 0}])
  folder.write_json("a.json", {})
  folder.write_episodes(0, [])
  folder.truncate({})
  assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_one(tmp_path):
  with pytest.raises(ValueError, match="is a URL"):
    metrics.RunFolder("gs://bucket/run")
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match="is a file"):
    metrics.RunFolder(tmp_path / "file")


def test_episode_files(tmp_path):
  rows = [metrics.episode_row(make_episode(attempt=i)) for i in range(3)]
  a, b = metrics.RunFolder(tmp_path / "a"), metrics.RunFolder(tmp_path / "b")
  a.write_episodes(12, rows)
  a.write_episodes(3, [])
  b.write_episodes(12, rows)
  empty, path = metrics.episode_files(tmp_path / "a")
  assert path.name == "iteration_00012.jsonl.zst"
  assert list(metrics.read_episodes(empty)) == []
  assert list(metrics.read_episodes(path)) == rows
  twin = tmp_path / "b" / "episodes" / path.name
  assert path.read_bytes() == twin.read_bytes()
  with zstandard.open(path, "rt", encoding="utf-8") as file:
    assert len(file.readlines()) == 3  # a zstd file of lines, to anyone
  path.write_bytes(path.read_bytes()[:-9])
  with pytest.raises(ValueError, match="is damaged"):
    list(metrics.read_episodes(path))


# --- progress --------------------------------------------------------------


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


def make_progress(monkeypatch, total):
  said = []
  monkeypatch.setattr(metrics.logging, "info", lambda s, *a: said.append(s % a))
  clock = Clock()
  console = rich.console.Console(file=io.StringIO())
  return metrics.Progress(total, console, clock), clock, said


def test_progress_logs_stages_and_every_ten_seconds(monkeypatch):
  progress, clock, said = make_progress(monkeypatch, 1000)
  with progress:
    progress.stage("pose", episodes=12)
    for _ in range(12):
      clock.now += 2
      progress.advance(episodes=1, tokens=10)
    progress.stage("update")
  assert said == [
    "pose: begins, 0/12 episodes",
    "pose: 5/12 episodes, 5.0 tokens/s, 3:10 left",
    "pose: 10/12 episodes, 5.0 tokens/s, 3:00 left",
    "pose: done in 24.0 s, 12/12 episodes, 5.0 tokens/s, 2:56 left",
    "update: begins, 2:56 left",
    "update: done in 0.0 s, 2:56 left",
  ]


def test_time_left_counts_passes_and_a_finished_stage_as_budgeted(monkeypatch):
  progress, clock, _ = make_progress(monkeypatch, 1000)
  with progress:
    assert progress.seconds_left() is None
    progress.stage("solve", passes=200)
    clock.now = 10.0
    progress.advance(tokens=100)
    assert progress.seconds_left() == pytest.approx(10 * 900 / 100)
    progress.stage("update", passes=300)  # solve ended early: 200 of 1000
    assert progress.seconds_left() == pytest.approx(10 * 800 / 200)
    progress.advance(tokens=100, passes=300)
    assert progress.seconds_left() == pytest.approx(10 * 500 / 500)
    progress.stage("solve", passes=500)
    progress.advance(tokens=600)
    assert progress.seconds_left() == 0
  assert progress.passes == {"solve": 700, "update": 300}


def test_a_terminal_gets_a_display_and_no_log(monkeypatch):
  progress, _, said = make_progress(monkeypatch, 100)
  out = io.StringIO()
  console = rich.console.Console(file=out, force_terminal=True, width=100)
  progress = metrics.Progress(100, console)
  with progress:
    progress.stage("pose", episodes=2)
    progress.advance(episodes=1, tokens=5)
    progress._live.refresh()
  assert "pose" in out.getvalue()
  assert "1/2 episodes" in out.getvalue()
  assert said == []
