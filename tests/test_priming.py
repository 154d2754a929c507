from __future__ import annotations

import json

import numpy as np
import pytest

from sesa_jax.retrieval.encoder import HashEncoder
from sesa_jax.skills import bank as skill_bank
from sesa_jax.stages import priming

ENCODER = HashEncoder(64)


def empty(capacity=20):
  return skill_bank.create(capacity, ENCODER.dim)


def test_none_leaves_the_bank_empty():
  bank = empty()
  assert priming.prime(bank, "none", None) == (bank, ())


def test_seeds15():
  bank, events = priming.prime(empty(), "seeds15", ENCODER)
  assert [s.id for s in bank.skills] == [f"seed-{i:03d}" for i in range(1, 16)]
  assert {s.origin for s in bank.skills} == {"seed"}
  assert len({s.category for s in bank.skills}) == 15
  assert [e["event"] for e in events] == ["prime"] * 15
  for row, skill in enumerate(bank.skills):
    # Found by description and trigger, embedded as a passage.
    text = f"{skill.description} {skill.trigger}"
    expected = ENCODER.encode([text], "passage")[0]
    np.testing.assert_array_equal(bank.embeddings[row], expected)
    assert skill.templates
    # A small model reads three of them before its question.
    assert len(skill_bank.rendered(skill).split()) <= 55


def test_authored157_adds_to_the_seeds():
  bank, _ = priming.prime(empty(157), "authored157", ENCODER)
  names = [f"seed-{i:03d}" for i in range(1, 16)]
  names += [f"authored-{i:03d}" for i in range(1, 143)]
  assert [skill.id for skill in bank.skills] == names
  assert [s.origin for s in bank.skills] == ["seed"] * 15 + ["authored"] * 142


def test_mined_takes_the_active_ones_of_a_bank_file(tmp_path):
  path = tmp_path / "skills.jsonl"
  bank, _ = priming.prime(empty(), "seeds15", ENCODER)
  rows = skill_bank.rows(bank)[:3]
  rows[1] |= dict(state="retired", reason="harmful", origin="mined")
  rows[2] |= dict(retrieved=9, helpful=2.5)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  bank, _ = priming.prime(empty(), f"mined:{path}", ENCODER)
  assert [s.id for s in bank.skills] == ["seed-001", "seed-003"]
  assert not np.asarray(bank.retrieved).any()


def test_errors(tmp_path):
  for source in ("seeds", "mined:", ""):
    with pytest.raises(ValueError, match="seeds15, authored157, mined:PATH"):
      priming.prime(empty(), source, ENCODER)
  with pytest.raises(ValueError, match="no such file"):
    priming.prime(empty(), f"mined:{tmp_path / 'x.jsonl'}", ENCODER)
  (tmp_path / "empty.jsonl").write_text("\n")
  with pytest.raises(ValueError, match="no active skill"):
    priming.prime(empty(), f"mined:{tmp_path / 'empty.jsonl'}", ENCODER)
  with pytest.raises(ValueError, match="15 skills.*room for 14"):
    priming.prime(empty(14), "seeds15", ENCODER)
