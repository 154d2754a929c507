"""Another language: what is French about questions and answers, in one file."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sesa_jax.language import English

_ELISION = re.compile(r"\b(l|d|qu|j|n|s|c|m|t)['’]", re.IGNORECASE)


@dataclass(frozen=True)
class French(English):
  """French: its articles, also elided ones, and its closed answers."""

  articles: frozenset[str] = frozenset("le la les l un une des du de d".split())
  closed_answers: frozenset[str] = frozenset({"oui", "non"})
  connectors: frozenset[str] = frozenset(
    "de du des la le les d l et en sur sous aux au".split()
  )
  abbreviations: frozenset[str] = frozenset("m mm mme mlle dr st ste".split())

  def words(self, text):
    """Counts `l'eau` as two words."""
    return super().words(_ELISION.sub(r"\1 ", text))

  def normalize_answer(self, text):
    """Drops elided articles too: `L'Italie` is `Italie`."""
    return super().normalize_answer(_ELISION.sub(r"\1 ", text))

  def entities(self, text):
    """Finds `Italie` in `d'Italie`."""
    return super().entities(_ELISION.sub(r"\1 ", text))


FRENCH = French()
