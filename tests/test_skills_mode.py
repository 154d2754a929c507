"""`--mode=skills`: look into a bank, compare, merge, convert."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rich.console

from sesa_jax import metrics, types
from sesa_jax.retrieval.encoder import HashEncoder
from sesa_jax.skills import bank as skill_bank
from sesa_jax.skills import compare, life, record

ROOT = Path(__file__).parents[1]
SEEDS = ROOT / "sesa_jax" / "skills" / "seeds.jsonl"


def skill(id, description="d", origin="offline", **fields) -> types.Skill:
  texts = dict(
    category="dates",
    trigger=f"t {id}",
    evidence="e",
    avoidance="a",
    templates=("z {x}",),
  )
  return types.Skill(
    id=id, description=description, origin=origin, **texts | fields
  )


def outcome(id, right, total) -> types.Outcome:
  asked = types.Question(id, f"Who was {id}?", ("x",), 1, "s", "challenger")
  return types.Outcome(asked, right, total, total, total - right, ())


def episode_rows(iteration, id, verdicts, skill_ids, arm="solver"):
  for attempt, verdict in enumerate(verdicts):
    episode = types.Episode(
      request_id=id,
      attempt=attempt,
      arm=arm,
      ids=np.zeros(1, np.int32),
      prompt_length=1,
      mask=np.zeros(1, bool),
      logprobs=np.zeros(1, np.float32),
      turns=(),
      finish="answer",
    )
    yield metrics.episode_row(
      episode,
      iteration=iteration,
      question=f"Who was {id}?",
      verdict=verdict,
      skill_ids=skill_ids,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
  """The folder of a run in which a skill is born, shown twice and retired."""
  folder = metrics.RunFolder(tmp_path_factory.mktemp("runs") / "a")
  bank = skill_bank.create(8, 4)
  bank, primed = skill_bank.prime(
    bank, [skill("seed-001", "Look twice.", "seed")], np.eye(4)[:1]
  )
  new = skill("", "Check [the] year.", source_question="When was q9?")
  bank, (came,) = skill_bank.admit(bank, [new], np.eye(4)[1:2], 0.9, 1)
  came |= dict(question="1/q9", asked_at=1, outcome="admitted")
  events = [*primed, came]
  for number, right, without in ((2, 1, 1), (3, 0, 2)):
    id = f"{number}/q"
    rank = dict(iteration=number, event="rank", skill="", ranked={id: [0, 1]})
    events.append(rank)
    bank, done = skill_bank.credit(
      bank,
      {id: bank.skills},
      {id: outcome(id, right, 4)},
      "majority",
      number,
      {id: outcome(id, without, 2)},
    )
    bank, gone = skill_bank.retire(bank, 2, number)
    events += [*done, *gone]
    folder.write_episodes(
      number,
      [
        *episode_rows(
          number,
          id,
          ["right"] * right + ["wrong"] * (4 - right),
          ["seed-001", "skill-00001"],
        ),
        *episode_rows(number, id, ["right"], [], "control"),
        *episode_rows(number, f"{number}/other", ["right"], ["seed-001"]),
      ],
    )
  folder.append("skills_history.jsonl", events)
  folder.append("metrics.jsonl", [{"iteration": i} for i in range(1, 5)])
  folder.append(
    "failures.jsonl",
    [
      dict(
        question_id="1/q9",
        iteration=iteration,
        targets=["1912", "twelve"],
        prediction=f"191{iteration}",
        wrong_attempts=3,
        success_rate=0.25,
        skill_ids=["seed-001"],
      )
      for iteration in (1, 2)
    ],
  )
  folder.write_lines("skills.jsonl", skill_bank.rows(bank))
  settings = dict(capacity=8, retire_after=2)
  folder.write_json("config.json", {"bank": settings})
  return folder.path


def said(*args, **kwargs) -> str:
  out = io.StringIO()
  life.main(*args, **kwargs, console=rich.console.Console(file=out, width=110))
  return out.getvalue()


def lines(text: str) -> list[str]:
  return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_the_table_is_by_net_with_effects(run):
  found = lines(said(str(run)))
  assert found[1:2] + found[3:] == [
    "skill state shown helpful harmful net effect, 95 % description",
    "seed-001 active 2 0 2 -2 -0.62 (n = 2) Look twice.",
    "skill-00001 retired 2 0 2 -2 -0.62 (n = 2) Check [the] year.",
  ]
  assert said(None, str(run)) == said(str(run))
  seeds = record.read_rows(SEEDS)
  rows = [
    seeds[i] | dict(id=id, helpful=helpful)
    for i, (id, helpful) in enumerate([("b", 1), ("c", 4), ("a", 1)])
  ]
  out = io.StringIO()
  rich.console.Console(file=out, width=110).print(life.table(rows, {}))
  shown = [line for line in lines(out.getvalue()) if " active " in line]
  assert [line[0] for line in shown] == ["c", "a", "b"]
  assert "effect" not in out.getvalue()


def test_an_effect_with_its_interval():
  effect = life.Effect(0.2, -0.05, 0.45, 9)
  rows = record.read_rows(SEEDS)[:1]
  out = io.StringIO()
  table = life.table(rows, {"seed-001": effect})
  rich.console.Console(file=out, width=110).print(table)
  assert "+0.20 [-0.05, +0.45]" in out.getvalue()


def test_the_life_of_a_skill(run):
  found = lines(said(str(run), skill="skill-00001"))
  for line in (
    "what: Check [the] year.",
    "when: t",
    "search: z {x}",
    "origin: offline, admitted in iteration 1; nearest was seed-001 (0.000)",
    "born from: When was q9?",
    "the failure: iteration 1, 3 wrong attempts, success 25%: '1911' for "
    "'1912 | twelve'",
    "shown then: seed-001",
    "2 1 of 4 0 1 -0.25 Who was 2/q?",
    "3 0 of 4 0 1 -1.00 Who was 3/q?",
    "retired: in iteration 3, harmful: net -2",
    "now: retired; shown for 2 questions, helpful 0, harmful 2, net -2",
  ):
    assert line in found, line
  assert sum(line.startswith("the failure") for line in found) == 1
  primed = lines(said(str(run), skill="seed-001"))
  assert "origin: seed, primed in iteration 0" in primed
  assert not any(line.startswith(("born", "retired")) for line in primed)
  with pytest.raises(
    ValueError, match=r"no such skill. It has 2, from seed-001"
  ):
    said(str(run), skill="skill-2")


def test_a_life_that_began_with_several_failures():
  failures = [
    dict(
      question_id=id,
      iteration=number,
      targets=["x"],
      prediction=f"{id} {number}",
      wrong_attempts=1,
      success_rate=0.5,
      skill_ids=[],
    )
    for number in (1, 2)
    for id in ("q1", "q2", "q3")
  ]
  came = dict(
    iteration=3,
    event="admit",
    skill="a",
    question="q1",
    asked_at=2,
    others=[[1, "q2"], [2, "q3"]],
  )
  out = io.StringIO()
  told = life.story(life.Source([row("a")], [came], failures), "a")
  rich.console.Console(file=out, width=110).print(told)
  found = re.findall(r"'(q\d \d)' for", out.getvalue())
  assert found == ["q2 1", "q1 2", "q3 2"]


def test_a_life_without_the_runs_folder(run):
  text = said(str(run / "skills.jsonl"), skill="skill-00001")
  assert "origin: offline\n" in text
  assert "shown" in lines(text)[-1]


def test_the_bank_after_an_iteration(run):
  before = lines(said(str(run), iteration=2))
  assert before[-1].startswith("skill-00001 active 1 0 1 -1 -0.25 (n = 1)")
  assert len(lines(said(str(run), iteration=0))) == len(before) - 1
  story = said(str(run), skill="skill-00001", iteration=2)
  assert "Who was 3/q?" not in story
  with pytest.raises(ValueError, match=r"--iteration=5: the run in .* to 3"):
    said(str(run), iteration=5)
  with pytest.raises(ValueError, match="not the folder of a run"):
    said(str(SEEDS), iteration=1)


def test_folders_of_skills_and_back(tmp_path):
  assert "15 SKILL.md folders written" in said(
    str(SEEDS), out=str(tmp_path / "md")
  )
  assert "No difference." in said(str(SEEDS), other=str(tmp_path / "md"))
  said(str(tmp_path / "md"), out=str(tmp_path / "back.jsonl"))
  assert skill_bank.load(tmp_path / "back.jsonl") == skill_bank.load(SEEDS)
  with pytest.raises(ValueError, match=r"back\.jsonl exists"):
    said(str(SEEDS), out=str(tmp_path / "back.jsonl"))


def test_the_active_skills_alone_become_folders(run, tmp_path):
  assert "1 SKILL.md" in said(str(run), out=str(tmp_path / "md"))
  assert [path.name for path in (tmp_path / "md").iterdir()] == ["seed-001"]
  assert "2 skills" in said(str(run), out=str(tmp_path / "all.jsonl"))
  rows = record.read_rows(tmp_path / "all.jsonl")
  assert rows == record.read_rows(run / "skills.jsonl")


# --- two banks -------------------------------------------------------------


def row(id, description="d", state="active", **more):
  made = record.Record(skill(id, description), state)
  return record.row_of(made, 0, 0.0, 0.0) | more


def test_differences():
  first = [row("a"), row("b"), row("c"), row("d", evidence="1"), row("e")]
  second = [
    row("e"),
    row("b", state="retired", retrieved=3, harmful=1.5),
    row("c", helpful=2),
    row("d", evidence="2", trigger="new", helpful=9),
    row("f", state="evicted"),
  ]
  assert compare.diff(first, second) == [
    ("a", "only in the first"),
    ("b", "active -> retired; retrieved 0 -> 3; harmful 0 -> 1.5"),
    ("c", "helpful 0 -> 2"),
    ("d", "another text: trigger, evidence"),
    ("f", "only in the second, evicted"),
  ]
  assert compare.diff(first, first) == []


class Lookup:
  """Embeds a text as its description says: an angle in degrees."""

  dim = 2

  def encode(self, texts, kind):
    assert kind == "passage"
    angles = np.radians([float(text.split()[0]) for text in texts])
    return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def test_a_merge_keeps_ids_apart():
  first = [row("seed-001", "0"), row("skill-00001", "90", "retired")]
  second = [
    row("skill-00007", "200"),
    row("seed-001", "180"),  # another one under this id
    row("skill-00001", "300", "evicted"),
  ]
  same = row("skill-00003", "0") | dict(trigger="t seed-001", helpful=5.0)
  before = json.dumps([first, second])
  rows, told = compare.merge(first, [*second, same])
  assert json.dumps([first, second]) == before
  assert [(r["id"], r["description"], r["state"]) for r in rows] == [
    ("seed-001", "0", "active"),
    ("skill-00001", "90", "retired"),
    ("skill-00008", "300", "evicted"),
    ("skill-00007", "200", "active"),
    ("skill-00009", "180", "active"),
  ]
  assert told == [
    ("skill-00001", "kept as skill-00008"),
    ("skill-00007", "kept"),
    ("seed-001", "kept as skill-00009"),
    ("skill-00003", "same as seed-001"),
  ]


def test_a_merge_leaves_restatements_out():
  first = [row("a", "0"), row("b", "90", "retired"), row("c", "180", "evicted")]
  second = [
    row("a", "10"),  # like a
    row("e", "81"),  # like the retired b
    row("f", "179"),  # like the evicted c, which bars nothing
    row("g", "171"),  # like f, which came before
    row("h", "270", "retired"),
    row("i", "272"),  # like h, which the second retired
    row("j", "45"),
  ]
  threshold = float(np.cos(np.radians(20)))
  rows, told = compare.merge(first, second, Lookup(), threshold)
  assert [r["id"] for r in rows] == ["a", "b", "c", "h", "f", "j"]
  assert dict(told) == {
    "h": "kept",
    "a": "left out: like the skill a (0.985)",
    "e": "left out: like the retired skill b (0.988)",
    "f": "kept",
    "g": "left out: like the skill f (0.990)",
    "i": "left out: like the retired skill h (0.999)",
    "j": "kept",
  }
  # A number is not spent on what is left out.
  more = [row("a", "5"), row("b", "225")]
  rows, _ = compare.merge(first, more, Lookup(), threshold)
  assert [r["id"] for r in rows] == ["a", "b", "c", "skill-00001"]


def test_merging_by_the_command(tmp_path):
  authored = SEEDS.with_name("authored.jsonl")
  out = tmp_path / "both.jsonl"
  text = said(str(SEEDS), other=str(authored), merge=True, out=str(out))
  assert "157 skills written" in text
  assert len(skill_bank.load(out)) == 157
  again = tmp_path / "again.jsonl"
  text = said(
    str(SEEDS),
    other=str(SEEDS),
    merge=True,
    out=str(again),
    encoder=HashEncoder(64),
    threshold=0.5,
  )
  assert text.count("same as seed-0") == 15
  assert skill_bank.load(again) == skill_bank.load(SEEDS)
  for lacking in (dict(out="x"), dict(other="x")):
    with pytest.raises(ValueError, match="give all three"):
      said(str(SEEDS), merge=True, **lacking)


# --- the command line ------------------------------------------------------


def command(*flags):
  return subprocess.run(
    [sys.executable, "-m", "sesa_jax.main", "--mode=skills", *flags],
    capture_output=True,
    text=True,
    cwd=ROOT,
    timeout=120,
  )


def test_flags(tmp_path):
  done = command(
    f"--bank={SEEDS}",
    f"--other={SEEDS.with_name('authored.jsonl')}",
    "--merge",
    f"--out={tmp_path / 'both.jsonl'}",
    "--config=configs/tiny.py",  # hashed words
    "--config.encoder.threshold=-1.0",
  )
  assert done.returncode == 0, done.stderr
  assert "left out: like the skill" in done.stdout
  assert "15 skills written" in done.stdout


# --- usable alone ----------------------------------------------------------


def of_the_docs(title) -> tuple[str, dict]:
  """The example of a section of docs/skills.md, and what it leaves."""
  text = (ROOT / "docs" / "skills.md").read_text()
  section = text.split(f"## {title}\n")[1].split("\n## ")[0]
  (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
  names: dict = {}
  exec(compile(code, "docs/skills.md", "exec"), names)
  return code, names


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  code, names = of_the_docs("A bank alone")
  assert len([line for line in code.splitlines() if line.strip()]) <= 20
  assert names["block"].startswith("Lessons from earlier questions:\nCheck")
  (saved,) = record.read_rows(tmp_path / "skills.jsonl")
  assert (saved["id"], saved["retrieved"], saved["harmful"]) == (
    "skill-00001",
    1,
    1,
  )
  bank = names["bank"]
  assert dataclasses.is_dataclass(bank)
  assert skill_bank.rows(bank) == [saved]


def test_a_distiller_of_the_docs_runs():
  _, names = of_the_docs("A distiller of your own")
  (row,) = names["report"].rows
  assert (row["outcome"], row["question"]) == ("admitted", "q1")
  (skill_,) = names["bank"].skills
  assert (skill_.origin, skill_.source_question) == (
    "notes:Years",
    "When did the fair open?",
  )
  assert names["queue"] == ()
