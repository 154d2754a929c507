from __future__ import annotations

import dataclasses

import pytest

from sesa_jax.judge.leaks import leaks
from sesa_jax.language import ENGLISH
from sesa_jax.types import FailureRecord, Passage, RightAttempt, Skill

RECORD = FailureRecord(
  question_id="q",
  seed_id="s",
  question='Which river in Peru, 6992 km long, did Orellana call "the sea"?',
  targets=("Amazon River", "El Río"),
  prediction="Nile",
  other_predictions=(),
  passages=(
    Passage("1", "Mercury (planet)", "Hot."),
    Passage("2", "", "An untitled page."),
    Passage("3", "Sea level", "Flat."),
  ),
  passages_seen=3,
  wrong_attempts=2,
  success_rate=0.5,
  skill_ids=(),
  iteration=1,
)
CLEAN = dict(
  category="bridge",
  description="Name the thing described first.",
  trigger="Which river is asked.",
  evidence="A long one, with its length in km.",
  avoidance="The best known river.",
  templates=("{thing} length", "{thing} river"),
)


def skill(**changes) -> Skill:
  return Skill(id="", origin="chat", **{**CLEAN, **changes})


def test_clean_skill_passes():
  # `Which` opens the sentence, `river` is no target alone, 3 digits are needed.
  assert leaks(skill(), RECORD, ENGLISH) is None
  assert leaks(skill(evidence="About 69 of them."), RECORD, ENGLISH) is None


@pytest.mark.parametrize(
  "field", ["category", "description", "trigger", "evidence", "avoidance"]
)
def test_every_text_is_read(field):
  leaky = skill(**{field: "It is the amazon river."})
  assert leaks(leaky, RECORD, ENGLISH) == "target"


@pytest.mark.parametrize(
  ("text", "reason"),
  [
    ("el río", "target"),
    ("find PERU on a map", "entity"),
    ("over 6992 of them", "entity"),
    ("they said the sea", "entity"),
    ("as Orellana's men", "entity"),
    ("see Mercury (planet)", "title"),
    ("the mercury rises", "title"),
    ("above sea level", "title"),
    # By token boundaries: these only contain the letters.
    ("a peruvian mercurys 16992", None),
    ("level of the seas", None),
  ],
)
def test_reasons_by_token_boundaries(text, reason):
  assert leaks(skill(templates=("{x}", text)), RECORD, ENGLISH) == reason


def test_titles_that_right_attempts_read_are_given_away_too():
  leaky = skill(evidence="See Manaus first.")
  assert leaks(leaky, RECORD, ENGLISH) is None
  right = RightAttempt((), (Passage("4", "Manaus", "A town."),))
  record = dataclasses.replace(RECORD, right=(right,))
  assert leaks(leaky, record, ENGLISH) == "title"
