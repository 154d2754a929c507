"""The failures that distillers are measured on, and how they are counted."""

import collections
import json
import os
from pathlib import Path

import pytest

from benchmarks import distillers
from sesa_jax.data import benchmarks
from sesa_jax.judge import leaks
from sesa_jax.judge.offline import OfflineDistiller
from sesa_jax.language import ENGLISH, question_key
from sesa_jax.retrieval.encoder import HashEncoder
from sesa_jax.types import Case, DistillFailure, Skill
from tests import driver, scripted
from tests.llm_server import Server, no_certificates, says
from tests.test_loop import tiny_config

pytestmark = pytest.mark.usefixtures(no_certificates.__name__)

ASSETS = Path(
  os.environ.get("SESA_JAX_ASSETS") or Path.home() / ".cache" / "sesa_jax"
)


def test_the_failures_are_60_different_ones():
  records = distillers.read()
  assert len(records) == 60
  assert len({question_key(record.question) for record in records}) == 60
  assert len({record.question_id for record in records}) == 60
  for record in records:
    wrong = (record.prediction, *record.other_predictions)
    right = {ENGLISH.normalize_answer(target) for target in record.targets}
    assert not right & {ENGLISH.normalize_answer(text) for text in wrong}
    assert record.passages
    assert record.passages_seen == len(record.passages)
    assert 0 < record.success_rate < 1
    assert record.wrong_attempts == round(5 - 5 * record.success_rate)
  # Answered by what was read, by another page, or by none that was found.
  found = [
    ENGLISH.mentions_any(" ".join(p.text for p in r.passages), r.targets)
    for r in records
  ]
  assert 0.5 < sum(found) / 60 < 0.9
  assert sum(bool(record.right) for record in records) >= 4


@pytest.mark.slow
def test_none_is_a_question_of_an_evaluation_set():
  folder = ASSETS / "open-qa"
  files = sorted(folder.glob("topics.*.txt"))
  if not files:
    pytest.skip("no open-qa; python third_party/fetch.py --set=demo")
  own = {question_key(record.question) for record in distillers.read()}
  for path in files:
    asked = benchmarks.load_questions(str(path), source="x")
    assert not own & {question_key(question.text) for question in asked}, path


def test_outcomes_by_hand():
  records = distillers.read()[:7]
  base = {k: v for k, v in scripted.SKILL.items() if k != "templates"}

  def skill(text):
    return Skill(
      "",
      templates=(),
      origin="",
      **base | {"description": text, "trigger": text},
    )

  leaky = skill(f"It is {records[3].targets[0]}.")
  assert leaks.leaks(leaky, records[3], ENGLISH)
  written = [
    skill("count the vowels of each line"),
    skill("count the vowels of each line"),
    skill("open a window before noon"),
    leaky,
    DistillFailure("malformed", outage=False),
    DistillFailure("refused", outage=False),
    DistillFailure("down", outage=True),
  ]
  found = distillers.measure(lambda _: written, records, HashEncoder(64), 0.9)
  assert found.pop("seconds") >= 0
  assert found == pytest.approx(
    {
      "admitted": 2 / 7,
      "leaked": 1 / 7,
      "duplicate": 1 / 7,
      "malformed": 2 / 7,
      "lost": 1 / 7,
    }
  )


def test_the_offline_distiller_writes_many_kinds():
  records = distillers.read()
  skills = [OfflineDistiller().distill(record, ()) for record in records]
  assert all(isinstance(skill, Skill) for skill in skills)
  faults = collections.Counter(s.category.split(": ")[1] for s in skills)
  assert len(faults) >= 6  # the failures are varied
  found = distillers.measure(
    OfflineDistiller().distill_all, records, HashEncoder(64), 0.93
  )
  assert found["malformed"] == found["lost"] == 0
  assert sum(found[name] for name in distillers.OUTCOMES) == pytest.approx(1)


def test_each_distiller_writes_under_a_config(monkeypatch):
  """The judge's model, the policy and the rules, by the config's names."""
  monkeypatch.chdir(distillers.FILE.parents[1])
  records = distillers.read()[:2]
  act = says(json.dumps(scripted.SKILL))
  with Server(then=act) as server, driver.playing_the_script():
    config = tiny_config(
      **{"judge.base_url": server.url, "judge.key_env": ""}
      | {"verifier.max_tokens": 4096}
    )
    for name, asked in (("chat", 2), ("solver", 2), ("offline", 2)):
      write = distillers.writer(name, config)
      found = write([Case((record,), ()) for record in records])
      assert [skill.origin for skill in found] == [name] * 2
      assert len(server.requests) == asked
  with pytest.raises(ValueError, match="'chat' asks a model"):
    distillers.writer("chat", tiny_config())


def test_the_file_is_what_a_runs_failures_are():
  keys = {
    frozenset(json.loads(line))
    for line in distillers.FILE.read_text("utf-8").splitlines()
  }
  assert len(keys) == 1
