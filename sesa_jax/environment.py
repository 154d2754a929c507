"""The actions that a turn may hold, what answers them, how an episode ends.

A turn is text of the policy up to the end of an action, such as
`<think>..</think> <search>query</search>`. What counts is the complete tag
outside `<think>`, in the policy's own tokens of this turn: tags in passages or
prompts are never read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from sesa_jax import prompts
from sesa_jax.language import Language
from sesa_jax.types import Passage, Pause, Reply, SearchEngine, SearchFailure

FINAL = ("answer", "question")  # actions that end an episode
OPEN, CLOSE = "\n\n<information>", "</information>\n\n"  # around what is found
NOTHING = "No passage was found."
# An observation with fewer tokens of passages than this is not worth a turn.
MIN_PASSAGE_TOKENS = 16


@dataclass(frozen=True)
class Action:
  """What a turn's text amounts to."""

  kind: str  # one of the role's actions, "malformed" or "none"
  argument: str = ""
  note: str = ""  # why it is malformed


def parse(
  text: str,
  actions: Sequence[str],
  language: Language,
  *,
  max_answer_words: int,
  max_query_characters: int,
) -> Action:
  """Reads the action of a turn.

  The text is read once from left to right. Inside `<think>` nothing counts but
  `</think>`; a `<think>` that is never closed lasts to the end. Outside it, the
  tags of `actions` and `<information>` count; everything else is plain text,
  also the tags of other roles' actions and a stray `</think>`.

  * A complete tag gives its action; text before it is free, text behind it
    (of a token that reaches over the end) is not read, unless it holds another
    complete tag.
  * Malformed: a tag inside an action's tag, an end without its beginning, a
    beginning without its end, two actions, an `<information>` tag, an empty
    argument, an answer of too many words, a query of too many characters.
  * None: no such tag at all.

  Args:
    text: the policy's own text of one turn.
    actions: tags that the role may use.
    language: counts the words of an answer.
    max_answer_words: of an answer; lists of alternatives fool lenient judges.
    max_query_characters: of a query.

  Returns:
    the action, its argument without surrounding whitespace.
  """
  tag = re.compile(rf"<(/?)(think|information|{'|'.join(actions)})>")
  thinking = False
  begun = None  # match of the beginning of an action
  found: Action | None = None
  for match in tag.finditer(text):
    ends, name = match[1] == "/", match[2]
    if thinking:
      thinking = not (ends and name == "think")
    elif name == "information":
      return Action("malformed", note="wrote <information>")
    elif begun is not None and (not ends or name != begun[2]):
      return Action("malformed", note=f"{match[0]} inside <{begun[2]}>")
    elif name == "think":
      thinking = not ends
    elif not ends:
      begun = match
    elif begun is None:
      return Action("malformed", note=f"</{name}> without <{name}>")
    elif found is not None:
      return Action("malformed", note="two actions in one turn")
    else:
      found = Action(name, text[begun.end() : match.start()].strip())
      begun = None
  if found is None:
    if begun is not None:
      return Action("malformed", note=f"<{begun[2]}> without </{begun[2]}>")
    return Action("none")
  if not found.argument:
    return Action("malformed", note=f"empty <{found.kind}>")
  if found.kind == "answer":
    words = len(language.words(found.argument))
    if words > max_answer_words:
      return Action(
        "malformed",
        found.argument,
        f"an answer of {words} words, more than {max_answer_words}",
      )
  if found.kind == "search" and len(found.argument) > max_query_characters:
    return Action(
      "malformed",
      found.argument,
      f"a query of {len(found.argument)} characters, more than "
      f"{max_query_characters}",
    )
  return found


class SearchQA:
  """Search question answering: `types.Environment` of one role.

  * A search appends `\\n\\n<information>` passages `</information>\\n\\n`.
  * `answer` and `question` end the episode, with their name as its finish.
  * A malformed turn gets a correction, at most `max_malformed` times an
    episode, then ends it as "malformed". A turn that the policy ended without
    an action is malformed too.
  * `Limits.turns` counts actions; corrections are extra. A search in the last
    turn is not executed, because nothing could be done with what it finds: the
    episode ends as "turns".
  * An episode without room for an observation ends as "episode_tokens", a
    turn that was too long as "turn_tokens", unless a complete answer or
    question stands in it.
  * A lost search loses the episode; its error never becomes text.

  Another tool is a subclass with its action in `ROLES`, a line about it in
  `NOTES`, and an `act` that carries it out.
  """

  # What the turns of each role may hold. All but `FINAL` get an observation.
  ROLES: Mapping[str, tuple[str, ...]] = {
    "solver": ("search", "answer"),
    "challenger": ("search", "question"),
    "evidence": ("answer",),
  }
  # What a role's instructions say of them beyond `prompts`.
  NOTES: Mapping[str, str] = {}

  def __init__(
    self,
    role: str,
    search: SearchEngine | None,
    tokenizer: Any,
    language: Language,
    *,
    passages_per_search: int,
    observation_tokens: int,
    max_malformed: int,
    max_answer_words: int,
    max_query_characters: int,
    executor: Executor | None = None,
  ):
    """Sets the rules of a role.

    Args:
      role: one of `ROLES`.
      search: what queries are sent to; None for a role that cannot search.
      tokenizer: a fast tokenizer of transformers.
      language: counts words.
      passages_per_search: passages asked for.
      observation_tokens: of an observation, its tags included.
      max_malformed: malformed turns that an episode survives.
      max_answer_words: of a well-formed answer.
      max_query_characters: of a well-formed query.
      executor: runs searches; None runs them at once, in `respond`.

    Raises:
      ValueError: an unknown role, or observations too short for a passage.
    """
    if role not in self.ROLES:
      roles = ", ".join(self.ROLES)
      raise ValueError(f"Unknown role {role!r}. Choices: {roles}.")
    self._actions = self.ROLES[role]
    self._search = search
    self._tokenizer = tokenizer
    self._language = language
    self._passages = passages_per_search
    self._observation_tokens = observation_tokens
    self._max_malformed = max_malformed
    self._max_answer_words = max_answer_words
    self._max_query_characters = max_query_characters
    self._executor = executor
    self._open, self._close = self._encode(OPEN)[0], self._encode(CLOSE)[0]
    self._least = len(self._open) + len(self._close) + MIN_PASSAGE_TOKENS
    if set(self._actions) - set(FINAL) and observation_tokens < self._least:
      raise ValueError(
        f"environment.observation_tokens={observation_tokens} leaves no room "
        f"for a passage between its tags. Choose at least {self._least}."
      )
    tags = sorted({"think", "information"}.union(*self.ROLES.values()))
    # As text of a passage, control tokens would become control ids.
    self._control = re.compile(
      rf"</?(?:{'|'.join(tags)})>|{prompts.control_tokens(tokenizer)}",
      re.IGNORECASE,
    )

  @property
  def stops(self) -> tuple[str, ...]:
    """The ends of the role's actions."""
    return tuple(f"</{action}>" for action in self._actions)

  def respond(self, pause: Pause) -> Reply | Future[Reply]:
    """Answers a pause; what takes a tool is a future of the executor."""
    action = parse(
      self._tokenizer.decode(
        list(pause.ids),
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
      ),
      self._actions,
      self._language,
      max_answer_words=self._max_answer_words,
      max_query_characters=self._max_query_characters,
    )
    if action.kind in FINAL:
      return Reply("finish", (), action.kind, action.kind, action.argument)
    if pause.reason in ("turn_tokens", "episode_tokens"):
      return Reply("finish", finish=pause.reason)
    if action.kind == "none":
      if pause.reason == "stop":
        return Reply("go_on")  # the stop string stood inside <think>
      action = Action("malformed", note="a turn without an action")
    if action.kind == "malformed":
      return self._correct(pause, action)
    if pause.turn - pause.malformed + 1 >= pause.turns:
      return _unexecuted("turns", action, "in the last turn")
    if pause.room < self._least:
      note = f"with {pause.room} tokens left"
      return _unexecuted("episode_tokens", action, note)
    if self._executor is None:
      return self._observe(action, pause.room)
    return self._executor.submit(self._observe, action, pause.room)

  def act(self, action: Action) -> tuple[Passage, ...] | str | SearchFailure:
    """Carries out an action that does not end the episode.

    Returns:
      Passages, or text, for the observation; a failure loses the episode.
    """
    (found,) = self._search.search([action.argument], self._passages)
    return found

  def _correct(self, pause: Pause, action: Action) -> Reply:
    """Tells the policy what a turn should hold, or gives up."""
    if pause.malformed >= self._max_malformed:
      return _finish("malformed", action, action.note)
    forms = " or ".join(f"<{a}>...</{a}>" for a in self._actions)
    ids, _ = self._encode(
      f"\n\nThat turn was not valid ({action.note}). Write {forms}.\n\n"
    )
    if len(ids) > pause.room:
      return _finish("episode_tokens", action, action.note)
    return Reply(
      "append", ids, "", "malformed", action.argument, note=action.note
    )

  def _observe(self, action: Action, room: int) -> Reply:
    """Acts and renders what is found into at most `room` tokens."""
    found, did = self.act(action), (action.kind, action.argument)
    if isinstance(found, SearchFailure):
      return Reply("lost", (), "lost", *did, note=found.reason)
    passages = ()
    if isinstance(found, str):
      text = prompts.broken(self._control, found)
    else:
      passages = tuple(self._neutral(p) for p in found[: self._passages])
      text = prompts.passages_text(passages) if passages else NOTHING
    ids, ends = self._encode(text)
    budget = min(self._observation_tokens, room)
    kept = min(len(ids), budget - len(self._open) - len(self._close))
    # Tokens that share a character with the first one left out go too.
    while 0 < kept < len(ids) and ends[kept - 1] >= ends[kept]:
      kept -= 1
    # Passages of which nothing was seen are no evidence.
    end = ends[kept - 1] if kept else 0
    before = (prompts.passages_text(passages[:i]) for i in range(len(passages)))
    seen = sum(len(text) + bool(text) < end for text in before)
    return Reply(
      "append",
      (*self._open, *ids[:kept], *self._close),
      "",
      *did,
      passages[:seen],
    )

  def _neutral(self, passage: Passage) -> Passage:
    """Breaks tags and control tokens in a passage: `< search>`."""

    return dataclasses.replace(
      passage,
      title=prompts.broken(self._control, passage.title),
      text=prompts.broken(self._control, passage.text),
    )

  def _encode(self, text: str) -> tuple[tuple[int, ...], list[int]]:
    """Returns ids, and for each the character of the text where it ends."""
    encoded = self._tokenizer(
      text,
      add_special_tokens=False,
      return_offsets_mapping=True,
      verbose=False,
    )
    ends = [end for _, end in encoded["offset_mapping"]]
    return tuple(encoded["input_ids"]), ends


class FreeText:
  """One turn without actions: `types.Environment` of a text written at once.

  A turn that the policy ended is its answer, whatever stands in it.
  """

  def __init__(self, tokenizer: Any):
    self._tokenizer = tokenizer

  @property
  def stops(self) -> tuple[str, ...]:
    """None: it ends with the turn."""
    return ()

  def respond(self, pause: Pause) -> Reply:
    """Ends the episode."""
    if pause.reason != "eos":
      return Reply("finish", finish=pause.reason)
    text = self._tokenizer.decode(list(pause.ids), skip_special_tokens=True)
    return Reply("finish", (), "answer", "answer", text)


def _finish(reason: str, action: Action, note: str) -> Reply:
  return Reply("finish", (), reason, action.kind, action.argument, note=note)


def _unexecuted(reason: str, action: Action, why: str) -> Reply:
  """Ends an episode at a search that is not made, and so is no action."""
  note = f"{action.kind} not executed {why}"
  return Reply("finish", (), reason, "", action.argument, note=note)
