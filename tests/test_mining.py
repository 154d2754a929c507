"""Skills from saved episodes and from early self-play."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sesa_jax import experiment, loop, metrics, mining, types
from sesa_jax import tools as tools_lib
from sesa_jax.skills import bank as skill_bank
from sesa_jax.skills import record as record_lib
from sesa_jax.stages import priming
from tests import driver, scripted
from tests.llm_server import Server, blocks, body, no_certificates, says
from tests.test_loop import SCRIPTED, silent, spied, tiny_config

pytestmark = pytest.mark.usefixtures(no_certificates.__name__)
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
  monkeypatch.chdir(ROOT)


def words(text):
  return len(text.split())


def line(prediction, **changes):
  """An attempt of another agent."""
  page = {"title": "Bonn", "text": "Bonn lies on a river."}
  return {
    "question": "Where is the old arch kept?",
    "targets": ["Rome"],
    "prediction": prediction,
    "searches": [{"query": "old arch", "passages": [page]}],
  } | changes


def write(path, *rows):
  path.write_text("\n".join(map(json.dumps, rows)) + "\n")
  return str(path)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
  """A run of two iterations, and its config."""
  here = Path.cwd()
  os.chdir(ROOT)
  folder = tmp_path_factory.mktemp("played") / "run"
  config = tiny_config(
    **SCRIPTED, iterations=2, **{"distillation.admit": False}
  )
  with driver.playing_the_script():
    experiment.run(config, str(folder))
  os.chdir(here)
  return metrics.RunFolder(folder), config


# --- reading -----------------------------------------------------------------


def test_lines_of_another_agent_by_hand(tmp_path):
  pages = [{"id": "7", "title": "Bonn", "text": "Bonn lies on a river."}]
  path = write(
    tmp_path / "agent.jsonl",
    line("Bonn", searches=[{"query": "arch", "passages": pages}]),
    line("rome.", targets="Rome"),
    line("Ulm", question="WHERE is the old arch kept", skill_ids=["s1"]),
    line(None, searches=[]),
    line("Rome", question_id="other", seed_id="s"),
  )
  records, groups = mining.read([path])
  assert records == []
  assert [len(group) for group in groups] == [4, 1]
  (record,) = mining.failures(groups, tiny_config(), words, iteration=5)
  assert record == types.FailureRecord(
    question_id="where is the old arch kept",
    seed_id="",
    question="Where is the old arch kept?",
    targets=("Rome",),
    prediction="Bonn",
    other_predictions=("Ulm",),
    passages=(types.Passage("7", "Bonn", "Bonn lies on a river."),),
    passages_seen=1,
    wrong_attempts=2,
    success_rate=0.25,
    skill_ids=(),
    iteration=5,
  )


def test_files_may_share_their_ids(tmp_path):
  """Each has a question of its own under it, and none of them gets lost."""
  paths = [
    write(
      tmp_path / f"{place}.jsonl",
      line("Bonn", question=f"Where is the {place} kept?", question_id="1"),
    )
    for place in ("arch", "mill", "harp")
  ]
  config = tiny_config(
    **{"frontier.gate": "any_failure", "distillation.max_records": 1}
  )
  rows = mining.distill(config, paths, str(tmp_path / "skills.jsonl"))
  assert len(rows) == 3


class Mine:
  """A distiller of one's own."""

  def distill_all(self, cases):
    return [
      types.Skill("", "c", "Read on.", "t", "e", "a", (), "") for _ in cases
    ]


def test_a_distiller_of_ones_own(tmp_path):
  path = write(tmp_path / "agent.jsonl", line("Bonn"), line("Rome"))
  name, out = f"{Mine.__module__}:Mine", tmp_path / "skills.jsonl"
  config = tiny_config(**{"distillation.distiller": name})
  mining.distill(config, [path], str(out))
  assert record_lib.read_rows(out)[-1]["origin"] == name
  config.distillation.distiller = f"{Mine.__module__}:Nobody"
  with pytest.raises(ValueError, match=r"distiller = .*Nobody"):
    mining.distill(config, [path], str(tmp_path / "more.jsonl"))


def test_a_verdict_that_is_given_stands(tmp_path):
  path = write(
    tmp_path / "agent.jsonl",
    line("Rome", verdict="wrong"),
    line("Roma", verdict="right"),
    line("Rome", question_id="x", verdict="right"),
    line("Bonn", question_id="x", verdict="wrong"),
    line("Bonn", question_id="x", verdict="unknown"),
  )
  _, groups = mining.read([path])
  assert [[a.verdict.value for a in group] for group in groups] == [
    ["wrong", "right"],
    ["right", "wrong", "unknown"],
  ]
  # An unknown attempt takes its question out, as in a run.
  found = mining.failures(groups, tiny_config(), words)
  assert [record.prediction for record in found] == ["Rome"]


def test_episodes_of_a_run_give_its_failures(played):
  """What the run itself recorded, from its episodes alone."""
  folder, config = played
  world = tools_lib.assemble(config, tools_lib.read(config))
  want = folder.read("failures.jsonl")
  assert len(want) > 1
  found = []
  for number, path in enumerate(metrics.episode_files(folder.path), 1):
    records, groups = mining.read([str(path)])
    assert records == []
    found += mining.failures(
      groups, config, world.tools.count_tokens, iteration=number
    )
  rows = {
    row["question_id"]: metrics.plain(row) for row in metrics.plain(found)
  }
  for row in want:  # a replayed question leaves no second one in a run
    got = rows[row["question_id"]]
    if row["question_id"].count("/") == 1:  # of a fixed set
      got = got | {"seed_id": row["seed_id"]}
    if got["iteration"] == row["iteration"]:
      assert got == row
  records, groups = mining.read([str(folder.path)])
  assert groups == []
  assert metrics.plain(records) == want


def test_right_attempts_are_kept_for_contrast(played):
  folder, config = played
  config = config.copy_and_resolve_references()
  config.distillation.contrast = True
  files = map(str, metrics.episode_files(folder.path))
  _, groups = mining.read(list(files))
  found = mining.failures(groups, config, words)
  assert all(len(record.right) == 2 for record in found)
  for record in found:
    for right in record.right:
      assert right.queries == ("capital river wrote planet",)
      assert right.passages


@pytest.mark.parametrize(
  ("row", "says_"),
  [
    ("[1]", "line 1 holds no JSON object"),
    ("{", "line 1 is not JSON"),
    (line("x", verdit="right"), "key 'verdit': unknown. Keys: question"),
    ({"question": "x"}, "key 'targets': missing"),
    (line(3), "key 'prediction': 3"),
    (line("x", verdict="good"), "'good' is none of right, wrong, unknown"),
    (line("x", question=" "), "key 'question': empty"),
    (line("x", targets=[]), "key 'targets': No answer"),
    (line("x", targets=["Rome", 3]), "key 'targets': An answer is a string"),
    (line("x", skill_ids=[3]), "key 'skill_ids'"),
    (line("x", searches=["q"]), "key 'searches'"),
    (line("x", searches=[{"query": "q", "passages": None}]), "key 'searches'"),
    (
      line(
        "x", searches=[{"query": "q", "passages": [{"title": "t", "id": 3}]}]
      ),
      "key 'searches'",
    ),
    ({"passages_seen": 1}, "not as a run writes it"),
    ({"arm": "solver", "turns": []}, "not as a run writes it"),
    (line("x", searches=[{"query": "q"}]), "key 'searches'"),
    (line("x", searches=[{"passages": []}]), "key 'searches'"),
    (
      line("x", searches=[{"query": "q", "passages": [{"title": "t"}]}]),
      "key 'searches'",
    ),
  ],
)
def test_bad_lines_are_named(tmp_path, row, says_):
  path = tmp_path / "agent.jsonl"
  path.write_text(row if isinstance(row, str) else json.dumps(row))
  with pytest.raises(ValueError, match=says_) as error:
    mining.read([str(path)])
  assert str(path) in str(error.value)


def test_bad_paths(tmp_path):
  with pytest.raises(ValueError, match="no such file"):
    mining.read([str(tmp_path / "x")])
  with pytest.raises(ValueError, match="a folder without episodes"):
    mining.read([str(tmp_path)])


# --- distilling --------------------------------------------------------------


def command(*flags):
  return subprocess.run(
    [sys.executable, "-m", "tests.driver", "never", *flags],
    capture_output=True,
    text=True,
    cwd=ROOT,
    timeout=280,
  )


@pytest.mark.slow
def test_a_bank_grows_by_the_command(tmp_path):
  """Two failures of another agent, and a bank of its own."""
  path = write(
    tmp_path / "agent.jsonl",
    line("Bonn"),
    line("Rome"),
    line("Ulm", question="When was the new bridge opened?", targets="1934"),
    line("1934", question="When was the new bridge opened?", targets="1934"),
  )
  skill = dataclasses.replace(
    priming.read("seeds15")[0], id="skill-00007", origin="mined"
  )
  bank = record_lib.row_of(record_lib.Record(skill), 4, 3.0, 1.0)
  out = tmp_path / "deep" / "skills.jsonl"
  done = command(
    "--mode=distill",
    "--config=configs/tiny.py",
    f"--episodes={path}",
    f"--bank={write(tmp_path / 'bank.jsonl', metrics.plain(bank))}",
    f"--out={out}",
  )
  assert done.returncode == 0, done.stderr
  assert "2 skills from 2 failures, 3 active" in done.stdout
  rows = record_lib.read_rows(out)
  assert rows[0] == metrics.plain(bank)
  assert [row["id"] for row in rows] == [
    "skill-00007",
    "skill-00008",
    "skill-00009",
  ]
  assert {row["origin"] for row in rows[1:]} == {"offline"}
  assert {row["source_question"] for row in rows[1:]} == {
    "Where is the old arch kept?",
    "When was the new bridge opened?",
  }
  with pytest.raises(ValueError, match="exists. Name another"):
    mining.distill(tiny_config(), [path], str(out))
  with pytest.raises(ValueError, match="name a .jsonl file"):
    mining.distill(tiny_config(), [path], str(tmp_path))


@pytest.mark.slow
def test_mining_by_the_command(tmp_path):
  flags = [f"--config.{name}={value}" for name, value in SCRIPTED.items()]
  done = command(
    "--mode=mine",
    "--config=configs/tiny.py",
    f"--workdir={tmp_path / 'mine'}",
    f"--out={tmp_path / 'skills.jsonl'}",
    "--config.mine.iterations=1",
    *flags,
  )
  assert done.returncode == 0, done.stderr
  rows = record_lib.read_rows(tmp_path / "skills.jsonl")
  assert {row["origin"] for row in rows} == {"seed", "mined"}


def test_questions_of_evaluation_sets_are_left_out(tmp_path):
  tested = json.loads(
    Path("tests/world/eval.jsonl").read_text().splitlines()[0]
  )
  text = tested["question"].upper()
  path = write(
    tmp_path / "agent.jsonl",
    line("Bonn", question=text),
    line("Rome", question=text),
    line("Bonn"),
    line("Rome"),
  )
  out = tmp_path / "skills.jsonl"
  mining.distill(tiny_config(), [path], str(out))
  sources = {row["source_question"] for row in record_lib.read_rows(out)}
  assert sources == {"", "Where is the old arch kept?"}


def test_one_attempt_a_question_passes_no_frontier(tmp_path):
  path = write(tmp_path / "agent.jsonl", line("Bonn"))
  out = str(tmp_path / "skills.jsonl")
  with pytest.raises(ValueError, match=r"frontier\.gate='any_failure'"):
    mining.distill(tiny_config(), [path], out)
  config = tiny_config(**{"frontier.gate": "any_failure"})
  (row,) = mining.distill(config, [path], out)
  assert row["outcome"] == "admitted"


def judged(server, **changes):
  return tiny_config(
    **{
      "judge.base_url": server.url,
      "judge.key_env": "",
      "judge.tries": 1,
      "distillation.distiller": "chat",
    }
    | changes
  )


def test_a_model_grades_and_writes(tmp_path):
  def act(handler):
    found = blocks(handler.asked)
    if "candidate" in found:
      right = found["candidate"] == "Roma"
      says("RIGHT" if right else "WRONG")(handler)
    else:
      says(json.dumps(scripted.SKILL))(handler)

  path = write(
    tmp_path / "agent.jsonl",
    line("Roma"),  # an alias that exact match does not know
    line("Bonn"),
    line("Ulm", verdict="wrong"),  # given: not asked about
  )
  out = tmp_path / "skills.jsonl"
  with Server(then=act) as server:
    (row,) = mining.distill(judged(server), [path], str(out))
    asked = [blocks(r["messages"][1]["content"]) for r in server.requests]
    assert sorted(a.get("candidate", "") for a in asked) == ["", "Bonn", "Roma"]
    paid = len(server.requests)
    out.unlink()
    mining.distill(judged(server), [path], str(out))
    assert len(server.requests) == paid
  assert row["outcome"] == "admitted"
  assert record_lib.read_rows(out)[-1]["origin"] == "chat"


def test_few_lost_verdicts_leave_their_questions_out(tmp_path):
  """One of 60 is within lost_limit: its question is out, nothing else."""

  def act(handler):
    lost = blocks(handler.asked)["candidate"] == "no 7"
    (body(b"", 503) if lost else says("WRONG"))(handler)

  path = write(
    tmp_path / "agent.jsonl",
    *(line(f"no {i}") for i in range(60)),
    line("Bonn", question_id="x", verdict="wrong"),
    line("Rome", question_id="x", verdict="right"),
  )
  changes = {"distillation.distiller": "offline", "judge.concurrency": 1}
  with Server(then=act) as server:
    rows = mining.distill(
      judged(server, **changes), [path], str(tmp_path / "skills.jsonl")
    )
  assert [row["question"] for row in rows] == ["x"]


def test_what_belongs_to_runs_is_no_matter(tmp_path):
  """Neither an answerer nor what a run does with its bank."""
  changes = {
    "verifier.answerer": "judge",
    "bank.frozen": True,
    "distillation.admit": False,
  }
  path = write(tmp_path / "agent.jsonl", line("Bonn"), line("Rome"))
  out = str(tmp_path / "skills.jsonl")
  (row,) = mining.distill(tiny_config(**changes), [path], out)
  assert row["outcome"] == "admitted"
  config = tiny_config(**changes | {"distillation.distiller": "chat"})
  with pytest.raises(ValueError, match="'chat' asks a model"):
    mining.distill(config, [path], str(tmp_path / "more.jsonl"))


def test_a_budget_that_ends_is_said_and_nothing_is_paid_twice(tmp_path):
  path = write(
    tmp_path / "agent.jsonl",
    *(line("Bonn", question=f"Where is the {x} kept?") for x in "ab"),
  )
  out, act = tmp_path / "skills.jsonl", says(json.dumps(scripted.SKILL))
  changes = {"frontier.gate": "any_failure", "judge.concurrency": 1}
  changes |= {"judge.verdicts": False, "judge.max_tokens": 10_000}
  with Server(
    [says(json.dumps(scripted.SKILL), usage=(9_000, 5))], then=act
  ) as server:
    with pytest.raises(types.Stopped, match=r"9,005 of 10,000 tokens"):
      mining.distill(judged(server, **changes), [path], str(out))
    assert not out.exists()
    changes["judge.max_tokens"] = 100_000
    rows = mining.distill(judged(server, **changes), [path], str(out))
    assert len(server.requests) == 2
  assert [row["reason"] for row in rows] == ["", "similar"]


@pytest.mark.parametrize("what", ["candidate", "right answer"])
def test_an_outage_stops_and_nothing_is_written(tmp_path, what):
  def act(handler):
    found = blocks(handler.asked)
    if what in found:
      body(b"", 503)(handler)
    elif "candidate" in found:
      says("WRONG")(handler)

  path = write(tmp_path / "agent.jsonl", line("Bonn"), line("Rome"))
  out = tmp_path / "skills.jsonl"
  with Server(then=act) as server, pytest.raises(types.Stopped, match="same"):
    mining.distill(judged(server), [path], str(out))
  assert not out.exists()


def test_the_policy_writes_where_nothing_can_be_searched(tmp_path):
  path = write(tmp_path / "agent.jsonl", line("Bonn"), line("Rome"))
  changes = {"distillation.distiller": "solver", "verifier.max_tokens": 4096}
  out = tmp_path / "skills.jsonl"
  with driver.playing_the_script():
    mining.distill(tiny_config(**changes), [path], str(out))
  last = record_lib.read_rows(out)[-1]
  assert last["origin"] == "solver"
  assert last["description"] == scripted.SKILL["description"]


@pytest.mark.parametrize(
  ("changes", "says_"),
  [
    ({"distillation.distiller": "x"}, "'x'. Choices: chat, solver, offline"),
    ({"distillation.consolidate": "x"}, "'x'. Choices: single, cluster"),
    ({"frontier.gate": "x"}, "'x'. Choices: frontier"),
    ({"distillation.max_records": 0}, "distillation.max_records = 0"),
    ({"distillation.distiller": "chat"}, "'chat' asks a model"),
  ],
)
def test_a_config_is_refused_before_anything_is_read(changes, says_, tmp_path):
  out = str(tmp_path / "skills.jsonl")
  with pytest.raises(ValueError, match=says_):
    mining.distill(tiny_config(**changes), ["no such file"], out)
  if "'chat'" in says_:  # said before self-play, not after it
    with pytest.raises(ValueError, match=says_):
      mining.mine(tiny_config(**changes), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# --- mining ------------------------------------------------------------------


def test_where_to_is_asked_before_anything_is_played(tmp_path):
  run, out = str(tmp_path / "run"), tmp_path / "there.jsonl"
  out.touch()
  for name, says_ in ((str(out), "exists"), (run, "name a .jsonl file")):
    with pytest.raises(ValueError, match=says_):
      mining.mine(tiny_config(), run, out=name)
  assert not (tmp_path / "run").exists()


def test_mining_plays_with_a_frozen_bank_and_keeps_the_best(tmp_path):
  folder = tmp_path / "mine"
  changes = {"mine.iterations": 2, "mine.skills": 1, "iterations": 9}
  config = tiny_config(**SCRIPTED | changes)
  with driver.playing_the_script():
    mining.mine(config, str(folder))
  run = metrics.RunFolder(folder)
  assert len(run.read("metrics.jsonl")) == 2
  assert run.read("metrics.jsonl")[-1]["solver/updates"] > 0  # both learn
  frozen = record_lib.read_rows(folder / "skills.jsonl")
  assert len(frozen) == 15
  assert all(
    (row["retrieved"], row["helpful"], row["harmful"]) == (0, 0, 0)
    for row in frozen
  )
  shown = [
    row["skill_ids"]
    for path in metrics.episode_files(folder)
    for row in metrics.read_episodes(path)
    if row["arm"] == "solver"
  ]
  assert all(shown)
  rows = record_lib.read_rows(folder / "mined.jsonl")
  assert [row["origin"] for row in rows] == ["seed"] * 15 + ["mined"]
  failures = {row["question"] for row in run.read("failures.jsonl")}
  assert len(failures) > 1
  assert rows[-1]["source_question"] in failures
  again = tiny_config(**{"bank.prime": f"mined:{folder / 'mined.jsonl'}"})
  world = tools_lib.assemble(again, tools_lib.read(again))
  state, _ = loop.state_lib.start(again, world)
  assert len(state.bank.skills) == 16
  assert state.bank.skills[-1].source_question == rows[-1]["source_question"]


def test_a_frozen_bank_shows_and_stays():
  config, world, state, _ = spied(**{"bank.frozen": True})
  arrays, document = skill_bank.to_tree(state.bank)
  document["records"][0]["skill"]["origin"] = "mined"
  arrays["retrieved"][0], arrays["harmful"][0] = 9, 99  # would be retired
  bank = skill_bank.from_tree(arrays, document)
  state = dataclasses.replace(state, bank=bank)
  with silent() as progress:
    after, record = loop.iteration(state, world, config, progress)
  assert record.metrics["bank/shown"] > 0
  assert record.failures
  assert skill_bank.rows(after.bank) == skill_bank.rows(bank)
  assert len(after.queue) == len(record.failures)
