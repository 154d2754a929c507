"""Stage 1, memory priming: fills the first bank, once."""

from __future__ import annotations

from pathlib import Path

from sesa_jax.skills import bank as skill_bank
from sesa_jax.types import Encoder, Skill

SOURCES = ("none", "seeds15", "authored157", "mined:PATH")

SEEDS = Path(skill_bank.__file__).with_name("seeds.jsonl")
AUTHORED = SEEDS.with_name("authored.jsonl")


def prime(
  bank: skill_bank.SkillBank,
  source: str,
  encoder: Encoder,
  iteration: int = 0,
) -> tuple[skill_bank.SkillBank, skill_bank.Events]:
  """Puts a source's skills into a bank.

  Args:
    bank: an empty bank.
    source: "none"; "seeds15", 15 general skills written by hand;
      "authored157", those and 142 more written by hand, none of them mined; or
      "mined:PATH", those active in a file of skills.
    encoder: embeds them.
    iteration: they are created at.

  Returns:
    The primed bank and its events.

  Raises:
    ValueError: an unknown source (lists those that exist), a file that is
      missing or malformed, or more skills than the bank's capacity.
  """
  skills = read(source)
  if not skills:
    return bank, ()
  texts = [skill_bank.embedded_text(skill) for skill in skills]
  vectors = encoder.encode(texts, "passage")
  return skill_bank.prime(bank, skills, vectors, iteration)


def read(source: str) -> tuple[Skill, ...]:
  """Returns the skills of a source; for a check before a run, too.

  Raises:
    ValueError: as `prime`.
  """
  if source == "none":
    return ()
  if source == "seeds15":
    paths = [SEEDS]
  elif source == "authored157":
    paths = [SEEDS, AUTHORED]
  elif source.startswith("mined:") and source != "mined:":
    paths = [Path(source.removeprefix("mined:"))]
  else:
    raise ValueError(
      f"Unknown bank.prime {source!r}. Choices: {', '.join(SOURCES)}."
    )
  skills = tuple(
    record.skill
    for path in paths
    for record in skill_bank.load(path)
    if record.state == "active"
  )
  if not skills:
    raise ValueError(
      f"{paths[0]} holds no active skill. For an empty bank set "
      "bank.prime='none'."
    )
  return skills
