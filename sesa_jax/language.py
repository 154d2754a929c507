"""What depends on the language of questions and answers.

Counting words, comparing answers, and finding what would give an answer away.
Another language is another class with the methods of `Language`.
"""

from __future__ import annotations

import re
import string
import unicodedata
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

# A word is letters and digits of any script; marks inside it do not split it,
# but commas and slashes do, so that `Paris/London/Rome` counts as three.
_WORD = re.compile(r"[^\W_]+(?:['’\-.&][^\W_]+|,\d+)*")
_TOKEN = re.compile(r"[^\W_]+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_QUOTED = re.compile(r"\"([^\"\n]+)\"|“([^”\n]+)”|«([^»\n]+)»|‘([^’\n]+)’")
_POSSESSIVE = re.compile(r"['’]s?$")
_SENTENCE_END = re.compile(r"[.!?…:]['\"”’)\]]*\s|\n")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Language(Protocol):
  """Rules of one language; see `English`."""

  # Words of a closed question. They match as a whole answer or not at all.
  closed_answers: frozenset[str]

  def words(self, text: str) -> list[str]:
    """Returns the words of a text, for counting."""
    ...

  def tokens(self, text: str) -> list[str]:
    """Returns what is compared when texts are searched for names."""
    ...

  def normalize_answer(self, text: str) -> str:
    """Returns the form in which answers are compared."""
    ...

  def contains_any(self, text: str, targets: Any) -> bool:
    """Says whether a target occurs in a text, even inside a word."""
    ...

  def mentions_any(self, text: str, phrases: Any) -> bool:
    """Says whether a phrase occurs in a text at token boundaries."""
    ...

  def entities(self, text: str) -> tuple[str, ...]:
    """Finds what names something."""
    ...


def question_key(text: str) -> str:
  """Returns the form in which two questions count as the same one."""
  return " ".join(ENGLISH.tokens(text))


def as_targets(value: Any) -> tuple[str, ...]:
  """Reads an answer and its aliases from what data files and arrays hold.

  Args:
    value: a string, or a list, tuple or numpy array of strings. They mean the
      same; in particular a string is one answer, not its characters.

  Returns:
    the answers without surrounding whitespace, without repeats, in order.

  Raises:
    ValueError: another type, an answer that is not text, or none at all.
  """
  if isinstance(value, np.ndarray):
    value = value.tolist()
  items = [value] if isinstance(value, str) else value
  if not isinstance(items, list | tuple):
    raise ValueError(
      f"Answers are a string or a list of strings, not {value!r} of type "
      f"{type(value).__name__}."
    )
  for item in items:
    if not isinstance(item, str):
      raise ValueError(
        f"An answer is a string, not {item!r} of type {type(item).__name__}. "
        f"Write numbers and dates in quotes."
      )
  targets = tuple(dict.fromkeys(t for item in items if (t := item.strip())))
  if not targets:
    raise ValueError(f"No answer in {value!r}; at least one is needed.")
  return targets


def fold(text: str) -> str:
  """Folds case, compatibility forms of Unicode and runs of whitespace."""
  return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


@dataclass(frozen=True)
class English:
  """English: SQuAD's answer normalisation, entities by capital letters."""

  articles: frozenset[str] = frozenset({"a", "an", "the"})
  closed_answers: frozenset[str] = frozenset({"yes", "no", "noanswer"})
  # May stand inside a name: Lord of the Rings, Ludwig van Beethoven.
  connectors: frozenset[str] = frozenset(
    "of the de la le du da di del der den von van al bin".split()
  )
  # A full stop after these, or after a single letter, ends no sentence.
  abbreviations: frozenset[str] = frozenset(
    "mr mrs ms dr st prof sr jr vs no mt gen sgt lt col capt rev hon".split()
  )

  def words(self, text: str) -> list[str]:
    """Returns the words of a text, for counting."""
    return _WORD.findall(text)

  def tokens(self, text: str) -> list[str]:
    """Returns case-folded runs of letters and digits, for comparing."""
    return _TOKEN.findall(fold(text))

  def normalize_answer(self, text: str) -> str:
    """Lower-cases, drops punctuation and articles, collapses whitespace.

    SQuAD's rule (Rajpurkar et al. 2016), but for text of which that leaves
    nothing: the answer `A` (a vitamin) keeps its article and `?` its mark, so
    that an empty prediction equals no answer.
    """
    lower = text.lower()
    kept = lower.translate(_PUNCTUATION)
    # The word boundaries of a regular expression, not split(): `the–` is cut.
    articles = rf"\b(?:{'|'.join(sorted(self.articles))})\b"
    for form in (re.sub(articles, " ", kept), kept, lower):
      if form.strip():
        return " ".join(form.split())
    return ""

  def contains_any(self, text: str, targets: Any) -> bool:
    """Says whether a target occurs in a text, case-folded, even inside a word.

    The rule for questions, which must not give their answer away.
    """
    folded = fold(text)
    return any(fold(target) in folded for target in as_targets(targets))

  def mentions_any(self, text: str, phrases: Any) -> bool:
    """Says whether a phrase occurs in a text at token boundaries.

    The leak guard's rule: `cat` is not in `category`, `U.S.` is in `the U S`.
    A phrase without letters or digits is looked for as it is, a blank one not.
    """
    padded = f" {' '.join(self.tokens(text))} "
    for phrase in [phrases] if isinstance(phrases, str) else phrases:
      tokens = self.tokens(phrase)
      if tokens and f" {' '.join(tokens)} " in padded:
        return True
      if not tokens and phrase.strip() and phrase.strip() in text:
        return True
    return False

  def entities(self, text: str) -> tuple[str, ...]:
    """Finds what names something: capitals, quotations, numbers.

    Capitalised spans (of one that opens a sentence, what follows its first
    word: `Which Roman` gives `Roman`), quoted spans, and numbers of three
    digits or more, also without their separators.
    """
    found = [q.strip() for match in _QUOTED.findall(text) for q in match]
    found += self._capitalised(text)
    for number in _NUMBER.findall(text):
      digits = re.sub(r"\D", "", number)
      if len(digits) >= 3:
        found += [number, digits]
    return tuple(dict.fromkeys(f for f in found if f))

  def _capitalised(self, text: str) -> list[str]:
    """Returns capitalised spans, joined over connectors and numbers."""
    words, kinds = [], ""  # one letter a word, `|` where no span goes on
    end = 0
    for match in _WORD.finditer(text):
      word, gap = _POSSESSIVE.sub("", match.group()), text[end : match.start()]
      opens = not words or self._ends_sentence(words[-1], gap)
      if gap.strip(" ."):
        words, kinds = [*words, ""], kinds + "|"
      if opens:
        kind = "x"
      elif word.lower() in self.connectors | self.articles:
        kind = "c"
      else:
        kind = "C" if word[0].isupper() else "9" if word[0].isdigit() else "x"
      words, kinds, end = [*words, word], kinds + kind, match.end()
    spans = [
      " ".join(words[span.start() : span.end()])
      for span in re.finditer("C(?:c*C|9)*", kinds)
    ]
    # One letter would be found in any text: the grade `A`.
    return [span for span in spans if len(span) > 1]

  def _ends_sentence(self, word: str, gap: str) -> bool:
    """Says whether the gap after a word ends a sentence."""
    if not _SENTENCE_END.search(gap):
      return False
    short = len(word) == 1 or "." in word or word.lower() in self.abbreviations
    return "\n" in gap or not (short and gap.strip() == ".")


ENGLISH = English()
LANGUAGES = {"english": ENGLISH}
