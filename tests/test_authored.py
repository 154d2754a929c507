"""The authored skills, the questions for them, and the admission threshold."""

from __future__ import annotations

import collections
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import admission
from configs import common
from sesa_jax.data import benchmarks
from sesa_jax.judge import leaks
from sesa_jax.language import ENGLISH, question_key
from sesa_jax.retrieval import encoder
from sesa_jax.skills import bank as skill_bank
from sesa_jax.types import Question

TESTS = Path(__file__).parent
SKILLS = Path(skill_bank.__file__).parent
ASSETS = Path(
  os.environ.get("SESA_JAX_ASSETS") or Path.home() / ".cache" / "sesa_jax"
)
THRESHOLD = common.minilm().threshold  # as calibrated here
ROUNDED = 0.00051  # the docs give three digits


def rows(name: str) -> list[dict]:
  text = (TESTS / name).read_text(encoding="utf-8")
  return [json.loads(line) for line in text.splitlines()]


def authored157():
  files = ("seeds.jsonl", "authored.jsonl")
  return [r.skill for name in files for r in skill_bank.load(SKILLS / name)]


# --- what is written -------------------------------------------------------


def test_157_skills_of_at_least_40_categories():
  skills = authored157()
  assert [s.id for s in skills] == [
    *(f"seed-{i:03d}" for i in range(1, 16)),
    *(f"authored-{i:03d}" for i in range(1, 143)),
  ]
  assert [s.origin for s in skills] == ["seed"] * 15 + ["authored"] * 142
  categories = collections.Counter(s.category for s in skills)
  assert len(categories) >= 40
  assert max(categories.values()) <= 4


@pytest.mark.parametrize("skill", authored157(), ids=lambda s: s.id)
def test_a_skill_is_whole_short_and_general(skill):
  for text in leaks.text_fields(skill):
    assert text == text.strip() != ""
    # Neither names nor quotations nor years: nothing of one question.
    assert ENGLISH.entities(text) == ()
  for field in ("description", "trigger", "evidence", "avoidance"):
    assert re.fullmatch(r"[A-Z][^{}]*\.", getattr(skill, field))
  assert 1 <= len(skill.templates) <= 3
  for template in skill.templates:
    assert re.search(r"\{[a-z' -]+\}", template)
    assert not re.search(r"[{}]", re.sub(r"\{[^{}]+\}", "", template))
  # Three of them fit bank.block_tokens = 512 at two tokens a word.
  assert len(skill_bank.rendered(skill).split()) <= 75


def test_no_text_is_written_twice():
  skills = authored157()
  for field in ("description", "trigger", "evidence", "avoidance"):
    texts = [question_key(getattr(skill, field)) for skill in skills]
    assert len(set(texts)) == len(texts), field


def test_each_skill_has_two_questions_and_a_near_miss():
  found = rows("authored_questions.jsonl")
  assert [row["id"] for row in found] == [s.id for s in authored157()]
  assert {tuple(row) for row in found} == {("id", "for", "not_for")}
  assert {len(row["for"]) for row in found} == {2}
  texts = [question_key(q) for row in found for q in questions_of(row)]
  assert len(set(texts)) == len(texts) == 157 * 3


def questions_of(row: dict) -> list[str]:
  return [*row["for"], row["not_for"]]


def test_pairs_are_30_and_30_held_out_15_and_15():
  seen = set()
  bank = {skill_bank.embedded_text(skill) for skill in authored157()}
  for name, count in (("restatements", 30), ("restatements_heldout", 15)):
    found = rows(f"{name}.jsonl")
    assert {tuple(row) for row in found} == {("same", "first", "second")}
    kinds = collections.Counter(row["same"] for row in found)
    assert kinds == {True: count, False: count}
    assert all(row["first"] != row["second"] for row in found)
    texts = {row[key] for row in found for key in ("first", "second")}
    assert not texts & seen
    assert not texts & bank
    seen |= texts


def test_the_best_threshold_by_hand():
  same = np.array([0.5, 0.72, 0.8], np.float32)
  different = np.array([0.2, 0.6, 0.7, 0.9], np.float32)
  # At the threshold is admitted; shares are of each kind's own number.
  assert admission.errors(same, different, 0.7) == (1 / 3, 1 / 4)
  assert admission.errors(same, different, 0.5) == (1 / 3, 3 / 4)
  # From .700 to .715 the sum is 1/3 + 1/4, everywhere else more.
  assert admission.best_threshold(same, different) == 0.71


# --- with MiniLM -----------------------------------------------------------


@pytest.fixture(scope="module")
def minilm():
  folder = ASSETS / "all-minilm-l6-v2"
  if not (folder / "model.safetensors").is_file():
    pytest.skip("all-minilm-l6-v2 is not in the assets folder")
  return encoder.load(folder, query_prefix="", passage_prefix="")


@pytest.fixture(scope="module")
def doc() -> str:
  text = (TESTS.parent / "docs" / "skills.md").read_text(encoding="utf-8")
  return " ".join(text.split())


def numbers(doc: str, row: str) -> list[float]:
  """The numbers of a table's one row."""
  (found,) = re.findall(rf"\| {re.escape(row)} \|([\d. |]+?)\|(?! [.\d])", doc)
  return [float(cell) for cell in found.split("|")]


def stated(doc: str, words: str) -> float:
  """The one number that stands in the place of `#`."""
  before, after = map(re.escape, words.split("#"))
  (found,) = re.findall(rf"{before}(\.\d+){after}", doc)
  return float(found)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "label"),
  [("restatements", "calibration"), ("restatements_heldout", "held out")],
)
def test_the_docs_state_the_errors(minilm, doc, name, label):
  pairs = admission.cosines(TESTS / f"{name}.jsonl", minilm)
  for threshold in (0.5, THRESHOLD, 0.6, 0.65, 0.7, 0.75):
    expected = admission.errors(*pairs, threshold)
    found = numbers(doc, f"{label}, at {threshold:.3f}".replace("0.", "."))
    assert found == pytest.approx(expected, abs=ROUNDED), threshold


@pytest.mark.slow
def test_the_threshold_is_the_best_on_the_calibration_pairs(minilm):
  pairs = admission.cosines(TESTS / "restatements.jsonl", minilm)
  assert admission.best_threshold(*pairs) == THRESHOLD


@pytest.mark.slow
def test_a_bank_treats_the_held_out_pairs_at_those_rates(minilm):
  path = TESTS / "restatements_heldout.jsonl"
  two = authored157()[:2]  # ids; what counts are the embeddings
  admitted = {True: 0, False: 0}
  for row in rows(path.name):
    bank = skill_bank.create(2, minilm.dim)
    vectors = minilm.encode([row["first"], row["second"]], "passage")
    bank, _ = skill_bank.admit(bank, two, vectors, THRESHOLD, 0)
    admitted[row["same"]] += len(bank.skills) == 2
  missed, rejected = admission.errors(
    *admission.cosines(path, minilm), THRESHOLD
  )
  assert admitted[True] == round(15 * missed)
  assert admitted[False] == 15 - round(15 * rejected)


@pytest.fixture(scope="module")
def bank(minilm):
  """All 157, admitted one by one as any other skill would be."""
  skills = authored157()
  texts = [skill_bank.embedded_text(skill) for skill in skills]
  bank = skill_bank.create(800, minilm.dim)
  vectors = minilm.encode(texts, "passage")
  bank, events = skill_bank.admit(bank, skills, vectors, THRESHOLD, 0)
  assert [e for e in events if e["event"] != "admit"] == []
  return bank


@pytest.mark.slow
def test_none_restates_another(bank, doc):
  assert len(bank.skills) == 157
  vectors = np.asarray(bank.embeddings)[:157]
  nearest = (vectors @ vectors.T - 2 * np.eye(157)).max()
  assert nearest <= THRESHOLD
  expected = pytest.approx(nearest, abs=ROUNDED)
  assert stated(doc, "the nearest two have a cosine of #.") == expected


@pytest.mark.slow
def test_the_docs_state_how_often_a_skill_is_found(bank, minilm, doc):
  found = rows("authored_questions.jsonl")

  def top(texts):
    asked = [Question(t, t, ("x",), 1, "", "") for t in texts]
    shown = skill_bank.top(bank, asked, minilm, 3)
    return [[skill.id for skill in shown[text]] for text in texts]

  hits = np.array(
    [
      [row["id"] in ids for row, ids in zip(found, top(texts), strict=True)]
      for texts in zip(*(row["for"] for row in found), strict=True)
    ]
  )  # [2, 157]
  for label, part in (
    ("the 15 seeds", hits[:, :15]),
    ("the 142 others", hits[:, 15:]),
    ("all 157", hits),
  ):
    expected = [*part.mean(1), part.mean()]
    assert numbers(doc, label) == pytest.approx(expected, abs=ROUNDED)
  assert hits.mean() >= 0.7
  first = [ids[0] for ids in top([row["not_for"] for row in found])]
  another = np.mean([i != r["id"] for i, r in zip(first, found, strict=True)])
  expected = pytest.approx(another, abs=ROUNDED)
  assert stated(doc, "For # of the near misses") == expected
  assert another >= 0.7


@pytest.mark.slow
def test_no_question_is_one_of_a_benchmark():
  files = sorted((ASSETS / "open-qa").glob("*.txt"))
  if not files:
    pytest.skip("open-qa is not in the assets folder")
  ours = {
    question_key(q)
    for row in rows("authored_questions.jsonl")
    for q in questions_of(row)
  }
  for path in files:
    theirs = {question_key(q.text) for q in benchmarks.load_questions(path)}
    assert not ours & theirs, path
