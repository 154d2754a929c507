from __future__ import annotations

import dataclasses

import pytest

from sesa_jax.judge import offline
from sesa_jax.judge.leaks import leaks, text_fields
from sesa_jax.judge.offline import OfflineDistiller
from sesa_jax.language import ENGLISH
from sesa_jax.types import (
  DistillFailure,
  FailureRecord,
  Passage,
  RightAttempt,
  Skill,
)

PAGE = Passage(
  "1",
  "Lake Garda",
  "Lake Garda is the largest lake in Italy. Its deepest point lies 346 metres "
  "below the surface. The Mincio drains the lake at Peschiera. In winter the "
  "Sarca feeds it.",
)
OTHER = Passage("2", "Wine", "Wine is made of grapes.")


def record(question, targets, prediction, passages=(PAGE,), **changes):
  return FailureRecord(
    **dict(
      question_id="q",
      seed_id="s7",
      question=question,
      targets=targets,
      prediction=prediction,
      other_predictions=(),
      passages=passages,
      passages_seen=len(passages),
      wrong_attempts=2,
      success_rate=0.5,
      skill_ids=(),
      iteration=4,
    )
    | changes
  )


DRAIN = "Which river drains the lake Garda?"
CASES = {  # category: a record of it
  "name: wordy": record(DRAIN, ("Mincio",), "the Mincio at Peschiera"),
  "name: cut": record(DRAIN, ("Mincio river",), "Mincio"),
  "name: echo": record(DRAIN, ("Mincio",), "Garda"),
  "measure: kind": record(
    "How deep is the lake?", ("346 metres",), "the Sarca"
  ),
  "name: title": record(DRAIN, ("Mincio",), "Lake Garda", other_predictions=()),
  "person: hop": record("Who named the lake?", ("Ann",), "Lake Garda"),
  "name: neighbour": record(DRAIN, ("Mincio",), "Sarca"),
  "name: decoy": record("What drains the lake?", ("Po",), "Sarca"),
  "date: kind": record("When is the lake fed?", ("1990",), "winter"),
  "location: memory": record("Where does it drain?", ("Peschiera",), "Verona"),
  "number: unfound": record("How many see the surface?", ("9",), "12"),
  "reason: astray": record("Why do birds sing?", ("love",), "joy", (OTHER,)),
}


@pytest.mark.parametrize("category", CASES)
def test_reads_what_went_wrong(category):
  case = CASES[category]
  if category == "name: title":  # "Lake Garda" also echoes the question
    case = dataclasses.replace(case, question="Which river drains it?")
  skill = OfflineDistiller().distill(case, [])
  assert isinstance(skill, Skill)
  assert skill.category == category
  assert (skill.id, skill.origin) == ("", "offline")
  assert (skill.source_seed, skill.created_at) == ("s7", 4)
  assert skill.source_question == case.question
  assert all(text.strip() for text in text_fields(skill))
  assert 1 <= len(skill.templates) <= 3
  assert leaks(skill, case, ENGLISH) is None


def test_the_kinds_due_and_given_are_told():
  skill = OfflineDistiller().distill(CASES["measure: kind"], [])
  assert skill.description.endswith("here a number or date.")
  assert skill.avoidance == "Giving a name instead."


def test_all_cases_differ_and_every_fault_has_one():
  skills = [OfflineDistiller().distill(case, []) for case in CASES.values()]
  assert len({s.description for s in skills}) >= 10
  faults = {category.split(": ")[1] for category in CASES}
  assert faults == set(offline._FAULTS)


def test_plain_words_are_told_and_names_are_not():
  case = record(
    "in which region of italy does the mincio drain the largest lake",
    ("Lombardy",),
    "Veneto",
  )
  skill = OfflineDistiller().distill(case, [])
  # `italy`, `mincio` stand in capitals in the passage; `lake` in its title;
  # `region` and `drain` do not stand in it at all.
  assert skill.trigger.startswith("An extreme asks for the name (largest) ")
  text = " ".join(text_fields(skill)).lower()
  for word in ("italy", "mincio", "lake", "region", "drain "):
    assert word not in text


def test_noun_asked_for():
  page = Passage("1", "Po", "A river and its surface. No point of it is dry.")
  for question, noun in (
    ("Which river is it?", "river"),
    ("What is the surface of it?", "surface"),
    ("What point?", "point"),
    ("Which dry river is it?", "name"),  # an adjective
    ("Which Point is it?", "name"),
  ):
    case = record(question, ("Oglio",), "Adda", (page,))
    skill = OfflineDistiller().distill(case, [])
    assert f"asks for the {noun}" in skill.trigger


def test_another_lesson_where_one_was_shown():
  case = CASES["name: wordy"]
  distiller, shown, written = OfflineDistiller(), [], []
  while isinstance(skill := distiller.distill(case, shown), Skill):
    shown.append(dataclasses.replace(skill, id=f"s{len(shown)}"))
    written.append(skill.category)
  assert written == ["name: wordy", "name: memory"]
  assert skill == DistillFailure(skill.reason, outage=False)


@pytest.mark.parametrize("prediction", ["", "?", " "])
def test_prediction_without_words(prediction):
  case = record(DRAIN, ("Mincio",), prediction, ())
  assert isinstance(OfflineDistiller().distill(case, []), Skill)


def test_same_record_same_skill():
  case = CASES["name: neighbour"]
  assert OfflineDistiller().distill(case, []) == OfflineDistiller().distill(
    case, []
  )


def test_order_of_candidates():
  distil = OfflineDistiller().distill
  late = distil(record("Which drains?", ("Mincio",), "Sarca"), [])
  early = distil(record("Which feeds?", ("Sarca",), "Mincio"), [])
  assert late.avoidance == "Taking the candidate mentioned last."
  assert early.avoidance == "Taking the candidate mentioned first."


WRONG_PAGE = Passage(
  "3", "Ash", "A novel of green cover and short fame by Lee, of many years"
)
RIGHT_PAGE = Passage(
  "4", "Ash", "A novel of brown cover and long fame by Kim, of many years"
)
NOVEL = "Who wrote the novel Ash of brown cover, long fame and many years?"


def contrast(*queries, pages=(RIGHT_PAGE,), question=NOVEL):
  right = tuple(RightAttempt((query,), pages) for query in queries)
  return record(question, ("Kim",), "Lee", (WRONG_PAGE,), right=right)


@pytest.mark.parametrize(
  ("case", "template"),
  [
    # `cover` is on both pages, `brown` on the right one alone.
    (contrast("Ash brown cover"), "{entity} cover"),
    (contrast("Ash", "Ash cover brown"), "{entity} cover"),
    # All that was searched for is on the wrong page, too: no contrast.
    (contrast("Ash many years"), None),
    (contrast("Ash"), None),
    # No word of it is general.
    (contrast("Ash brown"), None),
    # The right pages do not have it; the search was lucky otherwise.
    (contrast("Ash brown cover", pages=(OTHER,)), None),
    # Of the general word the question, or a right page, knows nothing.
    (
      contrast(
        "Ash brown cover",
        question=NOVEL.replace("cover", "paper"),
      ),
      None,
    ),
    (
      contrast(
        "Ash brown cover", pages=(Passage("4", "Ash", "A brown novel by Kim"),)
      ),
      None,
    ),
    # Nothing stands before the name that could be told.
    (
      contrast(
        "Ash brown cover", question="Who wrote Ash, brown cover, long fame?"
      ),
      None,
    ),
    (contrast(), None),
  ],
)
def test_a_right_query_is_a_lesson_where_it_made_the_difference(case, template):
  skill = OfflineDistiller().distill(case, [])
  if template is None:
    assert skill.category == "person: decoy"
    return
  assert skill.category == "novel: cover"
  assert skill.templates == (template,)
  assert "(cover)" in skill.trigger
  assert "novel" in skill.trigger
  assert leaks(skill, case, ENGLISH) is None
  # Shown in vain, it is not written again.
  assert OfflineDistiller().distill(case, [skill]).category == "person: decoy"


@pytest.mark.parametrize(
  ("asked", "page", "clue"),
  [
    # One thing differs; the word in common may stand on either side of it.
    ("of brown cover and many years", "of green cover, of many years", "cover"),
    ("of cover brown and many years", "of green cover, of many years", "cover"),
    # Or on both: then it is the one before.
    ("of cover brown years", "of cover green years", "cover"),
    ("of brown cover, of many years", "of many green years", ""),
    # Two things differ, or nothing does.
    ("of brown cover and long fame", "of green cover and short fame", ""),
    ("of green cover and many years", "of green cover, of many years", ""),
    # A phrase ends at a mark: `years` and `brown` are no neighbours.
    ("of many years, brown", "of many years, green", ""),
    # The same kind of thing differs twice.
    ("of brown cover and red cover", "of green cover, of black cover", ""),
    # Both words are missing: that is another kind of page.
    ("of brown cover and many years", "of many years", ""),
  ],
)
def test_the_one_thing_that_a_near_miss_lacks_is_a_lesson(asked, page, clue):
  wrong = Passage("3", "Ash", f"A novel {page}, by Lee.")
  question = f"Who wrote the novel Ash {asked}?"
  case = record(question, ("Kim",), "Lee", (wrong,))
  skill = OfflineDistiller().distill(case, [])
  assert isinstance(skill, Skill)
  assert leaks(skill, case, ENGLISH) is None
  if clue:
    assert skill.category == "novel: cover"
    assert skill.templates == (f"{{entity}} {clue}",)
    assert f"names a novel ({clue}) " in skill.trigger
  else:
    assert skill.category == "person: decoy"


@pytest.mark.parametrize(
  "question",
  [
    "Who directed Ash in the year 1997?",  # a verb, no noun
    "Who wrote the novel Ashes of brown cover?",  # the name is another
    "Who wrote the sAsh of brown cover?",
  ],
)
def test_what_stands_before_no_name_is_no_subject(question):
  wrong = Passage("3", "Ash", "A novel of the year 1953, directed by Lee.")
  case = record(question, ("Kim",), "Lee", (wrong,))
  assert OfflineDistiller().distill(case, []).category == "person: decoy"


def test_what_is_part_of_a_name_is_no_subject():
  wrong = Passage("3", "Ash (novel)", "A novel of green cover, by Lee.")
  case = record(
    "Who wrote the novel Ash of brown cover?", ("Kim",), "Lee", (wrong,)
  )
  assert OfflineDistiller().distill(case, []).category == "person: decoy"


def test_what_found_the_right_page_tells_more_than_what_differs():
  case = contrast(
    "Ash brown cover",
    question="Who wrote the novel Ash of brown cover and long years?",
  )
  page = Passage("3", "Ash", "A novel of brown cover, by Lee, of many years.")
  near = dataclasses.replace(case, passages=(page,), right=())
  distil = OfflineDistiller().distill
  assert distil(near, []).category == "novel: years"
  page = Passage("3", "Ash", "A novel of green cover, by Lee, of long years.")
  right = RightAttempt(("Ash brown years",), (RIGHT_PAGE,))
  both = dataclasses.replace(case, passages=(page,), right=(right,))
  assert distil(dataclasses.replace(both, right=()), []).category == (
    "novel: cover"
  )
  assert distil(both, []).category == "novel: years"


def test_what_a_page_has_in_its_title_does_not_differ():
  wrong = Passage("3", "Ash, brown", "A novel of green cover, by Lee.")
  case = record(
    "Who wrote the novel Ash of brown cover?", ("Kim",), "Lee", (wrong,)
  )
  assert OfflineDistiller().distill(case, []).category == "person: decoy"


def test_no_prediction_is_no_title():
  case = record("Who wrote Ash?", ("Kim",), "", (Passage("3", "", "By Lee."),))
  assert OfflineDistiller().distill(case, []).category == "person: astray"


def test_a_lesson_in_vain_leaves_room_for_another():
  """Shown is what to search for, not merely that there is something."""
  wrong = Passage("3", "Ash", "A novel of green cover, by Lee.")
  case = record(
    "Who wrote the novel Ash of brown cover?", ("Kim",), "Lee", (wrong,)
  )
  other = dataclasses.replace(
    case, question=case.question.replace("cover", "fame")
  )
  page = Passage("3", "Ash", "A novel of short fame, by Lee.")
  vain = OfflineDistiller().distill(
    dataclasses.replace(other, passages=(page,)), []
  )
  assert vain.category == "novel: fame"
  assert OfflineDistiller().distill(case, [vain]).category == "novel: cover"


def test_a_page_that_has_the_answer_is_no_near_miss():
  wrong = Passage("3", "Ash", "A novel of green cover, by Kim, not Lee.")
  case = record(
    "Who wrote the novel Ash of brown cover?", ("Kim",), "Lee", (wrong,)
  )
  skill = OfflineDistiller().distill(case, [])
  assert skill.category == "person: neighbour"


def test_a_lesson_has_the_article_that_its_noun_takes():
  page = Passage("3", "Ash", "An opera of green cover by Lee, of many years.")
  case = contrast("Ash brown cover", question=NOVEL.replace("novel", "opera"))
  case = dataclasses.replace(case, passages=(page,))
  skill = OfflineDistiller().distill(case, [])
  assert " an opera (cover) " in skill.trigger
  assert skill.avoidance == "Taking an opera with another cover."
