from __future__ import annotations

import json

import pytest

from sesa_jax.data import seeds
from sesa_jax.language import ENGLISH
from sesa_jax.types import Passage, Question, Seed


def passages(*titles):
  return tuple(Passage(str(i), t, "text") for i, t in enumerate(titles))


def test_usable_titles_become_seeds():
  made = seeds.from_titles(
    passages(
      "Bern",
      "Bern",  # its second passage
      "Dune (novel)",
      "Dune (film)",
      "1984",
      "X",
      "x" * 61,
      "List of cities",
      "Rome (disambiguation)",
      "",
      "Łódź",
    ),
    hops=(1, 3),
  )
  assert made == (
    Seed("title/Bern", ("Bern",), 1),
    Seed("title/Dune (novel)", ("Dune", "Dune (novel)"), 3),
    Seed("title/Łódź", ("Łódź",), 1),
  )


def test_titles_without_a_usable_one():
  with pytest.raises(ValueError, match="seed list is empty: none of 2"):
    seeds.from_titles(passages("1", ""), hops=(1,))
  for hops in ((), (0,), ("1",)):
    with pytest.raises(ValueError, match=r"seeds.hops="):
      seeds.from_titles(passages("Bern"), hops=hops)


def test_jsonl_of_search_self_play(tmp_path):
  path = tmp_path / "train.jsonl"
  rows = [
    {"ground_truth": "Paris", "search_turns": 1, "sys_question_example": "?"},
    {"ground_truth": ["New York", "NYC\u2028"], "search_turns": 3},
  ]
  path.write_text(
    "\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n\n"
  )
  both = (
    Seed("train/0", ("Paris",), 1),
    Seed("train/1", ("New York", "NYC"), 3),
  )
  assert seeds.from_jsonl(path) == both
  assert seeds.from_jsonl(path, hops=(2, 3)) == both[1:]
  with pytest.raises(ValueError, match=r"empty.*hops in \[2\]"):
    seeds.from_jsonl(path, hops=(2,))


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ('{"search_turns": 1}', "ground_truth"),
    ('{"ground_truth": "x"}', "search_turns"),
    ('{"ground_truth": 3, "search_turns": 1}', "string"),
    ('{"ground_truth": [], "search_turns": 1}', "No answer"),
    ('{"ground_truth": "x", "search_turns": "1"}', "count"),
    ('{"ground_truth": "x", "search_turns": 0}', "count"),
    ('{"ground_truth": "x", "search_turns": true}', "count"),
    ("[1]", "expected the fields"),
    ("{", "line 1"),
  ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
  path = tmp_path / "s.jsonl"
  path.write_text(f'{{"ground_truth": "x", "search_turns": 1}}\n{line}\n')
  with pytest.raises(ValueError, match=message) as error:
    seeds.from_jsonl(path)
  assert f"{path}:2:" in str(error.value)


def test_missing_and_empty_files(tmp_path):
  with pytest.raises(ValueError, match="no such file"):
    seeds.from_jsonl(tmp_path / "gone.jsonl")
  (tmp_path / "s.jsonl").write_text("\n")
  with pytest.raises(ValueError, match="seed list is empty"):
    seeds.from_jsonl(tmp_path / "s.jsonl")


ALL = tuple(Seed(str(i), (f"t{i}",), 1) for i in range(10))


def draws(count, times, seed=0, position=0):
  out = []
  for _ in range(times):
    drawn, position = seeds.draw(ALL, count, seed=seed, position=position)
    out.append(drawn)
  return out, position


def test_an_epoch_holds_every_seed_once_and_epochs_differ():
  out, position = draws(5, 4)
  first, second = out[0] + out[1], out[2] + out[3]
  assert set(first) == set(second) == set(ALL)
  assert first != second
  assert first != ALL
  assert position == 20


def test_no_seed_twice_in_a_draw():
  out, _ = draws(3, 40)
  assert all(len(set(drawn)) == 3 for drawn in out)
  assert {s for drawn in out for s in drawn} == set(ALL)
  # 3 + 3 + 3 of the first ten, then the next epoch.
  assert len(set(out[0] + out[1] + out[2])) == 9
  assert draws(3, 4)[1] == 13


def test_a_saved_position_goes_on_where_it_stopped():
  whole, end = draws(3, 9)
  head, position = draws(3, 4)
  tail, again = draws(3, 5, position=position)
  assert head + tail == whole
  assert again == end
  assert draws(3, 9, seed=1)[0] != whole


def test_all_of_them_and_too_many():
  (drawn,), position = draws(10, 1)
  assert set(drawn) == set(ALL)
  assert position == 10
  with pytest.raises(ValueError, match="draws 11 seeds, but .* only 10"):
    draws(11, 1)


def test_a_plain_list_has_an_answer_a_line(tmp_path):
  path = tmp_path / "answers.txt"
  path.write_text("Paris\nNew York\tNYC\t Big Apple\n\nPARIS\nŁódź\n")
  assert seeds.from_list(path, (1, 2)) == (
    Seed("answers/0", ("Paris",), 1),
    Seed("answers/1", ("New York", "NYC", "Big Apple"), 2),
    Seed("answers/4", ("Łódź",), 1),
  )
  with pytest.raises(ValueError, match=r"seeds.hops=\(0,\)"):
    seeds.from_list(path, (0,))
  path.write_text("\n")
  with pytest.raises(ValueError, match="holds no answer"):
    seeds.from_list(path, (1,))
  with pytest.raises(ValueError, match="no such file"):
    seeds.from_list(tmp_path / "gone.txt", (1,))


def test_seeds_with_the_answer_of_an_evaluation_question_are_found():
  def question(*targets):
    return Question("q", "Who?", targets, 1, "q", "fixed")

  mine = (
    Seed("a", ("Paris",), 1),
    Seed("b", ("the City", "LONDON."), 1),  # by an alias, normalised
    Seed("c", ("Parisian",), 1),
  )
  asked = [question("x", "paris"), question("London")]
  found = seeds.tested(mine, asked, ENGLISH)
  assert [seed.id for seed in found] == ["a", "b"]
  assert seeds.tested(mine, [], ENGLISH) == []


def test_questions_are_drawn_like_seeds():
  questions = tuple(
    Question(f"q{i}", f"Who is {i}?", ("x",), 1, f"q{i}", "fixed")
    for i in range(7)
  )
  seen, position = [], 0
  for _ in range(2):
    drawn, position = seeds.draw(questions, 3, seed=0, position=position)
    seen += drawn
  assert len(set(seen)) == 6
  # The next three do not fit into the epoch: another begins.
  third, end = seeds.draw(questions, 3, seed=0, position=position)
  assert end == 7 + 3
  assert set(third) <= set(questions)
