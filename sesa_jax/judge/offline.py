"""The offline distiller: rules that turn a failure into a skill, no model.

It sees what any distiller sees, the failure record. What it writes is put
together from what was asked (a date, a person, ...), how (directly, by a
comparison, ...), and what was wrong, read off the prediction, the targets and
the passages. From the question come only plain words, never one that is part of
a name, a title or an answer. Its only word lists are English function words.

A near miss tells what to look for: where the wrong page differs from the
question in one thing, a search for that thing finds the right page. Where a
record has right attempts (`distillation.contrast`), their queries tell it, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sesa_jax.language import ENGLISH, Language
from sesa_jax.types import (
  Case,
  DistillFailure,
  FailureRecord,
  RightAttempt,
  Skill,
)

# What is asked: the pattern that matches earliest, of equals the first.
_ASKED = (
  ("number", r"\bhow (many|much)\b"),
  ("measure", r"\bhow (old|long|far|tall|high|deep|large|big|fast|often)\b"),
  ("date", r"\bwhen\b|\b(what|which) (year|date|day|month|decade|century)\b"),
  ("location", r"\bwhere\b"),
  ("person", r"\b(who|whom|whose)\b"),
  ("reason", r"\bwhy\b"),
  ("name", r"\b(what|which)\b|$"),
)

# How it is asked: the first pattern that matches, and its words in a trigger.
_FORMS = (
  (r"\b\w+er\b.* or |\bor\b.*\?$", "A choice between two"),
  (r"\b(most|least|first|last|only)\b|\bthe \w{3,}est\b", "An extreme"),
  (
    r"\w.*\b(who|whose|whom|that|where)\b|\w.*\w, \w.*\b(which|what)\b",
    "A question of several steps",
  ),
  (r"", "A direct question"),
)

# What was wrong, the most telling first, and what is to be learnt from it:
# description, condition, evidence, avoidance.
_FAULTS = {
  "wordy": (
    "Write the {what} alone, cut out of its sentence.",
    "when the answer stands inside a longer phrase",
    "The shortest span that still names the {what}.",
    "Copying words before and after it.",
  ),
  "cut": (
    "Write the {what} in full.",
    "when the answer has several words",
    "The full form, as the page first writes it.",
    "Keeping one part of a longer answer.",
  ),
  "echo": (
    "The {what} is something that the question does not say.",
    "and its own words come to mind first",
    "A new name or number in a sentence with {cues}.",
    "Answering with words of the question.",
  ),
  "kind": (
    "Check what kind of answer is due: here a {due}.",
    "and the pages hold names and numbers alike",
    "A {due} in the sentence with {cues}.",
    "Giving a {given} instead.",
  ),
  "title": (
    "Read inside the page found: its text has the {what}, its title has not.",
    "and a page of that topic is found",
    "The sentence of its text with {cues}.",
    "Taking the title of a result for the answer.",
  ),
  "hop": (
    "A page found is one step: search from its name for the {what}.",
    "and the first page only leads to it",
    "A second page, about what the first one names, with {cues}.",
    "Stopping at the title of the first page.",
  ),
  "neighbour": (
    "Several candidates share a page: pick the {what} by its own sentence.",
    "and one page lists more than one",
    "{Cues} in the same sentence as the right one.",
    "Taking the candidate {order}.",
  ),
  "decoy": (
    "A near miss: the page tells the {what} of something else, so search on.",
    "and the results are about a similar thing",
    "A page whose subject is the one asked about, with {cues}.",
    "Accepting the only candidate seen.",
  ),
  "memory": (
    "Believe the passages, not memory, for the {what}.",
    "and a passage with the answer has come",
    "{Cues} in a passage, beside the answer.",
    "Writing an answer that no passage contains.",
  ),
  "astray": (
    "Results off the topic: change the query to its rarest word.",
    "and no result speaks of it",
    "A title that repeats the rarest word of the question.",
    "Answering after results about other things.",
  ),
  "unfound": (
    "Do not guess: search anew until a page states the {what}.",
    "and the pages are on the topic but silent on it",
    "A sentence that states it, with {cues} or a synonym.",
    "Answering from memory after {searches}.",
  ),
}

# The lesson of what tells similar pages apart: description, trigger, evidence,
# avoidance, template.
_APART = (
  "Search for the {subject} by its {clue}.",
  "{form} names {a} {subject} ({clue}) and similar pages are found.",
  "A page with the same {clue} as the question.",
  "Taking {a} {subject} with another {clue}.",
  "{{entity}} {clue}",
)

_FUNCTION_WORDS = frozenset(
  """a about after all also am an and any are as at be been before being both
  but by can could did do does during each for from had has have he her him his
  how if in into is it its like many may might more most much must name named
  no not of off on one only or other our out over own same she should so some
  such than that the their them then there these they this those through to too
  under until up used very was we were what when where which while who whom
  whose why will with would you your""".split()
)


@dataclass(frozen=True)
class OfflineDistiller:
  """Rules over the failure record alone; a `types.Distiller`."""

  language: Language = ENGLISH

  @property
  def name(self) -> str:
    """What its skills give as their origin."""
    return "offline"

  def distill_all(self, cases: Sequence[Case]) -> list[Skill | DistillFailure]:
    """Writes a skill from the first record of each case."""
    return [self.distill(case.records[0], case.shown) for case in cases]

  def distill(
    self, record: FailureRecord, shown: Sequence[Skill]
  ) -> Skill | DistillFailure:
    """Writes the skill of the most telling fault that none of `shown` covers.

    Args:
      record: the failure.
      shown: skills that were in the prompt and did not help.

    Returns:
      A skill with id "", or a failure if `shown` covers every fault.
    """
    question = record.question.lower()
    # `min` keeps the first of equals.
    asked, _ = min(_ASKED, key=lambda a: _position(a[1], question))
    form = next(f for p, f in _FORMS if re.search(p, question))
    covered = {skill.category for skill in shown}
    lesson = self._apart(record, form)
    if lesson and lesson.category not in covered:
      return lesson
    for fault in self._faults(record):
      if f"{asked}: {fault}" not in covered:
        return self._write(record, asked, form, fault)
    return DistillFailure("the skills shown cover every fault", outage=False)

  def _apart(self, record: FailureRecord, form: str) -> Skill | None:
    """Writes what tells the right page from the wrong ones, if that shows."""
    subject, told = self._subject(record)
    clues = [self._clue(record, right) for right in record.right]
    clue = next(filter(None, clues), "") or self._difference(record, told)
    if not subject or not clue:
      return None
    a = "an" if subject[0] in "aeiou" else "a"
    slots = dict(subject=subject, clue=clue, form=form, a=a)
    description, trigger, evidence, avoidance, template = (
      text.format(**slots) for text in _APART
    )
    return Skill(
      id="",
      category=f"{subject}: {clue}",
      description=description,
      trigger=trigger,
      evidence=evidence,
      avoidance=avoidance,
      templates=(template,),
      origin=self.name,
      source_question=record.question,
      source_seed=record.seed_id,
      created_at=record.iteration,
    )

  def _clue(self, record: FailureRecord, right: RightAttempt) -> str:
    """The general words of a query that also has a particular one.

    Of the question's words in it, general are those that the right and the
    wrong attempt's pages have; particular those that the right ones alone have.
    """
    wrong_pages, right_pages = (
      {w for p in pages for w in self.language.tokens(p.text)}
      for pages in (record.passages, right.passages)
    )
    asked = set(self.language.tokens(record.question))
    for query in right.queries:
      words = [w for w in self.language.tokens(query) if w in asked]
      words = [w for w in words if w in right_pages]
      general = self._plain(record, [w for w in words if w in wrong_pages])
      if general and set(words) - wrong_pages:
        return " ".join(general)
    return ""

  def _difference(self, record: FailureRecord, told: str) -> str:
    """The general word beside the one that the pages of a near miss lack.

    Of `told`, what the question says of its subject: with `of thin cover` and
    a page on a thick cover that is `cover`. "" where more than one thing, or
    nothing, differs.
    """
    if "decoy" not in self._faults(record):
      return ""
    text = "\n".join(f"{p.title}\n{p.text}" for p in record.passages)
    known = {*self.language.tokens(text), *_FUNCTION_WORDS}
    clues: dict[str, str] = {}  # of each word that the pages lack
    for phrase in re.split(r"[^\w\s'-]+", told):
      words = self.language.words(phrase)
      for i, word in enumerate(words):
        if not known.issuperset(self.language.tokens(word)):
          beside = [*words[max(0, i - 1) : i], *words[i + 1 : i + 2]]
          clues[word] = next(iter(self._plain(record, beside)), "")
    return next(iter(clues.values())) if len(clues) == 1 else ""

  def _subject(self, record: FailureRecord) -> tuple[str, str]:
    """The noun that says what a name is of, and what follows the name.

    That is `lake` and ` in Italy` in `the lake X in Italy`; "" and "" if none.
    """
    for name in self.language.entities(record.question):
      noun = rf"\b(?:the|an?) ([a-z]+) {re.escape(name)}(?!\w)(.*)"
      match = re.search(noun, record.question, re.DOTALL)
      if match and (plain := self._plain(record, [match[1]])):
        return plain[0], match[2]
    return "", ""

  def _faults(self, record: FailureRecord) -> list[str]:
    """Names of `_FAULTS` that the record shows, in that order."""
    tokens = self.language.tokens
    wrong = tokens(record.prediction)
    right = [tokens(target) for target in record.targets]
    found = set()
    if any(_within(target, wrong) for target in right):
      found.add("wordy")
    elif any(_within(wrong, target) for target in right):
      found.add("cut")
    if wrong and set(wrong) <= set(tokens(record.question)):
      found.add("echo")
    if self._kind(record.prediction) != self._kind(record.targets[0]):
      found.add("kind")
    pages = "\n".join(f"{p.title}\n{p.text}" for p in record.passages)
    answer_seen = self.language.mentions_any(pages, record.targets)
    if wrong and wrong in [tokens(p.title) for p in record.passages]:
      found.add("title" if answer_seen else "hop")
    elif wrong and self.language.mentions_any(pages, record.prediction):
      found.add("neighbour" if answer_seen else "decoy")
    elif answer_seen:
      found.add("memory")
    else:
      found.add("unfound" if self._cues(record) else "astray")
    return [fault for fault in _FAULTS if fault in found]

  def _write(
    self, record: FailureRecord, asked: str, form: str, fault: str
  ) -> Skill:
    cues = self._cues(record)[:2]
    words = " and ".join(f'"{cue}"' for cue in cues)
    noun = self._noun(record)
    what = noun or asked
    pages = "\n".join(f"{p.title}\n{p.text}" for p in record.passages).lower()
    reached = pages[: max(0, pages.find(record.prediction.lower()))]
    later = self.language.mentions_any(reached, record.targets)
    slots = dict(
      what=what,
      cues=words or "the words of the question",
      Cues=words or "Words of the question",
      due=self._kind(record.targets[0]),
      given=self._kind(record.prediction),
      order="mentioned last" if later else "mentioned first",
      searches="one look" if record.passages_seen <= 3 else "many results",
    )
    description, condition, evidence, avoidance = (
      text.format(**slots) for text in _FAULTS[fault]
    )
    about = f" ({', '.join(cues)})" if cues else ""
    return Skill(
      id="",
      category=f"{asked}: {fault}",
      description=description,
      trigger=f"{form} asks for the {what}{about} {condition}.",
      evidence=evidence,
      avoidance=avoidance,
      templates=_templates(
        form, fault, " ".join(cues) or noun or "{what is asked}"
      ),
      origin=self.name,
      source_question=record.question,
      source_seed=record.seed_id,
      created_at=record.iteration,
    )

  def _kind(self, text: str) -> str:
    if self.language.normalize_answer(text) in self.language.closed_answers:
      return "yes or no"
    return "number or date" if re.search(r"\d", text) else "name"

  def _plain(self, record: FailureRecord, words: Sequence[str]) -> list[str]:
    """Those words that may be told: in a passage they stand in lower case.

    Part of no name, title or answer, and no function word. A question all in
    lower case hides its names; the passages tell them.
    """
    language = self.language
    named = [*record.targets, record.prediction, *record.other_predictions]
    named += language.entities(record.question)
    seen: set[str] = set()
    for passage in record.passages:
      named += [passage.title, *language.entities(passage.text)]
      seen.update(language.words(passage.text))
    hidden = {token for text in named for token in language.tokens(text)}
    return [
      word
      for word in dict.fromkeys(words)
      if word.isalpha()
      and word.islower()
      and len(word) > 2
      and word in seen - hidden - _FUNCTION_WORDS
    ]

  def _noun(self, record: FailureRecord) -> str:
    """The noun asked for: lake in `Which lake is`; "" if there is none.

    What no function word nor mark follows may be an adjective or a verb.
    """
    match = re.search(
      r"\b(?:[Ww]hich|[Ww]hat)(?:'s| is| was| are| were)?(?: the)? ([a-z]+)"
      r"(?: ([a-z]+)|[?,.]|$)",
      record.question,
    )
    if not match or (match[2] and match[2] not in _FUNCTION_WORDS):
      return ""
    return "".join(self._plain(record, [match[1]]))

  def _cues(self, record: FailureRecord) -> list[str]:
    """Plain words of the question but the noun, the most telling first.

    Those that share a sentence with a target in a passage, then the long ones.
    """
    text = "\n".join(passage.text for passage in record.passages)
    beside = {
      token
      for sentence in re.split(r"(?<=[.!?])\s+|\n", text)
      if self.language.mentions_any(sentence, record.targets)
      for token in self.language.tokens(sentence)
    }
    words = self._plain(record, self.language.words(record.question))
    noun = self._noun(record)
    return sorted(
      (word for word in words if len(word) > 3 and word != noun),
      key=lambda word: (word not in beside, -len(word)),
    )


def _position(pattern: str, text: str) -> int:
  match = re.search(pattern, text)
  return match.start() if match else len(text) + 1


def _within(part: Sequence[str], whole: Sequence[str]) -> bool:
  """Says whether `part` is a proper, unbroken part of `whole`."""
  n = len(part)
  return 0 < n < len(whole) and any(
    list(whole[i : i + n]) == list(part) for i in range(len(whole) - n + 1)
  )


def _templates(form: str, fault: str, topic: str) -> tuple[str, ...]:
  if fault == "astray":
    return ("{rarest word of the question}", f"{{entity}} {topic}")
  if fault == "hop":
    return (f"{{title of the page found}} {topic}",)
  if form == "A choice between two":
    return (f"{{one of the two}} {topic}", f"{{the other}} {topic}")
  if form == "An extreme":
    return (f"list of {{kind}} {topic}",)
  if form == "A question of several steps":
    return ("{the thing described}", f"{{its name}} {topic}")
  return (f"{{entity}} {topic}",)
