"""Reads questions with known answers: benchmarks, and fixed training sets."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sesa_jax.data import lines
from sesa_jax.language import ENGLISH, Language, as_targets
from sesa_jax.types import Question, SearchEngine, SearchFailure

# A whole field in the quotes of CSV: inside, every quote is doubled.
_QUOTED = re.compile(r'"((?:[^"]|"")*)"')


def load_questions(
  path: str | Path, *, source: str | None = None, hops: int = 1
) -> tuple[Question, ...]:
  """Reads a file of questions, one a line.

  * `.jsonl`: `{"question", "golden_answers": [..]}` as FlashRAG has it;
    `answer` may stand for `golden_answers`.
  * `.parquet`: Search-R1's, with `question` or the `prompt`'s last message, and
    `reward_model.ground_truth.target`; needs pyarrow, which we do not install.
  * `.txt`, `.tsv`: question, tab, Python list of answers, as the topic files of
    pyserini have it, with or without CSV's quotes; or JSON lines as above.

  Args:
    path: the file.
    source: names the file in the ids; `<folder>/<file>` if None.
    hops: that the questions are said to need.

  Returns:
    questions in the order of the file, none left out. The id is
    `<source>/<line, from 0>`: ids of the files themselves restart with each
    file. The seed id is the same, for no seed gave rise to them.

  Raises:
    ValueError: the file is missing, of another kind or empty, or a line is
      malformed (names file and line).
  """
  path = Path(path)
  if not path.is_file():
    raise ValueError(f"No questions at {path}: there is no such file.")
  if path.suffix not in (".jsonl", ".txt", ".tsv", ".parquet"):
    raise ValueError(
      f"{path}: questions come as .jsonl, .txt, .tsv or .parquet, not "
      f"{path.suffix!r}."
    )
  source = source or f"{path.parent.name}/{path.stem}"
  questions = []
  parquet = path.suffix == ".parquet"
  for number, row in _parquet(path) if parquet else lines.numbered(path):
    try:
      if parquet:
        name, text, targets = search_r1_row(row)
      else:
        is_json = path.suffix == ".jsonl" or row.startswith("{")
        text, targets = _json_row(row) if is_json else _tsv_row(row)
        name = str(number - 1)
    except ValueError as error:
      raise ValueError(f"{path}:{number}: {error}") from None
    id = f"{source}/{name}"
    questions.append(Question(id, text, targets, hops, id, "fixed"))
  if not questions:
    raise ValueError(f"{path} holds no question.")
  return tuple(questions)


def answerable(
  questions: Sequence[Question],
  search: SearchEngine,
  k: int = 5,
  min_characters: int = 4,
  *,
  seed: int | None = None,
  language: Language = ENGLISH,
) -> Iterator[Question]:
  """Yields the questions that a corpus answers, by a rough test.

  An answer of at least `min_characters` characters must occur, at token
  boundaries, in the title or text of one of the k best passages for the
  question. Searches go on only as far as questions are taken, so
  `itertools.islice` gets the first few cheaply.

  Args:
    questions: any.
    search: over the corpus.
    k: passages that are looked at.
    min_characters: of an answer that counts; short ones occur by chance.
    seed: shuffles the questions; None keeps their order.
    language: whose token boundaries are used.

  Raises:
    RuntimeError: a search was lost; to go on would select by luck.
  """
  order = np.arange(len(questions))
  if seed is not None:
    order = np.random.default_rng(seed).permutation(len(questions))
  for i in order:
    question = questions[i]
    answers = [t for t in question.targets if len(t) >= min_characters]
    if not answers:
      continue
    (found,) = search.search([question.text], k)
    if isinstance(found, SearchFailure):
      raise RuntimeError(f"Search for {question.id} was lost: {found.reason}")
    texts = (f"{passage.title}\n{passage.text}" for passage in found)
    if any(language.mentions_any(text, answers) for text in texts):
      yield question


def search_r1_row(row: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]]:
  """Reads a row of Search-R1's parquet files.

  Returns:
    `<data_source>/<split>/<index>`, since the index restarts at 0 in each
    source; the question; the answers. A row without `question` has it as what
    follows `Question:` in the last message of its prompt.

  Raises:
    ValueError: a field is missing.
  """
  try:
    extra = row["extra_info"]
    name = f"{row['data_source']}/{extra['split']}/{extra['index']}"
    targets = as_targets(row["reward_model"]["ground_truth"]["target"])
    text = row.get("question")
    if text is None:
      text = row["prompt"][-1]["content"].rpartition("Question:")[2]
  except (KeyError, IndexError, TypeError) as error:
    raise ValueError(
      "expected the fields data_source, prompt, reward_model.ground_truth."
      f"target, extra_info.split and extra_info.index ({error!r})"
    ) from None
  if not text.strip():
    raise ValueError("the question is empty")
  return name, text.strip(), targets


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields the rows of a parquet file, numbered from 1."""
  try:  # no package of ours: asked for by name, where it is installed
    parquet = importlib.import_module("pyarrow.parquet")
  except ImportError:
    raise ValueError(
      f"{path}: reading parquet needs the package pyarrow, which is not among "
      "ours: `pip install pyarrow`, or convert the file to FlashRAG's JSONL."
    ) from None
  try:
    batches = parquet.ParquetFile(path).iter_batches()
  except ValueError as error:  # pyarrow's own are of this kind
    raise ValueError(f"{path}: not parquet ({error}).") from None
  rows = itertools.chain.from_iterable(b.to_pylist() for b in batches)
  yield from enumerate(rows, 1)


def _json_row(line: str) -> tuple[str, tuple[str, ...]]:
  row = json.loads(line)
  if not isinstance(row, dict):
    raise ValueError(f"not an object but a {type(row).__name__}")
  text = row.get("question")
  answers = row.get("golden_answers", row.get("answer"))
  if not isinstance(text, str) or not text.strip() or answers is None:
    raise ValueError(
      f"expected the fields question and golden_answers (or answer), found "
      f"{sorted(row)}"
    )
  return text.strip(), as_targets(answers)


def _tsv_row(line: str) -> tuple[str, tuple[str, ...]]:
  text, tab, answers = line.rstrip("\r").partition("\t")
  text = _unquote(text).strip()
  if not tab or not text:
    raise ValueError("expected a question, a tab and a list of answers")
  try:
    # The list is quoted once as a field; answers can be quoted once more.
    value = ast.literal_eval(_unquote(answers))
  except (ValueError, SyntaxError):
    raise ValueError(f"{answers!r} is not a list of answers") from None
  return text, tuple(
    dict.fromkeys(_unquote(target).strip() for target in as_targets(value))
  )


def _unquote(field: str) -> str:
  """Strips CSV's quotes, which some of the files put on twice."""
  while match := _QUOTED.fullmatch(field):
    field = match[1].replace('""', '"')
  return field
