"""Indexes on disk: the same answers as in memory, and of one corpus."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sesa_jax.data import corpus
from sesa_jax.retrieval import encoder
from sesa_jax.search import bm25, dense, engines, stored
from sesa_jax.types import Passage

WORDS = ["cat", "dog", "emu", "fox", "gnu", "the", "\u00e9mu", "x1"]
texts = st.lists(
  st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map(" ".join),
  min_size=1,
  max_size=30,
).filter(lambda found: set(" ".join(found).split()) - {"the"})


def passages(found):
  return tuple(Passage(f"p{i}", "", text) for i, text in enumerate(found))


def written(folder, found):
  folder.mkdir(exist_ok=True, parents=True)
  digest = stored.write_passages(folder, iter(found))
  assert digest == corpus.digest(found)
  return folder


@given(
  texts,
  st.sampled_from([1, 4, 100]),
  st.sampled_from([1, 7, 1000]),
  st.integers(1, 9),
)
def test_bm25_finds_on_disk_what_it_finds_in_memory(
  tmp_path_factory, found, block, part, k
):
  found = passages(found)
  folder = written(tmp_path_factory.mktemp("index"), found)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(bm25, "_BLOCK", block)
    patch.setattr(bm25, "_PART", part)
    bm25.build(folder, k1=0.9, b=0.4)
  on_disk = bm25.load(folder, k1=0.9, b=0.4)
  in_memory = bm25.Bm25(found, k1=0.9, b=0.4)
  queries = [*WORDS, "cat dog", "emu emu fox gnu", "zebra", ""]
  for one, other in zip(
    on_disk.search(queries, k), in_memory.search(queries, k), strict=True
  ):
    assert [p.id for p in one] == [p.id for p in other]
    assert [p.score for p in one] == pytest.approx([p.score for p in other])
    assert [p.text for p in one] == [p.text for p in other]
  assert not list(folder.glob("block*"))


def test_passages_come_back_whole(tmp_path):
  odd = (
    Passage("a", 'T "q"\n', "line\nline \ud800 \u2028 é"),
    Passage("b", "", "x" * 100_000),
  )
  found = stored.Passages(written(tmp_path, odd))
  assert list(found) == list(odd)
  assert len(found) == 2
  with pytest.raises(IndexError):
    found[2]


def test_an_id_that_is_used_twice(tmp_path):
  found = [Passage(i, "", "x") for i in ("a", "b", "c", "b")]
  with pytest.raises(ValueError, match="'b' is used twice"):
    stored.write_passages(tmp_path, found)
  with pytest.raises(ValueError, match="no passage"):
    stored.write_passages(tmp_path, [])


def test_dense_finds_what_the_definition_finds(tmp_path):
  found = passages(["cat dog", "emu fox", "cat cat", "gnu", "dog cat emu"])
  folder, hashed = written(tmp_path, found), encoder.HashEncoder(32)
  dense.build(folder, hashed)
  engine = dense.load(folder, hashed, "exact")
  got = engine.search(["cat dog", "gnu"], 3)
  vectors = hashed.encode([corpus.contents(p) for p in found], "passage")
  for query, result in zip(["cat dog", "gnu"], got, strict=True):
    cosines = vectors @ hashed.encode([query], "query")[0]
    order = np.argsort(-cosines, kind="stable")[:3]
    assert [p.id for p in result] == [f"p{i}" for i in order]
    assert [p.score for p in result] == pytest.approx(cosines[order].tolist())
  assert len(engine.search(["cat"], 9)[0]) == 5
  assert engine.search([], 3) == []
  with pytest.raises(ValueError, match="encoder of width 16"):
    dense.load(folder, encoder.HashEncoder(16), "exact")


def test_the_queries_of_many_are_embedded_together():
  def workers(engine):
    values = dict(engine=engine, batch=7, concurrency=5)
    return engines._batches(values)

  assert workers("dense") == dict(size=7, workers=1)
  assert workers("search_r1") == dict(size=7, workers=5)
  assert workers("google") == dict(size=1, workers=5)
  assert workers("bm25")["size"] == 1


def test_many_vectors_get_a_tree_that_is_kept(tmp_path, monkeypatch):
  """What is found follows from the folder, also in another process."""
  found = passages([f"word{i} word{i % 7} word{i % 90}" for i in range(400)])
  folder, hashed = written(tmp_path, found), encoder.HashEncoder(32)
  monkeypatch.setattr(dense.index_lib, "TREE_FROM", 400)
  dense.build(folder, hashed)
  assert (folder / "scann").is_dir()
  queries = [p.text for p in found[::20]]
  got = [
    dense.load(folder, hashed, kind).search(queries, 3)
    for kind in ("scann", "auto", "exact")
  ]
  assert got[0] == got[1]
  one, exact = (
    {(q, p.id) for q, r in enumerate(g) for p in r} for g in got[1:]
  )
  assert len(one & exact) > 0.8 * len(exact)
  few = tmp_path / "few"
  few.mkdir()
  stored.write_passages(few, found[:399])
  dense.build(few, hashed)
  assert not (few / "scann").exists()


# --- the folder --------------------------------------------------------------


def spec(index, **changes):
  return dict(
    engine="bm25", k1=0.9, b=0.4, passage_words=100, index=str(index),
    neighbours="exact", batch=8, concurrency=2, cache="", replay_only=False,
    degrade={},
  ) | changes  # fmt: skip


def hashed(dim=32):
  return lambda: (encoder.HashEncoder(dim), f"hash{dim}")


def opened(given, paths, embedder=None):
  return engines.open_search(
    given, paths, embedder or hashed(), seed=0, budget={}
  )


@pytest.fixture
def text(tmp_path):
  path = tmp_path / "corpus.jsonl"
  rows = [
    {"id": "a", "title": "Cat", "text": "the cat sat"},
    {"id": "b", "title": "Dog", "text": "a dog ran " * 60},
  ]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


@pytest.mark.parametrize("kind", engines.LOCAL)
def test_an_index_is_built_once_and_opened(text, tmp_path, kind):
  given = spec(tmp_path / "index", engine=kind)
  engines.build(given, [text], hashed())
  found = opened(given, [text])
  assert found.engine.search(["cat"], 1)[0][0].text == "the cat sat"
  assert [p.id for p in found.passages] == ["a", "b#0", "b#1"]
  assert found.digest == corpus.digest(corpus.load(text))
  assert opened(given, []).digest == found.digest  # the index is its corpus
  with pytest.raises(ValueError, match="exists already. Remove it"):
    engines.build(given, [text], hashed())
  assert not list(tmp_path.glob("*.tmp"))


def test_an_index_belongs_to_its_corpus(text, tmp_path):
  given = spec(tmp_path / "index")
  engines.build(given, [text], hashed())
  whole = text.read_text()
  text.write_text(whole)  # of another time: it is read again
  opened(given, [text])
  text.write_text(whole.replace("sat", "ran"))  # of the same size
  with pytest.raises(ValueError, match=r"belongs to another corpus than .*cor"):
    opened(given, [text])
  text.write_text(whole)
  with pytest.raises(ValueError, match=r"belongs to another corpus than .*cor"):
    opened(given, [text, text])
  with pytest.raises(ValueError, match="No corpus at"):
    opened(given, [tmp_path / "none.jsonl"])


@pytest.mark.parametrize(
  ("kind", "change", "says"),
  [
    ("bm25", {"k1": 1.2}, "built with k1 = 0.9, and the config has 1.2"),
    ("bm25", {"b": 0.5}, "built with b = 0.4"),
    ("bm25", {"passage_words": 50}, "passage_words = 100"),
    ("bm25", {"engine": "dense"}, "engine = 'bm25'"),
    ("dense", {"engine": "bm25"}, "engine = 'dense'"),
  ],
)
def test_an_index_was_made_with_other_values(
  text, tmp_path, kind, change, says
):
  given = spec(tmp_path / "index", engine=kind)
  engines.build(given, [text], hashed())
  with pytest.raises(ValueError, match=says):
    opened(given | change, [text])


def test_an_index_belongs_to_its_encoder(text, tmp_path):
  given = spec(tmp_path / "index", engine="dense")
  engines.build(given, [text], hashed())
  with pytest.raises(ValueError, match="encoder = 'hash32'.*'hash16'"):
    opened(given, [text], hashed(16))


def test_answers_of_two_kinds_of_neighbours_are_not_mixed(text, tmp_path):
  """A cache of answers is kept under the search's identity."""
  given = spec(tmp_path / "index", engine="dense")
  engines.build(given, [text], hashed())
  kinds = ("exact", "auto")
  found = {opened(given | {"neighbours": k}, []).identity for k in kinds}
  assert len(found) == 2


def test_a_build_that_was_cut_off_is_begun_anew(text, tmp_path, monkeypatch):
  given = spec(tmp_path / "index")
  monkeypatch.setattr(bm25, "build", lambda *_, **__: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    engines.build(given, [text], hashed())
  with pytest.raises(ValueError, match="holds no index. Build it with --mode"):
    opened(given, [text])
  monkeypatch.undo()
  engines.build(given, [text], hashed())
  opened(given, [text])


@pytest.mark.parametrize("name", ["data.npy", "terms.txt", "passages.jsonl"])
def test_a_missing_file_is_named(text, tmp_path, name):
  given = spec(tmp_path / "index")
  engines.build(given, [text], hashed())
  (tmp_path / "index" / name).unlink()
  with pytest.raises(ValueError, match=f"lacks {name}"):
    opened(given, [text])


@pytest.mark.parametrize(
  ("change", "says"),
  [
    ({"index": ""}, "needs config.search.index"),
    ({"engine": "google"}, "has no index of ours. Choices: bm25, dense"),
  ],
)
def test_what_cannot_be_built(text, tmp_path, change, says):
  with pytest.raises(ValueError, match=says):
    engines.build(spec(tmp_path / "index") | change, [text], hashed())
  with pytest.raises(ValueError, match="config.corpus"):
    engines.build(spec(tmp_path / "index"), [], hashed())
  with pytest.raises(ValueError, match="No corpus at"):
    engines.build(spec(tmp_path / "index"), [tmp_path / "none"], hashed())
  assert not list(tmp_path.glob("index*"))


def test_dense_needs_an_index(text):
  with pytest.raises(ValueError, match="'dense' needs search.index"):
    opened(spec("", engine="dense"), [text])


MEASURE = """
import resource, sys
from pathlib import Path
from sesa_jax.search import bm25
engine = bm25.load(Path(sys.argv[1]), k1=0.9, b=0.4)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for i in range(20):
  (found,) = engine.search([f"word{i} word{i * 7}"], 3)
  assert len(found) == 3
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) / 1024)
"""


def test_a_search_does_not_read_the_passages(tmp_path):
  size = 4000  # passages of 10 kB: 40 MB
  found = (
    Passage(str(i), "", f"word{i % 400} " + chr(97 + i % 26) * 10_000)
    for i in range(size)
  )
  stored.write_passages(tmp_path, found)
  bm25.build(tmp_path, k1=0.9, b=0.4)
  done = subprocess.run(
    [sys.executable, "-c", MEASURE, str(tmp_path)],
    capture_output=True,
    text=True,
    check=True,
  )
  assert float(done.stdout) < 15  # MiB
