"""The one place where prompts are written and rendered.

Training, evaluation and demos render here, once an episode: what follows the
prompt is appended as ids and never rendered again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jinja2

from sesa_jax import types

TEMPLATES = ("native", "search_r1", "ssp", "bare")
_WAY_OUT = (
  "Correct it, or set policy.template to 'search_r1', which needs no system "
  "turn, or 'ssp', which needs no chat template."
)
_TURN = "<|im_start|>"  # opens a turn of `ssp`, with any tokenizer

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
  ask: str  # what the role is asked
  before: str = ""  # skills or passages

  @property
  def user(self) -> str:
    """The message of the user, what is asked last."""
    return "\n\n".join(filter(None, (self.before, self.ask)))


def solver(question: str, skills: str = "") -> Prompt:
  """Asks for an answer; `skills` is a rendered block, or empty."""
  role = "solver with skills" if skills else "solver"
  return Prompt(role, SOLVER, f"Question: {question}", skills)


def challenger(seed: types.Seed, searches: int) -> Prompt:
  """Asks for a question. No bank is in the challenger's reach."""
  system = CHALLENGER.format(
    searches=_COUNTS.get(searches, f"at least {searches} times"),
    hops="one fact" if seed.hops == 1 else f"{seed.hops} facts in a row",
  )
  ask = f"Answer: {seed.targets[0]}\nHops: {seed.hops}"
  return Prompt("challenger", system, ask)


def evidence(question: str, passages: Sequence[types.Passage]) -> Prompt:
  """Asks for an answer from passages alone, for the evidence check."""
  ask = f"Question: {question}"
  return Prompt("evidence", EVIDENCE, ask, passages_text(passages))


def with_note(prompt: Prompt, notes: Mapping[str, str]) -> Prompt:
  """Adds what an environment says to a role, of actions of its own."""
  note = notes.get(prompt.role.removesuffix(" with skills"), "")
  return prompt._replace(system=f"{prompt.system} {note}") if note else prompt


def passages_text(passages: Sequence[types.Passage]) -> str:
  """Renders passages as Search-R1 does, a line each."""
  return "\n".join(
    f"Doc {i}(Title: {passage.title}) {passage.text}"
    for i, passage in enumerate(passages, 1)
  )


def control_tokens(tokenizer) -> str:
  """A pattern of the tokens that are not for text: they open or end turns."""
  special = [
    token.content
    for token in tokenizer.added_tokens_decoder.values()
    if token.special
  ]
  return "|".join(map(re.escape, dict.fromkeys((_TURN, *special))))


def broken(pattern: re.Pattern, text: str) -> str:
  """Puts a space behind the first character of each match: `< |im_end|>`."""
  return pattern.sub(lambda m: f"{m[0][0]} {m[0][1:]}", text)


def check(tokenizer, template: str, example: bool) -> None:
  """Refuses what `render` cannot do.

  Raises:
    ValueError: an unknown template, or worked episodes without a chat.
  """
  if template not in TEMPLATES:
    raise ValueError(
      f"Unknown template {template!r}. Choices: {', '.join(TEMPLATES)}."
    )
  if example and not (template == "native" and tokenizer.chat_template):
    has = "a" if tokenizer.chat_template else "no"
    raise ValueError(
      "policy.example shows worked episodes as turns of a chat: it needs "
      "policy.template 'native' and a tokenizer with a chat template. This is "
      f"{template!r}, and the tokenizer has {has} chat template. Set "
      "policy.example to False."
    )


def check_template(tokenizer, template: str, example: bool) -> None:
  """Renders a prompt once, and looks for what must stand in it.

  Raises:
    ValueError: see `check`; the chat template fails, or leaves out the system
      text or the question.
  """
  prompt = solver("Who wrote Hamlet?")
  text = tokenizer.decode(render(tokenizer, prompt, template, example))
  parts = {"system text": prompt.system, "question": prompt.ask}
  if template == "bare":
    del parts["system text"]
  for name, part in parts.items():
    if part not in text:
      raise ValueError(
        f"The tokenizer's chat template leaves out the {name} of a prompt "
        f"(policy.template {template!r}). {_WAY_OUT}"
      )


def render(
  tokenizer, prompt: Prompt, template: str = "native", example: bool = False
) -> tuple[int, ...]:
  """Renders a prompt to the ids that an episode begins with.

  * `native`: system and user through the backbone's own chat template, with
    thinking off, since our <think> tags are plain text. A base model without
    a chat template gets the raw text of `search_r1`.
  * `search_r1`: one message of the user, the instructions and what is asked in
    one paragraph, through the chat template; without one, as raw text.
  * `ssp`: `<|im_start|>ROLE\\n` and the text for system and user, then an open
    turn of the assistant. No turn has an end. The marker is one id where the
    tokenizer has it, and plain text where not.
  * `bare`: what is asked and no instructions, as raw text; for policies that
    learned from episodes what to do with it.

  Raw text begins with the one id that the tokenizer puts before any text, if
  it puts one (Llama's <|begin_of_text|>); a chat template writes its own.

  Args:
    tokenizer: of the backbone.
    prompt: of this module.
    template: one of `TEMPLATES`.
    example: show worked episodes before, as turns of the chat.

  Returns:
    ids, up to and including the header of the assistant's turn.

  Raises:
    ValueError: see `check`; or the chat template fails.

  Sources: Jin et al. 2025, arXiv 2503.09516 (`search_r1`), and Search
  Self-play, arXiv 2510.18821 (`ssp`): who says what; the words are ours.
  """
  check(tokenizer, template, example)
  # A question that a policy wrote, say, must not open another turn.
  control = re.compile(control_tokens(tokenizer))
  prompt = prompt._replace(
    ask=broken(control, prompt.ask), before=broken(control, prompt.before)
  )
  if template == "ssp":
    turns = (
      f"system\n{prompt.system}",
      f"user\n{prompt.user}",
      "assistant\n",
    )
    return tuple(tokenizer.encode("".join(_TURN + turn for turn in turns)))
  if template == "bare":
    return tuple(tokenizer.encode(bare(prompt)))
  paragraph = prompt._replace(ask=f"{prompt.system} {prompt.ask}").user
  if not tokenizer.chat_template:
    return tuple(tokenizer.encode(f"{paragraph}\n"))
  if template == "search_r1":
    return _chat(tokenizer, [("user", paragraph)])
  turns = [("system", prompt.system)]
  for user, assistant in _EXAMPLES.get(prompt.role, ()) if example else ():
    turns += [("user", user), ("assistant", assistant)]
  return _chat(tokenizer, [*turns, ("user", prompt.user)])


def bare(prompt: Prompt) -> str:
  """Returns the text of the template `bare`."""
  return f"{prompt.user}\n"


def _chat(tokenizer, turns: Sequence[tuple[str, str]]) -> tuple[int, ...]:
  try:
    ids = tokenizer.apply_chat_template(
      [{"role": role, "content": content} for role, content in turns],
      add_generation_prompt=True,
      enable_thinking=False,
      return_dict=False,
    )
  except jinja2.TemplateError as error:
    said = " ".join(str(error).split())
    raise ValueError(
      f"The tokenizer's chat template fails: {said}. {_WAY_OUT}"
    ) from error
  return tuple(ids)


def digest(
  tokenizer, template: str, notes: Mapping[str, str]
) -> dict[str, str]:
  """Returns SHA-256 hashes of prompts and template, for the manifest."""
  parts = (SOLVER, CHALLENGER, EVIDENCE, str(_EXAMPLES), *notes.values())
  texts = "\0".join(parts)
  layout = f"{template}\0{tokenizer.chat_template}"
  return {
    "prompts": hashlib.sha256(texts.encode()).hexdigest(),
    "template": hashlib.sha256(layout.encode()).hexdigest(),
  }
