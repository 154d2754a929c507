"""The leak guard: a skill holds neither its question's answer nor its entities.

Every skill that is born from a failure passes here before it may be admitted.
"""

from __future__ import annotations

from sesa_jax.language import Language
from sesa_jax.types import FailureRecord, Skill

REASONS = ("target", "entity", "title")


def leaks(
  skill: Skill, record: FailureRecord, language: Language
) -> str | None:
  """Says what a skill gives away of the failure that it was born from.

  Looked for at token boundaries in each text of the skill: targets and aliases;
  what `language.entities` finds in the question; titles of the passages shown,
  also without a closing parenthesis: `Mercury (planet)` is given away by
  `Mercury`.

  Returns:
    One of REASONS, the first that applies, or None.
  """
  texts = text_fields(skill)
  read = [record.passages, *(attempt.passages for attempt in record.right)]
  titles = [passage.title for passages in read for passage in passages]
  titles += [title.partition(" (")[0] for title in titles]
  for reason, phrases in (
    ("target", record.targets),
    ("entity", language.entities(record.question)),
    ("title", titles),
  ):
    phrases = [phrase for phrase in phrases if phrase.strip()]
    if any(language.mentions_any(text, phrases) for text in texts):
      return reason
  return None


def text_fields(skill: Skill) -> tuple[str, ...]:
  """Everything of a skill that a solver or an encoder may read."""
  return (
    skill.category,
    skill.description,
    skill.trigger,
    skill.evidence,
    skill.avoidance,
    *skill.templates,
  )
