from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sesa_jax import prompts
from sesa_jax.skills import arms, record
from sesa_jax.skills import bank as skill_bank
from sesa_jax.types import Question, Skill

SEEDS = Path(skill_bank.__file__).with_name("seeds.jsonl")


def words(text: str) -> int:
  return len(text.split())


class Axes:
  """Skill i of S lies at the angle pi i / S, all questions at 0."""

  dim = 2

  def __init__(self, count):
    self.count = count

  def encode(self, texts, kind):
    if kind == "query":
      return np.tile(np.array([[1, 0]], np.float32), (len(texts), 1))
    angles = np.pi * np.arange(len(texts)) / self.count
    return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def bank_of(skills, capacity=None) -> skill_bank.SkillBank:
  encoder = Axes(len(skills))
  bank = skill_bank.create(capacity or len(skills), 2)
  vectors = encoder.encode([""] * len(skills), "passage")
  return skill_bank.prime(bank, skills, vectors)[0]


def authored(count) -> list[Skill]:
  path = SEEDS.with_name("authored.jsonl")
  return [one.skill for one in skill_bank.load(path)[:count]]


def question(id, text="Who?", seed="") -> Question:
  return Question(id, text, ("x",), 1, seed, "challenger")


def real(bank, questions, k=3):
  shown = {q.id: bank.skills[:k] for q in questions}
  return shown, {id: record.block(skills) for id, skills in shown.items()}


def placebo(bank, questions, shown, blocks, **more):
  settings = dict(seed=1, iteration=2) | more
  return arms.placebo(
    bank, questions, Axes(0), blocks, shown, words, **settings
  )


def test_a_placebo_is_far_as_long_and_as_many():
  bank = bank_of(authored(60))
  questions = [question(f"q{i}") for i in range(40)]
  by_length = sorted(bank.skills[:30], key=lambda s: words(record.rendered(s)))
  shown = {q.id: by_length[14:17] for q in questions}
  blocks = {id: record.block(skills) for id, skills in shown.items()}
  drawn, texts, missed = placebo(bank, questions, shown, blocks)
  far = {skill.id for skill in bank.skills[30:]}
  assert missed == 0
  for q in questions:
    ids = [skill.id for skill in drawn[q.id]]
    assert len(set(ids)) == len(ids) == 3
    assert set(ids) <= far
    assert texts[q.id].splitlines() == [
      prompts.HEADING,
      *map(record.rendered, drawn[q.id]),
    ]
    tokens = words(blocks[q.id])
    assert abs(words(texts[q.id]) - tokens) <= 0.1 * tokens
  # All over the lower half, and for each question anew.
  assert len({skill.id for some in drawn.values() for skill in some}) > 24
  assert len(set(texts.values())) > 35


def test_a_placebo_is_drawn_by_key():
  bank = bank_of(authored(40))
  questions = [question("a"), question("b")]
  shown, blocks = real(bank, questions)
  drawn = placebo(bank, questions, shown, blocks)[0]
  assert placebo(bank, questions, shown, blocks)[0] == drawn
  assert drawn["a"] != drawn["b"]
  alone = placebo(bank, questions[1:], shown, blocks)[0]
  assert alone == {"b": drawn["b"]}  # whatever else is asked
  for other in (dict(seed=2), dict(iteration=3)):
    assert placebo(bank, questions, shown, blocks, **other)[0] != drawn


def test_a_placebo_is_none_of_the_real_ones_and_not_born_from_the_question():
  skills = [
    Skill(f"s{i}", "c", "two words", "t", "e", "a", (), "offline")
    for i in range(7)
  ]
  skills[5] = Skill(
    "s5", "c", "two words", "t", "e", "a", (), "offline", source_seed="here"
  )
  bank = bank_of(skills)
  q = question("q", seed="here")
  shown = {"q": (bank.skills[4],)}
  blocks = {"q": record.block(shown["q"])}
  drawn, _, missed = placebo(bank, [q], shown, blocks)
  # Of seven the lower half are three: s4 is real, s5 born from it.
  assert [skill.id for skill in drawn["q"]] == ["s6"]
  assert missed == 0
  gone = bank_of([*skills[:5], skills[5]])
  assert placebo(gone, [q], shown, blocks) == ({"q": (gone.skills[3],)},) + (
    {"q": record.block([gone.skills[3]])},
    0,
  )


def test_another_number_of_skills_where_no_three_have_the_length():
  short, long = "w " * 10, "w " * 34
  texts = [short] * 3 + [long] * 3
  skills = [
    Skill(f"s{i}", "c", text.strip(), "t", "", "", (), "offline")
    for i, text in enumerate(texts)
  ]
  bank = bank_of(skills)
  q = question("q")
  shown, blocks = real(bank, [q])
  # 4 words of heading; 3 x (10 + 2), so 40 of which 1 x 36 alone is near.
  assert words(blocks["q"]) == 40
  drawn, _, missed = placebo(bank, [q], shown, blocks)
  assert (len(drawn["q"]), missed) == (2, 1)  # as few as may be: not within
  one = {"q": bank.skills[:2]}
  block = record.block([*bank.skills[:2], *bank.skills[:1]])
  assert words(block) == 40
  drawn, _, missed = placebo(bank, [q], one, {"q": block})
  assert (len(drawn["q"]), missed) == (1, 0)


def test_a_block_has_other_tokens_than_its_skills():
  def merged(text):  # as where tokens of several lines become one
    return words(text) - 3 * text.count("\n") ** 2

  bank = bank_of(authored(60))
  questions = [question(f"q{i}") for i in range(40)]
  by_length = sorted(bank.skills[:30], key=lambda s: words(record.rendered(s)))
  shown = {q.id: by_length[14:17] for q in questions}
  blocks = {id: record.block(skills) for id, skills in shown.items()}
  _, texts, missed = arms.placebo(
    bank, questions, Axes(0), blocks, shown, merged, seed=1
  )
  assert missed == 0
  tokens = merged(blocks["q0"])
  for text in texts.values():
    assert abs(merged(text) - tokens) <= 0.1 * tokens


def test_nothing_to_draw_from():
  bank = bank_of(authored(1))
  shown, blocks = real(bank, [question("q")], 1)
  assert placebo(bank, [question("q")], shown, blocks) == ({}, {}, 0)
  bank = bank_of(authored(8))
  assert placebo(bank, [question("q")], {}, {}) == ({}, {}, 0)


FIELDS = ("description", "trigger", "evidence", "avoidance", "templates")


@pytest.mark.parametrize("n", [2, 3, 5])
def test_scrambled_fields_are_all_there_and_none_beside_its_own(n):
  skills = tuple(
    Skill(
      f"s{i}", f"c{i}", f"d{i}", f"t{i}", f"e{i}", f"a{i}", (f"z{i}",), "seed"
    )
    for i in range(n)
  )
  mixed, blocks = arms.scrambled({f"q{j}": skills for j in range(30)}, seed=0)
  for id, found in mixed.items():
    assert [skill.id for skill in found] == [f"s{i}" for i in range(n)]
    for name in FIELDS:
      values = [getattr(skill, name) for skill in found]
      assert sorted(values) == [getattr(skill, name) for skill in skills]
      own = [a == getattr(b, name) for a, b in zip(values, skills, strict=True)]
      assert own == [name == "description"] * n
    assert sorted(blocks[id].split()) == sorted(record.block(skills).split())
  if n > 2:  # by field and by question
    assert len(set(blocks.values())) > 10
    assert any(
      skill.trigger[1:] != skill.evidence[1:]
      for found in mixed.values()
      for skill in found
    )


def test_scrambled_is_keyed_and_leaves_one_skill_alone():
  skills = tuple(authored(3))
  shown = {f"q{j}": skills for j in range(9)}
  once = arms.scrambled(shown, seed=0)
  assert arms.scrambled(shown, seed=0) == once
  assert arms.scrambled({"q3": skills}, seed=0)[1]["q3"] == once[1]["q3"]
  assert arms.scrambled(shown, seed=1) != once
  assert arms.scrambled(shown, seed=0, iteration=1) != once
  alone = {"q": skills[:1], "none": ()}
  assert arms.scrambled(alone, seed=0) == (
    alone,
    {"q": record.block(skills[:1])},
  )


def test_what_is_shown_alone_decides_what_stays():
  skills = tuple(authored(3))
  fields = ("evidence", "avoidance")
  mixed, blocks = arms.scrambled({"q": skills}, fields=fields, seed=0)
  for skill, own in zip(mixed["q"], skills, strict=True):
    assert skill.evidence == own.evidence
    assert skill.avoidance != own.avoidance
  assert "When: " not in blocks["q"]


def test_the_authored_bank_has_room_for_placebos():
  rows = [json.loads(line) for line in SEEDS.read_text().splitlines()]
  bank = bank_of(
    [record.skill_of(row) for row in rows] + authored(142), capacity=800
  )
  questions = [question(f"q{i}") for i in range(64)]
  shown, blocks = real(bank, questions)
  _, texts, missed = placebo(bank, questions, shown, blocks)
  assert (len(texts), missed) == (64, 0)
