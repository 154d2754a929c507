"""The invented world: what its queries find, and what it does not give away."""

import ast
import collections
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sesa_jax.data import benchmarks, corpus, microworld, seeds
from sesa_jax.judge import offline
from sesa_jax.language import ENGLISH
from sesa_jax.policy import backbones, tokenizer
from sesa_jax.search.bm25 import Bm25
from sesa_jax.skills import record

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  found = tmp_path_factory.mktemp("world")
  microworld.write(found, 0)
  return found


@pytest.fixture(scope="module")
def world():
  rng = np.random.default_rng(5)
  return microworld.build(0, 60, microworld.names(5), rng)


@pytest.fixture(scope="module")
def words():
  return microworld.tokenizer()


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_seed_gives_the_same_bytes(folder, tmp_path):
  def texts(path):
    files = [p for p in path.rglob("*") if p.is_file()]
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in files}

  again, other = tmp_path / "again", tmp_path / "other"
  for path, seed in ((again, 0), (other, 1)):
    path.mkdir()
    microworld.write(path, seed)
  assert texts(again) == texts(folder)
  # The tokenizer is one for all worlds, so that policies can be compared.
  differs = {n for n, text in texts(other).items() if text != texts(folder)[n]}
  assert differs == {n for n in texts(folder) if not n.startswith("blank/")}


def test_the_files_are_what_a_run_reads(folder):
  passages = corpus.load(folder / "corpus.jsonl")
  assert 2_000 < len(passages) < 5_000
  wanted = seeds.from_jsonl(folder / "seeds.jsonl", (1, 2))
  assert {seed.hops for seed in wanted} == {1, 2}
  texts = set()
  for name in microworld.SETS:
    questions = benchmarks.load_questions(folder / f"{name}.jsonl")
    assert len(questions) == microworld.QUESTIONS
    texts |= {question.text for question in questions}
    # An answer whose question needs no search is no question.
    assert not any(ENGLISH.contains_any(q.text, q.targets) for q in questions)
  assert len(texts) == 4 * microworld.QUESTIONS
  config = json.loads((folder / "blank/config.json").read_text())
  assert backbones.from_hf_config(config).dim == 128


def test_what_is_tested_is_never_asked_for_in_training(folder):
  """Seeds and evaluation sets share no answer, and no thing."""
  trained = {
    a for row in rows(folder / "seeds.jsonl") for a in row["ground_truth"]
  }
  tested = {
    answer
    for name in microworld.SETS
    for row in rows(folder / f"{name}.jsonl")
    for answer in row["golden_answers"]
  }
  assert trained
  assert tested
  assert not trained & tested


def test_questions_are_answered_by_reading(folder):
  """Of all files: by a reader who knows the rules, and no code of the world.

  The name and the rule's sign lead to one article; from its text on it is what
  the question asks for. A town goes by either name.
  """
  law = json.loads((folder / "world.json").read_text())["rules"]
  titled, older = collections.defaultdict(list), []
  for row in rows(folder / "corpus.jsonl"):
    titled[row["title"]].append((row["id"], row["text"]))

  def fact(words, text):
    return re.search(rf"(?i:{words}) ([A-Z]\w+(?: [A-Z]\w+)?)", text)[1]

  of_things = {"maker": "made by", "place": "kept in"}
  of_people = {"born": "born in", "firm": "works for", "prize": "won"}
  for name in (*microworld.SETS, "train_1", "train_2"):
    relations = collections.Counter()
    for row in rows(folder / f"{name}.jsonl"):
      relation = row["metadata"]["relation"]
      relations[relation] += 1
      found = re.search(r"the (\w+) ([A-Z]\w+) with (.*)", row["question"])
      type, thing, told = found.groups()
      assert type == row["metadata"]["type"]
      sign = re.search(rf"\b{law[type]} \w+", told)[0]
      ((id, text),) = [
        (id, text)
        for id, text in titled[thing]
        if re.search(rf"\b{sign}\b", text)
      ]
      assert f" {type} " in text
      # Trained on is one part of the world, tested the other.
      assert id.startswith("0-" if name.startswith("train") else "1-")
      if relation in of_people:
        ((_, text),) = titled[fact(of_things["maker"], text)]
      answer = fact((of_things | of_people)[relation], text)
      assert answer in row["golden_answers"]
      if relation == "born":
        older.append(answer != row["golden_answers"][0])
    asked = of_people if name.endswith("2") else of_things
    assert set(relations) == set(asked)
    assert max(relations.values()) - min(relations.values()) <= 1
  assert 0.1 < np.mean(older) < 0.3  # a fifth of the articles


def test_taught_and_held_out_are_apart(folder):
  for seed in range(4):
    taught, held_out = microworld.split(seed)
    assert sorted(taught + held_out) == sorted(microworld.TYPES)
    assert len(taught) == len(held_out) == 6
  taught, held_out = microworld.split(0)
  assert microworld.split(1)[0] != taught

  def types(name):
    return {r["metadata"]["type"] for r in rows(folder / f"{name}.jsonl")}

  for hops in (1, 2):
    assert types(f"taught_{hops}") == set(taught)
    assert types(f"held_out_{hops}") == set(held_out)
  skills = [r.skill for r in record.load(folder / "skills.jsonl")]
  told = {skill.category.removeprefix("same name: ") for skill in skills}
  assert told == set(taught)
  texts = " ".join(str(skill) for skill in skills)
  assert not re.search(rf"\b({'|'.join(held_out)})\b", texts)


def test_rules_differ_between_seeds_and_are_even():
  laws = [microworld.rules(seed) for seed in range(6)]
  for law in laws:
    assert set(collections.Counter(law.values()).values()) == {2, 3}
  same = np.mean([laws[0][t] == law[t] for law in laws[1:] for t in law])
  assert 0.1 < same < 0.3  # by chance a fifth


def test_what_queries_find(world):
  """Hit@1 of each kind of query, as docs/microworld.md has it."""
  search, rng = Bm25(world.passages), np.random.default_rng(0)
  hits = collections.defaultdict(list)
  for thing in world.things:
    rule = world.rules[thing.type]
    signs = microworld.asked_signs(thing, rng)
    (wrong, value), *_ = [s for s in signs if s[0] != rule]
    queries = {
      "name": thing.name,
      "name and type": f"{thing.name} {thing.type}",
      "right": f"{thing.name} {rule} {thing.signs[rule]}",
      "wrong": f"{thing.name} {wrong} {value}",
      "question": microworld.ask(thing, "maker", signs, rng),
      "values": " ".join((thing.name, *(value for _, value in signs))),
      "two": " ".join((thing.name, signs[0][1], signs[1][1])),
    }
    for kind, query in queries.items():
      ((first,),) = search.search([query], 1)
      hits[kind].append(world.about.get(first.id) is thing)
      if kind != "values":  # some of which do not fit
        fits = kind != "question"
        assert (len(query) <= microworld.QUERY) == fits, query
  shares = {kind: np.mean(found) for kind, found in hits.items()}
  assert shares == {
    "name": 0.125,
    "name and type": 0.125,
    "right": 1.0,
    "wrong": 0.125,
    "question": 1.0,
    "values": 1.0,  # a way around the rule, see below
    "two": pytest.approx(0.71, abs=0.02),  # 2/3, and an eighth of the rest
  }


def test_values_without_their_signs_mostly_fit():
  """As docs/microworld.md says; 4 is a name, with a space before each value."""
  lengths = [
    4 + sum(1 + len(value) for value in told)
    for signs in itertools.combinations(microworld.SIGNS.values(), 3)
    for told in itertools.product(*signs)
  ]
  fit = np.mean(np.array(lengths) <= microworld.QUERY)
  assert round(float(fit), 2) == 0.93


def test_no_query_has_room_for_two_signs(world):
  shortest = sorted(
    min((f"{sign} {value}" for value in values), key=len)
    for sign, values in microworld.SIGNS.items()
  )
  shortest.sort(key=len)
  two = f"{world.things[0].name} {shortest[0]} {shortest[1]}"
  assert len(two) > microworld.QUERY


def test_the_next_hop_is_found_by_name(world):
  search = Bm25(world.passages)
  for name in world.people:
    ((first,),) = search.search([name], 1)
    assert world.about[first.id] is world.people[name]


def test_answers_lead_to_what_can_be_asked(world):
  """The challenger's queries find whom or what an answer belongs to."""
  search = Bm25(world.passages)

  def found(query):
    ((first,),) = search.search([query], 1)
    return world.about.get(first.id)

  for relation in ("maker", "place"):
    for answer in {getattr(thing, relation) for thing in world.things}:
      thing = found(f"{answer} made kept")
      assert getattr(thing, relation) == answer
  for relation, word in (("firm", "works"), ("prize", "won")):
    for answer in {getattr(p, relation) for p in world.people.values()}:
      assert getattr(found(f"{answer} {word}"), relation) == answer


def test_a_question_does_not_say_which_sign_tells(world):
  """All three that it tells are true, and the right one stands anywhere."""
  rng, places = np.random.default_rng(1), collections.Counter()
  for thing in world.things:
    rule = world.rules[thing.type]
    signs = microworld.asked_signs(thing, rng)
    assert len(signs) == len(dict(signs)) == 3
    assert all(thing.signs[sign] == value for sign, value in signs)
    places[[sign for sign, _ in signs].index(rule)] += 1
    namesakes = [t for t in world.things if t.name == thing.name]
    assert len(namesakes) == microworld.NAMESAKES
    for sign, value in signs:
      bearers = sum(t.signs[sign] == value for t in namesakes)
      assert bearers == (1 if sign == rule else microworld.NAMESAKES)
  # One sigma of a third of 300 is 0.027.
  for count in places.values():
    assert abs(count / len(world.things) - 1 / 3) < 0.1


def test_names_are_whole_and_in_no_word():
  found = list(microworld.names(3))
  assert len(set(found)) == len(found) > 5_000
  known = " ".join(microworld.vocabulary_words()).lower()
  assert not any(name.lower() in known for name in found)


# --- the tokenizer ---------------------------------------------------------


def test_ids_are_few_and_names_are_two(words):
  assert 512 <= len(words) <= microworld.ARCHITECTURE["vocab_size"] == 1024
  for name in list(microworld.names(0))[:200]:
    assert len(words.encode(f" {name}")) == 2
  one_each = (*microworld.WORDS, *microworld.PLAIN)
  for word in one_each:
    assert len(words.encode(f" {word}")) == 1, word
  for tag in ("search", "answer", "question", "think", "information"):
    assert len(words.encode(f"<{tag}>")) == len(words.encode(f"</{tag}>")) == 1
  tokenizer.token_bytes(words)  # refuses what is not byte-level


def test_a_syllable_is_one_id_wherever_it_stands(words):
  ids = words.encode(
    "Who made BaDi?\n<search> BaDi</search>(Title: BaDi) BaDi."
  )
  first, second = words.encode(" BaDi")
  assert ids.count(first) == ids.count(second) == 4


@given(text=st.text())
def test_any_text_comes_back(words, text):
  assert words.decode(words.encode(text)) == text


# --- written apart -----------------------------------------------------------


def test_the_distiller_knows_nothing_of_the_world():
  text = (ROOT / "sesa_jax/judge/offline.py").read_text()
  asked = [way for of in microworld.ASKED.values() for way in of.items()]
  templates = [*microworld._THING, *microworld._PERSON, *microworld._TOWN]
  templates += [*microworld._FIRM, *microworld._PRIZE]
  templates += [t for relation, ways in asked for t in (relation, *ways)]
  plain = " ".join(re.sub(r"\{.*?\}", " ", t) for t in templates)
  theirs = set(re.findall(r"[a-z]+", plain.lower())) - offline._FUNCTION_WORDS
  # Of all English: a choice between two, and a question about a year.
  theirs = (theirs | microworld.WORDS) - {"between", "year"}
  assert {"prize", "kept", "firm", "place", "seat"} <= theirs
  assert not set(re.findall(r"[a-z]+", text.lower())) & theirs
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.ImportFrom):
      assert "microworld" not in node.module
      assert not {"microworld", "warm_start"} & {n.name for n in node.names}
