from __future__ import annotations

import jax
import numpy as np
import pytest

from sesa_jax.distributed import host_cpu
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
