"""The chat distiller: a model writes the skill that a failure teaches.

What comes back is read field by field. Whether it gives anything away is not
asked of the model: `judge.leaks` looks, for every distiller alike.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Sequence

from sesa_jax import prompts
from sesa_jax.judge import chat
from sesa_jax.types import (
  Case,
  DistillFailure,
  FailureRecord,
  Passage,
  RightAttempt,
  Skill,
)

INSTRUCTIONS = """\
An agent answers questions with a search engine and learns from its failures. \
You are given what it got wrong, and write one skill: a lesson that helps with \
other questions of this kind.

Reply with one JSON object with exactly these fields:
"category": the kind of failure in one to four words.
"description": the lesson, as an instruction.
"trigger": what a question or a search result looks like when the lesson \
applies. It must be visible before the answer is known.
"evidence": the concrete sign in a passage that tells the right answer from \
the usual confusion.
"avoidance": the mistake to avoid, as it was made here.
"templates": a list of at most 3 search queries with slots in braces, such as \
"{person} {role} appointed year".

One sentence of at most 25 words a field. The skill must stand without this \
case: no name, no title, no number, no quotation from question, answers or \
passages. No general advice such as "search carefully": say what to look at. \
No <tags>."""

# Characters at most: three skills share the solver's block.
_LONGEST = {
  "category": 60,
  "description": 300,
  "trigger": 300,
  "evidence": 300,
  "avoidance": 300,
}
_TEMPLATES, _LONGEST_TEMPLATE = 3, 120


def messages(case: Case) -> list[dict[str, str]]:
  """Asks for one skill. All of the case stands in blocks; see `chat.fenced`."""
  blocks = []
  for number, record in enumerate(case.records, 1):
    of = f" {number}" if len(case.records) > 1 else ""
    wrong = (record.prediction, *record.other_predictions)
    blocks += [
      (f"question{of}", record.question),
      (f"right answer{of}", "\n".join(record.targets)),
      (f"wrong answers{of}", "\n".join(wrong)),
      (f"passages read{of}", prompts.passages_text(record.passages)),
    ]
  right = [attempt for record in case.records for attempt in record.right]
  for number, attempt in enumerate(right, 1):
    blocks += [
      (f"right attempt {number}, queries", "\n".join(attempt.queries)),
      (
        f"right attempt {number}, passages",
        prompts.passages_text(attempt.passages),
      ),
    ]
  ask = ["Write the skill that would have prevented this failure."]
  if len(case.records) > 1:
    ask = ["Write the one skill that would have prevented all these failures."]
  if right:
    ask.append(
      "The right attempts show what made the difference: other queries, or "
      "another reading of the same passages."
    )
  if case.shown:
    blocks += [
      (f"skill shown {number}", _shown(skill))
      for number, skill in enumerate(case.shown, 1)
    ]
    ask.append(
      "The skills shown were at hand and did not help. Do not repeat them, in "
      "other words neither: write what they miss."
    )
  text = f"{chat.fenced(blocks)}\n\n{' '.join(ask)}"
  return [
    {"role": "system", "content": INSTRUCTIONS},
    {"role": "user", "content": text},
  ]


def _shown(skill: Skill) -> str:
  lines = [f"{name}: {getattr(skill, name)}" for name in _LONGEST]
  return "\n".join([*lines, f"templates: {'; '.join(skill.templates)}"])


def parse_skill(text: str) -> Skill:
  """Reads a skill, field by field, whitespace folded.

  Returns:
    A skill without id, origin and source.

  Raises:
    ValueError: no JSON object; a field is unknown, missing, of another type,
      blank, too long or holds a tag. Names the field.
  """
  reply = chat.json_object(text)
  names = {*_LONGEST, "templates"}
  if set(reply) != names:
    odd = ", ".join(sorted(set(reply) ^ names))
    raise ValueError(f"these fields are missing or too many: {odd}"[:300])
  fields = {
    name: _field(name, reply[name], longest)
    for name, longest in _LONGEST.items()
  }
  templates = reply["templates"]
  if not isinstance(templates, list) or len(templates) > _TEMPLATES:
    raise ValueError(f'"templates" is no list of at most {_TEMPLATES}')
  return Skill(
    id="",
    origin="",
    templates=tuple(
      _field("templates", item, _LONGEST_TEMPLATE) for item in templates
    ),
    **fields,
  )


def _field(name: str, value: object, longest: int) -> str:
  if not isinstance(value, str):
    raise ValueError(f'"{name}" is no text')
  text = " ".join(value.split())
  if not re.search(r"\w", text):
    raise ValueError(f'"{name}" is empty')
  if len(text) > longest:
    raise ValueError(f'"{name}" has {len(text)} characters, over {longest}')
  if re.search(r"<[^<>]*>", text):
    raise ValueError(f'"{name}" holds a <tag>')
  return text


def digest() -> str:
  """SHA-256 of the prompts, for the manifest."""
  passage = Passage("", "title", "text")
  record = FailureRecord(
    question_id="",
    seed_id="",
    question="question",
    targets=("target",),
    prediction="wrong",
    other_predictions=(),
    passages=(passage,),
    passages_seen=1,
    wrong_attempts=1,
    success_rate=0.5,
    skill_ids=(),
    iteration=0,
  )
  skill = Skill("", *(["text"] * 5), ("template",), "")
  right = RightAttempt(("query",), (passage,))
  asked = [
    messages(Case((record,), ())),
    messages(
      Case((dataclasses.replace(record, right=(right,)),) * 2, (skill,))
    ),
  ]
  return hashlib.sha256(repr(asked).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class ChatDistiller:
  """Skills by a chat model; a `types.Distiller`."""

  chat: chat.Chat
  tokens: int = 1024  # of a reply at most

  @property
  def name(self) -> str:
    """What its skills give as their origin."""
    return "chat"

  def distill(
    self, record: FailureRecord, shown: Sequence[Skill]
  ) -> Skill | DistillFailure:
    """Writes one skill from one record; `shown` are those that did not help."""
    return self.distill_all([Case((record,), tuple(shown))])[0]

  def distill_all(self, cases: Sequence[Case]) -> list[Skill | DistillFailure]:
    """Writes a skill from each case, all at once.

    Returns:
      For each case a skill with id "", its source the first record; or a
      failure, an outage where the case deserves another try.
    """
    replies = self.chat.ask(
      [messages(case) for case in cases], parse_skill, tokens=self.tokens
    )
    return [
      DistillFailure(str(reply), outage=reply.outage)
      if isinstance(reply, chat.Failure)
      else _born(reply, case, self.name)
      for case, reply in zip(cases, replies, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class PolicyDistiller:
  """Skills by the policy itself, asked as the chat model is.

  Args:
    write: the policy's text for each prompt; None where there was no room for
      it, or it came to no end.
  """

  write: Callable[[Sequence[prompts.Prompt]], list[str | None]]

  @property
  def name(self) -> str:
    """What its skills give as their origin."""
    return "solver"

  def distill_all(self, cases: Sequence[Case]) -> list[Skill | DistillFailure]:
    """Writes a skill from each case; there is no second try."""
    asked = [prompt(case) for case in cases]
    return [
      _read(text, case, self.name)
      for case, text in zip(cases, self.write(asked), strict=True)
    ]


def prompt(case: Case) -> prompts.Prompt:
  """Asks a policy for one skill, in the words of `messages`."""
  _, user = messages(case)
  return prompts.Prompt("distiller", INSTRUCTIONS, user["content"])


def _read(text: str | None, case: Case, name: str) -> Skill | DistillFailure:
  if text is None:
    return DistillFailure("length: no end of it", outage=False)
  try:
    return _born(parse_skill(text), case, name)
  except ValueError as error:
    return DistillFailure(f"malformed: {error}", outage=False)


def _born(skill: Skill, case: Case, name: str) -> Skill:
  first = case.records[0]
  return dataclasses.replace(
    skill,
    origin=name,
    source_question=first.question,
    source_seed=first.seed_id,
    created_at=first.iteration,
  )
