from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sesa_jax.search.bm25 import Bm25
from sesa_jax.types import Passage


def corpus(*texts, title=""):
  return tuple(Passage(str(i), title, t) for i, t in enumerate(texts))


def naive(documents, query, k1, b):
  """Lucene's BM25 by its definition; documents and query are term lists."""
  mean = sum(map(len, documents)) / len(documents)
  scores = []
  for document in documents:
    f, score = Counter(document), 0.0
    for term in query:
      n = sum(term in other for other in documents)
      idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
      length = 1 - b + b * len(document) / mean
      score += idf * f[term] / (f[term] + k1 * length)
    scores.append(score)
  return scores


terms = st.lists(st.sampled_from(["cat", "dog", "emu", "fox"]), min_size=1)


@given(
  st.lists(terms, min_size=2, max_size=6),
  terms,
  st.sampled_from([(0.9, 0.4), (1.5, 0.75), (0.5, 0.0)]),
)
def test_scores_and_order_equal_the_definition(documents, query, constants):
  k1, b = constants
  passages = corpus(*map(" ".join, documents))
  (found,) = Bm25(passages, k1=k1, b=b).search([" ".join(query)], 4)
  scores = naive(documents, query, k1, b)
  positive = sorted((s for s in scores if s > 0), reverse=True)[:4]
  assert [p.score for p in found] == pytest.approx(positive, rel=1e-5)
  for p in found:
    assert p.score == pytest.approx(scores[int(p.id)], rel=1e-5)


def test_ties_go_to_the_earlier_passage():
  # Even passages score higher than odd ones, and all even ones the same.
  engine = Bm25(corpus(*["dog cat dog", "cat and dog"] * 300, "cat"))
  for k in (1, 3, 290, 310):
    (found,) = engine.search(["dog"], k)
    order = [*range(0, 600, 2), *range(1, 600, 2)]
    assert [p.id for p in found] == [str(i) for i in order[:k]]


def test_titles_are_searched_and_passages_come_back_whole():
  passages = (
    Passage("a", "Röntgen", "won the first prize"),
    Passage("b", "Curie", "won the second prize"),
  )
  engine = Bm25(passages)
  first, second = engine.search(["RONTGEN?", "second"], 5)
  assert [(p.id, p.title, p.text) for p in first] == [
    ("a", "Röntgen", "won the first prize")
  ]
  assert [p.id for p in second] == ["b"]
  assert passages[0].score is None  # the corpus itself is not touched


@pytest.mark.parametrize("query", ["", "  ", "the of", "zebra", "?!"])
def test_queries_that_match_nothing(query):
  assert Bm25(corpus("the cat", "a dog")).search([query], 3) == [()]


def test_single_letters_are_terms():
  (found,) = Bm25(corpus("vitamin c", "vitamin d")).search(["c"], 3)
  assert [p.id for p in found] == ["0"]


def test_bad_arguments():
  with pytest.raises(ValueError, match="no passages"):
    Bm25(())
  with pytest.raises(ValueError, match=r"search.b=2"):
    Bm25(corpus("cat"), b=2)
  with pytest.raises(ValueError, match="search.k1=-1"):
    Bm25(corpus("cat"), k1=-1)
  with pytest.raises(ValueError, match="0 passages"):
    Bm25(corpus("cat")).search(["cat"], 0)


def test_importing_the_module_touches_no_device():
  # jax.distributed must be initialised before anything uses a device.
  code = (
    "import sesa_jax.search.bm25; from jax._src import xla_bridge as x; "
    "assert not x.backends_are_initialized()"
  )
  env = os.environ | {"JAX_PLATFORMS": "cpu"}
  subprocess.run([sys.executable, "-c", code], check=True, env=env)
