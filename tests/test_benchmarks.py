from __future__ import annotations

import itertools
import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from sesa_jax.data import benchmarks
from sesa_jax.language import question_key
from sesa_jax.types import Passage, Question, SearchFailure

ASSETS = Path(
  os.environ.get("SESA_JAX_ASSETS", Path.home() / ".cache" / "sesa_jax")
)


def load(tmp_path, name, text):
  folder = tmp_path / "nq"
  folder.mkdir(exist_ok=True)
  (folder / name).write_bytes(text.encode())
  return benchmarks.load_questions(folder / name)


def test_topic_files_with_and_without_quotes(tmp_path):
  questions = load(
    tmp_path,
    "dev.txt",
    "who sings it\t['Linda Davis']\r\n"
    # U+2028 and \r within a question are no line ends.
    "one\u2028two\rthree\t['x', 'y']\n"
    # A field in CSV's quotes, and answers that hold quotes.
    'where is it\t"[\'in ""Rome""\', ""Château d\'If""]"\r\n'
    '"""What of """"Lucy"""" then?"""\t[\'Lucy\', \'LUCY\', \'Lucy\']\n'
    '"Yesterday" is by whom\t"[\'""Macbeth in """"M""""""\']"\n',
  )
  assert [(q.text, q.targets) for q in questions] == [
    ("who sings it", ("Linda Davis",)),
    ("one\u2028two\rthree", ("x", "y")),
    ("where is it", ('in "Rome"', "Château d'If")),
    ('What of "Lucy" then?', ("Lucy", "LUCY")),
    ('"Yesterday" is by whom', ('Macbeth in "M"',)),
  ]


def test_flashrag_lines(tmp_path):
  row = {"id": "dev_0", "question": " Who? ", "golden_answers": ["Al", "Bo"]}
  text = json.dumps(row) + "\n\n" + json.dumps(row) + "\n"
  assert load(tmp_path, "test.jsonl", text) == (
    Question("nq/test/0", "Who?", ("Al", "Bo"), 1, "nq/test/0", "fixed"),
    # The same question again is another row, with an id of its own.
    Question("nq/test/2", "Who?", ("Al", "Bo"), 1, "nq/test/2", "fixed"),
  )
  row = '{"question": "Who?", "answer": "Al"}\n'
  (question,) = load(tmp_path, "squad.txt", row)
  assert question.targets == ("Al",)


def test_the_source_can_be_named(tmp_path):
  path = tmp_path / "q.tsv"
  path.write_text("Who?\t['Al']\n")
  (question,) = benchmarks.load_questions(path, source="mine/test", hops=2)
  assert (question.id, question.hops) == ("mine/test/0", 2)


@pytest.mark.parametrize(
  ("name", "line", "message"),
  [
    ("a.txt", "no tab", "a tab"),
    ("a.txt", "\t['x']", "a question"),
    ("a.txt", "q\tnot a list", "not a list of answers"),
    ("a.txt", "q\t[]", "No answer"),
    ("a.txt", "q\t[1]", "string"),
    ("a.txt", '{"question": "q"}', "golden_answers"),
    ("a.jsonl", '{"question": "q", "answers": ["x"]}', "golden_answers"),
    ("a.jsonl", '{"question": "", "golden_answers": ["x"]}', "question"),
    ("a.jsonl", '{"question": "q", "golden_answers": []}', "No answer"),
    ("a.jsonl", "[1]", "a list"),
    ("a.jsonl", "q\t['x']", "line 1"),
  ],
)
def test_a_bad_line_is_named(tmp_path, name, line, message):
  good = '{"question": "q", "golden_answers": ["x"]}'
  with pytest.raises(ValueError, match=message) as error:
    load(tmp_path, name, f"{good}\n{line}\n")
  assert f"{name}:2:" in str(error.value)


def test_missing_unknown_and_empty_files(tmp_path):
  with pytest.raises(ValueError, match="no such file"):
    benchmarks.load_questions(tmp_path / "gone.txt")
  with pytest.raises(ValueError, match="not '.csv'"):
    load(tmp_path, "a.csv", "q\t['x']")
  with pytest.raises(ValueError, match="no question"):
    load(tmp_path, "a.txt", "\n")


ROW = {
  "data_source": "nq",
  "question": "who sings it?",
  "prompt": [{"role": "user", "content": "Answer. Question: who sings it?\n"}],
  "reward_model": {"ground_truth": {"target": ["Linda Davis"]}},
  "extra_info": {"split": "train", "index": 0},
}


def test_a_row_of_search_r1():
  wanted = ("nq/train/0", "who sings it?", ("Linda Davis",))
  assert benchmarks.search_r1_row(ROW) == wanted
  # A string, a list and numpy's array mean the same.
  for target in ("Linda Davis", np.array(["Linda Davis"], object)):
    row = ROW | {"reward_model": {"ground_truth": {"target": target}}}
    assert benchmarks.search_r1_row(row) == wanted
  bare = {k: v for k, v in ROW.items() if k != "question"}
  assert benchmarks.search_r1_row(bare) == wanted
  said = "Question: what? Then answer. Question: who sings it?"
  bare |= {"prompt": [{"role": "user", "content": said}]}
  assert benchmarks.search_r1_row(bare) == wanted
  for field in ("data_source", "reward_model", "extra_info"):
    with pytest.raises(ValueError, match=f"expected the fields.*'{field}'"):
      benchmarks.search_r1_row({k: v for k, v in ROW.items() if k != field})
  with pytest.raises(ValueError, match="question is empty"):
    benchmarks.search_r1_row(ROW | {"question": " "})


def test_parquet_is_read_with_pyarrow_alone(tmp_path, monkeypatch):
  path = tmp_path / "train.parquet"
  path.write_bytes(b"PAR1")
  other = ROW | {"data_source": "hotpotqa", "question": "Who?"}

  class File:  # as much of pyarrow as is used
    def __init__(self, where):
      assert where == path

    def iter_batches(self):
      for rows in ([ROW, other], [ROW | {"question": ""}]):
        yield types.SimpleNamespace(to_pylist=lambda rows=rows: rows)

  fake = types.SimpleNamespace(ParquetFile=File)
  monkeypatch.setitem(sys.modules, "pyarrow", types.ModuleType("pyarrow"))
  monkeypatch.setitem(sys.modules, "pyarrow.parquet", fake)
  with pytest.raises(ValueError, match=r"train.parquet:3: the question is"):
    benchmarks.load_questions(path)
  monkeypatch.setattr(
    File,
    "iter_batches",
    lambda self: [types.SimpleNamespace(to_pylist=lambda: [ROW, other])],
  )
  first, second = benchmarks.load_questions(path, source="mix")
  # The index restarts in each source: the ids differ all the same.
  assert (first.id, second.id) == ("mix/nq/train/0", "mix/hotpotqa/train/0")
  assert first.targets == ("Linda Davis",)
  monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
  with pytest.raises(
    ValueError, match="needs the package pyarrow.*pip install"
  ):
    benchmarks.load_questions(path)


def test_parquet_that_pyarrow_wrote(tmp_path):
  pyarrow = pytest.importorskip("pyarrow")
  parquet = pytest.importorskip("pyarrow.parquet")
  path = tmp_path / "train.parquet"
  bare = {k: v for k, v in ROW.items() if k != "question"} | {
    "reward_model": {"ground_truth": {"target": ["Linda", "Davis"]}},
    "extra_info": {"split": "train", "index": 1},
  }
  parquet.write_table(pyarrow.Table.from_pylist([ROW, bare]), path)
  first, second = benchmarks.load_questions(path, source="mix")
  assert (first.id, second.id) == ("mix/nq/train/0", "mix/nq/train/1")
  assert first.text == second.text == "who sings it?"
  assert (first.targets, second.targets) == (
    ("Linda Davis",),
    ("Linda", "Davis"),
  )
  path.write_bytes(b"PAR1")
  with pytest.raises(ValueError, match=r"train.parquet: not parquet \("):
    benchmarks.load_questions(path)


class Stub:
  """Finds the passage that a query names, and counts its calls."""

  def __init__(self, **passages):
    self.passages = passages
    self.calls = []

  def search(self, queries, k):
    self.calls.append((list(queries), k))
    return [
      self.passages[q]
      if isinstance(self.passages[q], SearchFailure)
      else (Passage("p", *self.passages[q]),)
      for q in queries
    ]


def question(text, *targets):
  return Question(text, text, targets, 1, text, "fixed")


def test_answerable_looks_for_whole_tokens_of_four_characters():
  questions = [
    question("title", "Rome"),
    question("text", "none", "the rhine"),
    question("inside", "Rome"),
    question("short", "Ayr"),
    question("absent", "Oslo"),
  ]
  search = Stub(
    title=("Rome", "x"),
    text=("x", "By The Rhine."),
    inside=("Romeo", "x"),
    short=("Ayr", "Ayr"),
    absent=("x", "x"),
  )
  kept = benchmarks.answerable(questions, search)
  assert [q.text for q in kept] == ["title", "text"]
  assert all(k == 5 for _, k in search.calls)
  kept = benchmarks.answerable(questions, search, k=2, min_characters=3)
  assert [q.text for q in kept] == ["title", "text", "short"]
  assert search.calls[-1][1] == 2


def test_answerable_searches_no_further_than_asked_in_a_keyed_order():
  questions = [question(f"q{i}", "Rome") for i in range(50)]
  search = Stub(**{f"q{i}": ("Rome", "x") for i in range(50)})

  def first(n, seed):
    kept = benchmarks.answerable(questions, search, seed=seed)
    return [q.text for q in itertools.islice(kept, n)]

  assert first(5, 0) == first(5, 0)
  assert len(search.calls) == 10
  assert first(5, 0) != first(5, 1)
  assert first(5, None) == ["q0", "q1", "q2", "q3", "q4"]
  assert sorted(first(50, 0)) == sorted(q.text for q in questions)


def test_a_lost_search_stops_the_selection():
  search = Stub(q=SearchFailure("timeout"))
  with pytest.raises(RuntimeError, match="timeout"):
    list(benchmarks.answerable([question("q", "Rome")], search))


def test_questions_are_the_same_but_for_case_and_punctuation():
  same = ["Who is  Ada?", "who is ADA", "Who is “Ada”?!"]
  assert {question_key(text) for text in same} == {"who is ada"}
  assert question_key("Who?") == "who"
  assert question_key("Who was Ada?") != "who is ada"


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "count"),
  [
    ("dpr.nq.dev", 8757),
    ("nq.test", 3610),
    ("dpr.trivia.dev", 8837),
    ("dpr.trivia.test", 11_313),
  ],
)
def test_real_questions(name, count):
  path = ASSETS / "open-qa" / f"topics.{name}.txt"
  if not path.is_file():
    pytest.skip("the assets are not there; `make test` fetches them")
  questions = benchmarks.load_questions(path)
  assert len(questions) == count
  assert len({q.id for q in questions}) == count
  # Quotes of the file's own format must be gone.
  assert not any('""' in q.text for q in questions)
