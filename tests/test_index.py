from __future__ import annotations

import jax
import numpy as np
import pytest

from benchmarks import bank
from sesa_jax.distributed import host_cpu
from sesa_jax.retrieval import index
from sesa_jax.retrieval.index import top_k


def naive(queries, vectors, mask, k):
  """Sorts by (-score, index), one query at a time."""
  scores = np.full((len(queries), k), -np.inf, np.float32)
  indices = np.full((len(queries), k), -1, np.int32)
  mask = np.broadcast_to(mask, (len(queries), len(vectors)))
  for q, query in enumerate(queries):
    found = [
      (-float(v @ query), s) for s, v in enumerate(vectors) if mask[q, s]
    ]
    for j, (score, s) in enumerate(sorted(found)[:k]):
      scores[q, j], indices[q, j] = -score, s
  return scores, indices


@pytest.mark.parametrize("masked_by_query", [False, True])
@pytest.mark.parametrize(("Q", "S", "k"), [(1, 5, 3), (11, 40, 7), (3, 4, 6)])
def test_equals_sorting(Q, S, k, masked_by_query):
  rng = np.random.default_rng(Q)
  # Small integers: products are exact, and ties abound.
  queries = rng.integers(-2, 3, (Q, 4)).astype(np.float32)
  vectors = rng.integers(-2, 3, (S, 4)).astype(np.float32)
  mask = rng.random((Q, S) if masked_by_query else S) < 0.6
  scores, indices = top_k(queries, vectors, mask, k)
  expected_scores, expected_indices = naive(queries, vectors, mask, k)
  np.testing.assert_array_equal(indices, expected_indices)
  np.testing.assert_array_equal(scores, expected_scores)


def test_ties_go_to_the_lowest_index_and_masked_rows_never_come():
  vectors = np.ones((6, 2), np.float32)
  mask = np.array([False, True, False, True, True, False])
  scores, indices = top_k(np.ones((1, 2), np.float32), vectors, mask, 5)
  assert indices.tolist() == [[1, 3, 4, -1, -1]]
  assert scores.tolist() == [[2, 2, 2, -np.inf, -np.inf]]


def test_result_does_not_depend_on_other_queries():
  rng = np.random.default_rng(0)
  queries = rng.normal(size=(20, 384)).astype(np.float32)
  vectors = jax.device_put(
    rng.normal(size=(300, 384)).astype(np.float32), host_cpu()
  )
  mask = np.ones(300, bool)
  together, _ = top_k(queries, vectors, mask, 300)
  for q in (0, 7, 19):
    alone, _ = top_k(queries[q : q + 1], vectors, mask, 300)
    assert alone[0].tobytes() == together[q].tobytes()


def test_nothing_to_find():
  none = np.zeros((0, 2), np.float32)
  scores, indices = top_k(
    np.ones((2, 2), np.float32), none, np.ones(0, bool), 1
  )
  assert indices.tolist() == [[-1], [-1]]
  assert np.isneginf(scores).all()
  assert top_k(none, np.ones((3, 2), np.float32), np.ones(3, bool), 2)[
    1
  ].shape == (0, 2)


def test_bad_input():
  one = np.ones((1, 2), np.float32)
  with pytest.raises(ValueError, match="k = 0"):
    top_k(one, one, np.ones(1, bool), 0)


# --- indexes ---------------------------------------------------------------


def clustered(count, dim=16, clusters=40, seed=0) -> np.ndarray:
  """Unit rows that lie in clusters, as those of text do."""
  rng = np.random.default_rng(seed)
  centres = np.random.default_rng(9).normal(size=(clusters, dim))
  rows = centres[rng.integers(clusters, size=count)]
  rows = rows + 0.5 * rng.normal(size=rows.shape)
  rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
  return rows.astype(np.float32)


@pytest.mark.parametrize("kind", ["exact", "scann"])
@pytest.mark.parametrize("S", [1, 2, 5, 300])
def test_every_small_index_finds_what_sorting_finds(kind, S):
  rng = np.random.default_rng(S)
  queries, vectors = clustered(9, seed=1), clustered(S, seed=2)
  mask = rng.random(S) < 0.7
  built = index.build(vectors, mask, kind)
  for allowed in (None, rng.random((9, S)) < 0.6):
    every = mask if allowed is None else mask & allowed
    for k in (1, 3):
      scores, rows = built.search(queries, k, allowed)
      expected, where = naive(queries, vectors, every, k)
      np.testing.assert_array_equal(rows, where)
      np.testing.assert_allclose(scores, expected, atol=1e-6)
      assert (scores.dtype, rows.dtype) == (np.float32, np.int32)


@pytest.mark.parametrize("kind", ["exact", "scann"])
def test_ties_and_neighbours_that_are_not_allowed(kind):
  vectors = np.repeat(np.eye(2, dtype=np.float32), [60, 2], axis=0)
  built = index.build(vectors, np.ones(62, bool), kind)
  query = np.array([[1, 0]], np.float32)
  assert built.search(query, 3)[1].tolist() == [[0, 1, 2]]
  assert built.search(query, 40)[1].tolist() == [[*range(40)]]
  # More are barred than an index fetches beyond k.
  allowed = np.ones((1, 62), bool)
  allowed[0, :59] = False
  scores, rows = built.search(query, 4, allowed)
  assert rows.tolist() == [[59, 60, 61, -1]]
  assert scores.tolist() == [[1, 0, 0, -np.inf]]


def test_of_equals_the_lower_row_comes_first_however_scann_gives_them():
  built = index.build(np.eye(40, dtype=np.float32), np.ones(40, bool), "scann")
  rows = np.random.default_rng(0).permutation(40)[None]
  found = np.ones((1, 40), np.float32)
  _, best = built._best(np.eye(1, 40, dtype=np.float32), found, rows, 9, None)
  assert best.tolist() == [[*range(9)]]


@pytest.mark.parametrize("kind", ["exact", "scann"])
def test_an_index_of_nothing(kind):
  built = index.build(np.ones((3, 2), np.float32), np.zeros(3, bool), kind)
  scores, rows = built.search(np.ones((2, 2), np.float32), 2)
  assert rows.tolist() == [[-1, -1]] * 2
  assert np.isneginf(scores).all()
  full = index.build(np.ones((3, 2), np.float32), np.ones(3, bool), kind)
  assert full.search(np.ones((0, 2), np.float32), 2)[1].shape == (0, 2)
  with pytest.raises(ValueError, match="k = 0"):
    full.search(np.ones((1, 2), np.float32), 0)


@pytest.mark.parametrize(("searched", "least"), [(None, 0.9), (0.02, 0.3)])
def test_a_tree_finds_nearly_all_and_the_same_each_time(
  tmp_path, monkeypatch, searched, least
):
  """From its files alone, wherever they lie, whoever else asks."""
  monkeypatch.setattr(index, "SEARCHED", searched or index.SEARCHED)
  queries, vectors = clustered(64, seed=1), clustered(4000, seed=2)
  everything = np.ones(4000, bool)
  index.grow(vectors, tmp_path / "grown")
  (tmp_path / "grown").rename(tmp_path / "tree")
  built = index.build(vectors, everything, "scann", tmp_path / "tree")
  scores, rows = built.search(queries, 3)
  _, exact = top_k(queries, vectors, everything, 3)
  assert bank.recall(rows, exact) > least
  if searched:  # else a tree that is not searched would pass
    assert bank.recall(rows, exact) < 1
  # A leaf may hold fewer than are asked for: nothing comes twice.
  assert all(
    len(set(row)) == 20 for row in built.search(queries, 20)[1].tolist()
  )
  again = index.build(vectors, everything, "scann", tmp_path / "tree")
  np.testing.assert_array_equal(again.search(queries, 3)[1], rows)
  for q in range(0, 64, 3):
    alone = again.search(queries[q : q + 1], 3)
    np.testing.assert_array_equal(alone[1][0], rows[q])
    np.testing.assert_array_equal(alone[0][0], scores[q])
  (tmp_path / "tree" / "scann_config.pb").unlink()
  with pytest.raises(ValueError, match="holds no tree of ScaNN"):
    index.build(vectors, everything, "scann", tmp_path / "tree")


def test_without_its_files_no_tree_is_searched(monkeypatch):
  """A bank's index: the same each time, and of all."""
  monkeypatch.setattr(index, "TREE_FROM", 1000)
  queries, vectors = clustered(64, seed=1), clustered(4000, seed=2)
  mask = np.arange(4000) % 5 > 0
  found = index.build(vectors, mask, "scann").search(queries, 3)[1]
  np.testing.assert_array_equal(found, top_k(queries, vectors, mask, 3)[1])


def test_recall_by_hand():
  exact = np.array([[1, 2, 3], [4, 5, 6]])
  found = np.array([[3, 9, 1], [7, 8, 6]])
  assert bank.recall(found, exact) == pytest.approx(3 / 6)


def test_what_is_built(monkeypatch):
  vectors, mask = np.eye(4, dtype=np.float32), np.ones(4, bool)
  assert isinstance(index.build(vectors, mask), index.Scann)
  assert isinstance(index.build(vectors, mask, "exact"), index.Exact)
  with pytest.raises(
    ValueError, match=r"'faiss'\. Choices: auto, exact, scann"
  ):
    index.build(vectors, mask, "faiss")
  monkeypatch.setattr(index, "has_scann", lambda: False)
  assert isinstance(index.build(vectors, mask), index.Exact)
  with pytest.raises(ValueError, match="needs the package scann"):
    index.build(vectors, mask, "scann")
