"""FAISS on the vectors of `benchmarks.bank`: brute force, and an inverted file.

Flat scores all vectors. IVF scores those of the cells nearest to the query;
how many cells is tried out before anything is timed, the fewest that find
`RECALL` of what flat finds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import faiss
import numpy as np

from benchmarks import sides

RECALL = 0.95
PROBES = (1, 2, 4, 8, 16, 32, 64, 128)


def start(settings: Mapping[str, Any]) -> Mapping[str, sides.Order]:
  """Builds both indexes.

  Args:
    settings: `vectors` and `queries`, paths of .npy files, and `k`.
  """
  vectors, queries = np.load(settings["vectors"]), np.load(settings["queries"])
  k, dim = settings["k"], vectors.shape[1]
  began = time.perf_counter()
  flat = faiss.IndexFlatIP(dim)
  flat.add(vectors)
  between = time.perf_counter()
  cells = round(math.sqrt(len(vectors)))
  inverted = faiss.IndexIVFFlat(
    faiss.IndexFlatIP(dim), dim, cells, faiss.METRIC_INNER_PRODUCT
  )
  inverted.train(vectors)
  inverted.add(vectors)
  built = {"flat": between - began, "ivf": time.perf_counter() - between}
  exact = flat.search(queries, k)[1]
  for probes in PROBES:
    inverted.nprobe = probes
    found = inverted.search(queries, k)[1]
    if (found[:, :, None] == exact[:, None]).any(2).mean() >= RECALL:
      break
  indexes = {"flat": flat, "ivf": inverted}

  def about() -> dict[str, Any]:
    return dict(
      version=faiss.__version__,
      built=built,
      cells=cells,
      probes=inverted.nprobe,
      threads=faiss.omp_get_max_threads(),
    )

  def search(name: str) -> dict[str, Any]:
    began = time.perf_counter()
    _, rows = indexes[name].search(queries, k)
    seconds = time.perf_counter() - began
    return dict(seconds=seconds, rows=rows.tolist())

  return {"start": about, "search": search}


if __name__ == "__main__":
  sides.serve(start)
