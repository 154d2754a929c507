from __future__ import annotations

import dataclasses
import json
import logging

import pytest

from sesa_jax import metrics
from sesa_jax.judge.offline import OfflineDistiller
from sesa_jax.language import ENGLISH
from sesa_jax.retrieval.encoder import HashEncoder
from sesa_jax.skills import bank as skill_bank
from sesa_jax.stages import distillation
from sesa_jax.types import DistillFailure, FailureRecord, Passage, Skill

ENCODER = HashEncoder(64)


def record(id="q", **changes) -> FailureRecord:
  return dataclasses.replace(
    FailureRecord(
      question_id=id,
      seed_id=f"seed of {id}",
      question=f"Where is {id.upper()} kept?",
      targets=("Rome",),
      prediction="Bonn",
      other_predictions=(),
      passages=(Passage("1", "Bonn", "Bonn lies on a river."),),
      passages_seen=1,
      wrong_attempts=1,
      success_rate=0.5,
      skill_ids=(),
      iteration=1,
    ),
    **changes,
  )


def skill(description, **changes) -> Skill:
  return dataclasses.replace(
    Skill("", "c", description, "t", "e", "a", ("z",), "made up"), **changes
  )


@dataclasses.dataclass
class Scripted:
  """Answers by question id, and remembers what it was asked."""

  answers: dict
  name: str = "chat"
  asked: list = dataclasses.field(default_factory=list)

  def distill(self, record, shown):
    self.asked.append((record.question_id, [s.id for s in shown]))
    return self.answers[record.question_id]


def distill(bank, queue, distiller, **changes):
  return distillation.distill(
    bank,
    queue,
    **dict(
      distiller=distiller,
      encoder=ENCODER,
      language=ENGLISH,
      iteration=10,
      every=10,
      min_pending=1,
      max_records=30,
      threshold=0.9,
      admit=True,
    )
    | changes,
  )


def empty(capacity=10):
  return skill_bank.create(capacity, ENCODER.dim)


# --- the queue -------------------------------------------------------------


@pytest.mark.parametrize(
  ("changes", "points"),
  [
    ({}, 0),
    ({"skill_ids": ("a",)}, 10),
    ({"wrong_attempts": 2}, 5),
    ({"passages_seen": 6}, 0),
    ({"passages_seen": 7}, 3),
    ({"skill_ids": ("a", "b"), "wrong_attempts": 5, "passages_seen": 9}, 18),
  ],
)
def test_priority(changes, points):
  assert distillation.priority(record(**changes)) == points


def test_queue_keeps_the_newest_or_the_best():
  good = record("good", wrong_attempts=2)
  old, new, last = record("old"), record("new", iteration=2), record("last")
  queue, dropped = distillation.enqueue((), [good, old], 3, "newest")
  assert (queue, dropped) == ((good, old), 0)
  queue, dropped = distillation.enqueue(queue, [new, last], 2, "newest")
  assert (queue, dropped) == ((new, last), 2)
  queue, dropped = distillation.enqueue((old, good), [new], 2, "best")
  assert (queue, dropped) == ((good, new), 1)  # in order of arrival
  with pytest.raises(ValueError, match="'oldest'.*newest, best"):
    distillation.enqueue((), [], 1, "oldest")


def test_due():
  assert [i for i in range(31) if distillation.due(i, 10)] == [10, 20, 30]
  assert [i for i in range(3) if distillation.due(i, 1)] == [1, 2]
  with pytest.raises(ValueError, match=r"distillation\.every = 0"):
    distillation.due(1, 0)


# --- distillation ----------------------------------------------------------


@pytest.mark.parametrize(
  "changes", [{"iteration": 9}, {"min_pending": 2}, {"admit": False}]
)
def test_not_now(changes):
  bank, queue, distiller = empty(), (record(),), Scripted({})
  after, left, report = distill(bank, queue, distiller, **changes)
  assert after is bank
  assert left == queue
  assert distiller.asked == []
  assert report.rows == []
  assert report.metrics["distillation/pending"] == 1


def test_best_first_and_no_more_than_asked_for():
  queue = (
    record("a"),
    record("c", iteration=2),
    record("b", iteration=2),
    record("best", skill_ids=("s", "gone")),
  )
  bank = empty()
  vector = ENCODER.encode(["x"], "passage")
  bank, _ = skill_bank.prime(bank, [skill("s", id="s")], vector)
  answers = dict.fromkeys("abc", DistillFailure("no", outage=False))
  distiller = Scripted({**answers, "best": DistillFailure("no", False)})
  _, left, _ = distill(bank, queue, distiller, max_records=3)
  # Priority, then newest, then question id; shown are those the bank knows.
  assert distiller.asked == [("best", ["s"]), ("b", []), ("c", [])]
  assert left == (record("a"),)


def test_what_becomes_of_each_record():
  # Of equal priority: in the order of their ids.
  queue = tuple(record(id) for id in ("e", "d", "c", "b", "a"))
  answers = {
    "a": skill("read the page again", source_seed="forgotten", id="mine"),
    "b": skill("read the page again"),
    "c": skill("go to rome"),
    "d": DistillFailure("timeout", outage=True),
    "e": DistillFailure("refused", outage=False),
  }
  bank, left, report = distill(empty(), queue, Scripted(answers))
  assert left == (record("d"),)
  born = skill(
    "read the page again",
    id="skill-00001",
    origin="chat",  # the distiller's name; and where it came from, always:
    source_question="Where is A kept?",
    source_seed="seed of a",
    created_at=10,
  )
  assert bank.skills == (born,)
  rows = {row["question"]: row for row in report.rows}
  assert {id: (row["outcome"], row["reason"]) for id, row in rows.items()} == {
    "a": ("admitted", ""),
    "b": ("rejected", "similar"),
    "c": ("rejected", "leak_target"),
    "d": ("failed", "timeout"),
    "e": ("failed", "refused"),
  }
  assert len(report.rows) == 5
  assert rows["a"]["skill"] == "skill-00001"
  assert rows["a"]["text"] == skill_bank.rendered(born)
  assert (rows["b"]["similarity"], rows["b"]["nearest"]) == (1, "skill-00001")
  assert {k: v for k, v in report.metrics.items() if v} == {
    "distillation/pending": 1,
    "distillation/outages": 1,
    "distillation/admitted": 1,
    "distillation/rejected": 2,
    "distillation/failed": 2,
    "distillation/rejected/similar": 1,
    "distillation/rejected/leak_target": 1,
  }


def test_all_lost_changes_nothing_and_none_is_lost():
  bank, queue = empty(), (record("a"), record("b"))
  outage = Scripted(dict.fromkeys("ab", DistillFailure("down", outage=True)))
  after, left, _ = distill(bank, queue, outage)
  assert left == queue
  assert after.records == bank.records
  works = Scripted({"a": skill("first lesson"), "b": skill("other matter")})
  after, left, _ = distill(after, left, works, iteration=20)
  assert left == ()
  assert [s.source_question for s in after.skills] == [
    "Where is A kept?",
    "Where is B kept?",
  ]


def test_same_question_id_of_two_iterations():
  queue = (record("a", iteration=1), record("a", iteration=2))
  distiller = Scripted({"a": DistillFailure("no", outage=False)})
  _, left, _ = distill(empty(), queue, distiller, max_records=1)
  assert left == (record("a", iteration=1),)


def test_evictions_stand_among_the_rows():
  queue = (record("a"), record("b"))
  answers = {"a": skill("first lesson"), "b": skill("other matter")}
  bank, left, report = distill(empty(1), queue, Scripted(answers))
  assert left == ()
  assert [(row["event"], row["skill"]) for row in report.rows] == [
    ("admit", "skill-00001"),
    ("admit", "skill-00002"),
    ("evict", "skill-00001"),
  ]
  assert report.metrics["distillation/admitted"] == 2


def test_warns_when_most_leak(caplog):
  queue = (record("a"), record("b"))
  half = {"a": skill("go to rome"), "b": skill("other matter")}
  most = {"a": skill("go to rome"), "b": skill("the bonn page")}
  with caplog.at_level(logging.WARNING, "absl"):
    distill(empty(), queue, Scripted(half))
    assert not caplog.records
    _, _, report = distill(empty(), queue, Scripted(most))
  assert "rejected 2 of 2" in caplog.text
  assert report.metrics["distillation/rejected/leak_title"] == 1


def test_offline_distiller_all_the_way():
  queue = tuple(record(id) for id in "abc")
  once = distill(empty(), queue, OfflineDistiller())
  bank, left, report = once
  assert left == ()
  assert [s.origin for s in bank.skills] == ["offline"]  # one text for all
  assert report.metrics["distillation/rejected/similar"] == 2
  again = distill(empty(), queue, OfflineDistiller())
  assert skill_bank.rows(again[0]) == skill_bank.rows(bank)
  assert again[2] == report


def test_record_survives_a_checkpoint():
  waits = record("a", skill_ids=("s",), other_predictions=("Köln", "Ulm"))
  text = json.dumps(metrics.plain(waits))
  assert distillation.from_json(json.loads(text)) == waits
