"""Exact match and F1 of a prediction, by the rules of SQuAD and FlashRAG."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sesa_jax.language import ENGLISH, Language, as_targets


def normalize(text: str, language: Language = ENGLISH) -> str:
  """Returns the form in which answers are compared."""
  return language.normalize_answer(text)


def exact_match(
  prediction: str | None, targets: Any, language: Language = ENGLISH
) -> bool:
  """Says whether a prediction equals a target, both normalised.

  Args:
    prediction: an answer, or None where none was given: never a match.
    targets: the answer and its aliases; see `language.as_targets`.
    language: whose normalisation is used.
  """
  answer = normalize(prediction or "", language)
  return answer != "" and any(
    answer == normalize(target, language) for target in as_targets(targets)
  )


def f1(
  prediction: str | None, targets: Any, language: Language = ENGLISH
) -> float:
  """Returns the best F1 of a prediction over the targets.

  With c words in common (as multisets), p in the prediction, t in the target,

    F1 = 2 c / (p + t)

  the harmonic mean of c / p and c / t (Rajpurkar et al. 2016). A closed answer
  (yes, no) that differs from the other side scores 0, as in HotpotQA's and
  FlashRAG's scorers.

  Args:
    prediction: an answer, or None where none was given: 0.
    targets: the answer and its aliases; see `language.as_targets`.
    language: whose normalisation is used.
  """
  answer = normalize(prediction or "", language)
  best = 0.0
  for target in (normalize(t, language) for t in as_targets(targets)):
    if answer != target and {answer, target} & language.closed_answers:
      continue
    p, t = answer.split(), target.split()
    common = sum((Counter(p) & Counter(t)).values())
    if common:
      best = max(best, 2 * common / (len(p) + len(t)))
  return best
