"""The one place where prompts are written and rendered.

Training, evaluation and demos render here, once an episode: what follows the
prompt is appended as ids and never rendered again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from sesa_jax import types

TEMPLATES = ("native",)

SOLVER = """\
You answer questions with a search engine. Write <search>a few words</search> \
and passages come back inside <information>. Search again if they do not tell. \
Then write <answer>the short answer</answer>. You may think inside <think> \
</think> first."""

CHALLENGER = """\
You write a quiz question for a given answer. Write <search>a few \
words</search> and passages come back inside <information>. Search \
{searches}, with other words each time. Then write <question>one question of \
10 to 60 words that the passages answer, that needs {hops}, and that does not \
contain the answer</question>. You may think inside <think> </think> first."""

EVIDENCE = """\
Answer the question from the passages alone. Write only <answer>the short \
answer</answer>."""

HEADING = "Lessons from earlier questions:"  # of the skills that are shown

_COUNTS = {1: "at least once", 2: "at least twice"}

# Worked episodes of each role, shown as earlier turns of the chat to policies
# that are too small to follow a description.
_DOC = (
  "Doc 1(Title: Canberra) Canberra is the capital city of Australia. It was "
  "founded in 1913 and lies between Sydney and Melbourne."
)
_ARTIST = (
  "Doc 1(Title: Michelangelo) Michelangelo was an Italian sculptor. He painted "
  "the ceiling of the Sistine Chapel in Rome."
)
_FOUND = "\n\n<information>{}</information>\n\n"
_ASKED = "Question: Which city is the capital of Australia?"
_SOLVED = (
  f"<search>capital city of Australia</search>{_FOUND.format(_DOC)}"
  "<answer>Canberra</answer>"
)
_EXAMPLES = {
  "solver": ((_ASKED, _SOLVED),),
  # A block that the example lacks makes small models forget the format.
  "solver with skills": (
    (
      f"{HEADING}\nSearch for the name and what is asked of it.\n\n{_ASKED}",
      _SOLVED,
    ),
  ),
  "challenger": (
    (
      "Answer: Michelangelo\nHops: 1",
      f"<search>Michelangelo</search>{_FOUND.format(_ARTIST)}"
      "<question>Which Italian sculptor painted the ceiling of the Sistine "
      "Chapel in Rome?</question>",
    ),
    (
      "Answer: Canberra\nHops: 1",
      f"<search>Canberra</search>{_FOUND.format(_DOC)}"
      "<question>Which city, founded in 1913 and lying between Sydney and "
      "Melbourne, is the capital of Australia?</question>",
    ),
  ),
  "evidence": ((f"{_DOC}\n\n{_ASKED}", "<answer>Canberra</answer>"),),
}


class Prompt(NamedTuple):
  """The texts of a prompt, before a template makes ids of them."""

  role: str  # names its worked episodes
  system: str
  user: str


def solver(question: str, skills: str = "") -> Prompt:
  """Asks for an answer; `skills` is a rendered block, or empty."""
  ask = f"Question: {question}"
  if not skills:
    return Prompt("solver", SOLVER, ask)
  return Prompt("solver with skills", SOLVER, f"{skills}\n\n{ask}")


def challenger(seed: types.Seed, searches: int) -> Prompt:
  """Asks for a question. No bank is in the challenger's reach."""
  system = CHALLENGER.format(
    searches=_COUNTS.get(searches, f"at least {searches} times"),
    hops="one fact" if seed.hops == 1 else f"{seed.hops} facts in a row",
  )
  user = f"Answer: {seed.targets[0]}\nHops: {seed.hops}"
  return Prompt("challenger", system, user)


def evidence(question: str, passages: Sequence[types.Passage]) -> Prompt:
  """Asks for an answer from passages alone, for the evidence check."""
  user = f"{passages_text(passages)}\n\nQuestion: {question}"
  return Prompt("evidence", EVIDENCE, user)


def passages_text(passages: Sequence[types.Passage]) -> str:
  """Renders passages as Search-R1 does, a line each."""
  return "\n".join(
    f"Doc {i}(Title: {passage.title}) {passage.text}"
    for i, passage in enumerate(passages, 1)
  )


def control_tokens(tokenizer) -> str:
  """A pattern of the tokenizer's special tokens, which are not for text."""
  special = [
    token.content
    for token in tokenizer.added_tokens_decoder.values()
    if token.special
  ]
  return "|".join(map(re.escape, special))


def broken(pattern: re.Pattern, text: str) -> str:
  """Puts a space behind the first character of each match: `< |im_end|>`."""
  return pattern.sub(lambda m: f"{m[0][0]} {m[0][1:]}", text)


def render(
  tokenizer, prompt: Prompt, template: str = "native", example: bool = False
) -> tuple[int, ...]:
  """Renders a prompt to the ids that an episode begins with.

  Args:
    tokenizer: of the backbone, with its own chat template.
    prompt: of this module.
    template: "native", the backbone's chat template.
    example: show worked episodes before, as turns of the chat.

  Returns:
    ids, up to and including the header of the assistant's turn.

  Raises:
    ValueError: an unknown template, or the tokenizer has no chat template.
  """
  if template not in TEMPLATES:
    raise ValueError(
      f"Unknown template {template!r}. Choices: {', '.join(TEMPLATES)}."
    )
  if not tokenizer.chat_template:
    raise ValueError(
      "The tokenizer has no chat template, which template 'native' needs. "
      "Take an instruction-tuned backbone."
    )
  control = re.compile(control_tokens(tokenizer))
  turns = [("system", prompt.system)]
  for user, assistant in _EXAMPLES[prompt.role] if example else ():
    turns += [("user", user), ("assistant", assistant)]
  # A question that a policy wrote, say, must not open another turn.
  turns.append(("user", broken(control, prompt.user)))
  ids = tokenizer.apply_chat_template(
    [{"role": role, "content": content} for role, content in turns],
    add_generation_prompt=True,
    enable_thinking=False,  # our <think> tags are plain text
    return_dict=False,
  )
  return tuple(ids)


def digest(tokenizer, template: str) -> dict[str, str]:
  """Returns SHA-256 hashes of prompts and template, for the manifest."""
  texts = "\0".join((SOLVER, CHALLENGER, EVIDENCE, str(_EXAMPLES)))
  layout = f"{template}\0{tokenizer.chat_template}"
  return {
    "prompts": hashlib.sha256(texts.encode()).hexdigest(),
    "template": hashlib.sha256(layout.encode()).hexdigest(),
  }
