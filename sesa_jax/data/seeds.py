"""Seeds of the challenger: answers to ask for, with a number of hops."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from sesa_jax.data import lines
from sesa_jax.language import Language, as_targets
from sesa_jax.types import Passage, Question, Seed

_PARENTHESIS = re.compile(r"\s*\([^()]*\)$")
Item = TypeVar("Item", Seed, Question)

_LIST = re.compile(r"(?:list|lists|outline|index|timeline) of ", re.IGNORECASE)


def from_titles(
  passages: Sequence[Passage],
  hops: Sequence[int],
  *,
  min_characters: int = 2,
  max_characters: int = 60,
) -> tuple[Seed, ...]:
  """Makes a seed of each usable title of a corpus.

  `Dune (novel)` becomes the answer `Dune` with the title as its alias; of
  titles with the same answer the first counts. Not usable: lists,
  disambiguation pages, titles without a letter, too short or too long ones.

  Args:
    passages: of the corpus, in its order.
    hops: hop counts that are given to the titles in turn.
    min_characters: of the shortest usable answer.
    max_characters: of the longest usable answer.

  Raises:
    ValueError: no usable title, or a hop count below 1.
  """
  _check_hops(hops)
  answers: dict[str, tuple[str, str]] = {}
  for title in dict.fromkeys(passage.title.strip() for passage in passages):
    answer = _PARENTHESIS.sub("", title)
    usable = (
      min_characters <= len(answer) <= max_characters
      and any(c.isalpha() for c in answer)
      and not _LIST.match(title)
      and not title.casefold().endswith("(disambiguation)")
    )
    if usable:
      answers.setdefault(answer.casefold(), (answer, title))
  if not answers:
    raise ValueError(
      f"The seed list is empty: none of {len(passages)} passages has a usable "
      f"title ({min_characters} to {max_characters} characters, no list)."
    )
  return tuple(
    Seed(f"title/{title}", as_targets([answer, title]), hops[i % len(hops)])
    for i, (answer, title) in enumerate(answers.values())
  )


def from_jsonl(
  path: str | Path, hops: Sequence[int] | None = None
) -> tuple[Seed, ...]:
  """Reads seeds in the format of Search Self-play's release.

  A line `{"ground_truth": "Paris" or ["Paris", ..], "search_turns": 2}` a seed;
  other fields are ignored. A seed's id is `<file>/<line, from 0>`.

  Args:
    path: the file.
    hops: hop counts that are kept; None keeps all.

  Raises:
    ValueError: the file is missing, a line is malformed (names file and line),
      or no seed is left.
  """
  path = Path(path)
  if not path.is_file():
    raise ValueError(f"No seeds at {path}: there is no such file.")
  if hops is not None:
    _check_hops(hops)
  seeds = []
  for number, line in lines.numbered(path):
    try:
      row = json.loads(line)
      count, answer = row["search_turns"], row["ground_truth"]
      if type(count) is not int or count < 1:
        raise ValueError(f"search_turns is a count from 1 on, not {count!r}")
      targets = as_targets(answer)
    except (KeyError, TypeError) as error:
      raise ValueError(
        f"{path}:{number}: expected the fields ground_truth and search_turns "
        f"({error})."
      ) from None
    except ValueError as error:  # JSON's own errors are of this kind too
      raise ValueError(f"{path}:{number}: {error}") from None
    if hops is None or count in hops:
      seeds.append(Seed(f"{path.stem}/{number - 1}", targets, count))
  if not seeds:
    wanted = "" if hops is None else f" with hops in {sorted(set(hops))}"
    raise ValueError(f"The seed list is empty: {path} holds no seed{wanted}.")
  return tuple(seeds)


def from_list(path: str | Path, hops: Sequence[int]) -> tuple[Seed, ...]:
  """Reads a plain list: an answer a line, its aliases behind tabs.

  Of lines with the same answer, case aside, the first counts. A seed's id is
  `<file>/<line, from 0>`.

  Args:
    path: the file.
    hops: hop counts that are given to the answers in turn.

  Raises:
    ValueError: the file is missing or empty, or a hop count is below 1.
  """
  path = Path(path)
  if not path.is_file():
    raise ValueError(f"No seeds at {path}: there is no such file.")
  _check_hops(hops)
  answers: dict[str, tuple[str, tuple[str, ...]]] = {}
  for number, line in lines.numbered(path):
    targets = as_targets(line.split("\t"))
    answers.setdefault(
      targets[0].casefold(), (f"{path.stem}/{number - 1}", targets)
    )
  if not answers:
    raise ValueError(f"The seed list is empty: {path} holds no answer.")
  return tuple(
    Seed(id, targets, hops[i % len(hops)])
    for i, (id, targets) in enumerate(answers.values())
  )


def tested(
  seeds: Sequence[Seed], questions: Iterable[Question], language: Language
) -> list[Seed]:
  """Finds the seeds that ask for the answer of an evaluation question.

  Answers are compared normalised, aliases included.
  """
  known = {
    language.normalize_answer(target)
    for question in questions
    for target in question.targets
  }
  return [
    seed
    for seed in seeds
    if any(language.normalize_answer(t) in known for t in seed.targets)
  ]


def draw(
  seeds: Sequence[Item], count: int, *, seed: int, position: int
) -> tuple[tuple[Item, ...], int]:
  """Takes the next seeds, or questions, of an endless run of shuffled epochs.

  Each epoch is a permutation keyed by (seed, epoch), so the position is all
  that a resumed run needs. No seed comes twice in one draw: a draw that does
  not fit into what is left of an epoch skips that and begins the next.

  Args:
    seeds: all seeds, in a fixed order.
    count: seeds to take.
    seed: of the run.
    position: 0 at first, then what the last draw returned.

  Returns:
    the drawn seeds and the position behind them.

  Raises:
    ValueError: fewer seeds than `count`.
  """
  if count > len(seeds):
    raise ValueError(
      f"An iteration draws {count} seeds, but there are only {len(seeds)}. "
      f"Lower `questions` to at most {len(seeds)} or add seeds."
    )
  epoch, start = divmod(position, len(seeds))
  if start + count > len(seeds):
    epoch, start = epoch + 1, 0
  order = np.random.default_rng([seed, epoch]).permutation(len(seeds))
  drawn = tuple(seeds[i] for i in order[start : start + count])
  return drawn, epoch * len(seeds) + start + count


def _check_hops(hops: Sequence[int]) -> None:
  if not hops or any(type(h) is not int or h < 1 for h in hops):
    raise ValueError(
      f"seeds.hops={hops!r}: at least one count, each from 1 on."
    )
