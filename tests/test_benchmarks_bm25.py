"""The benchmark of BM25 on disk: it measures what it says."""

import json
from pathlib import Path

import numpy as np

from benchmarks import bm25

WORLD = Path(__file__).parent / "world"


def test_memory_of_ones_own_and_of_files_are_told_apart(tmp_path):
  path = tmp_path / "numbers.npy"
  np.save(path, np.ones(8_000_000))  # 64 MB
  with bm25.peak() as own:
    kept = np.ones(8_000_000)
  with bm25.peak() as mapped:
    read = np.load(path, mmap_mode="r")
    assert read.sum() == kept.sum()
  assert own["own"] > 50 > 10 > own["mapped"]
  assert mapped["mapped"] > 50 > 10 > mapped["own"]
  assert own["seconds"] > 0


def test_both_stages_and_the_table(tmp_path, monkeypatch):
  monkeypatch.setattr(bm25, "CORPUS", str(WORLD / "corpus.jsonl"))
  monkeypatch.setattr(bm25, "questions", lambda count: ["capital", "river"])
  bm25.write_corpus(tmp_path / "corpus.jsonl", 40)
  rows = [
    json.loads(line)
    for line in (tmp_path / "corpus.jsonl").read_text().splitlines()
  ]
  assert len({row["contents"] for row in rows}) == 40
  found = {"passages": 40} | {
    name: json.loads(json.dumps(stage(tmp_path)))
    for name, stage in bm25.STAGES.items()
  }
  files = sum(p.stat().st_size for p in (tmp_path / "index").iterdir())
  assert found["build"]["files"] == files / 1e6
  assert found["search"]["per_second"] > 0
  assert bm25.table([found]).row_count == 1
