"""Evaluation against values from elsewhere, and against its pitfalls."""

import dataclasses

import numpy as np
import pytest
import rich.console

from configs import tiny
from sesa_jax import evaluation, show, types
from sesa_jax.language import ENGLISH
from sesa_jax.policy import model, tokenizer
from sesa_jax.policy.backbones import tiny as tiny_backbone
from sesa_jax.retrieval import encoder
from sesa_jax.skills import bank as skill_bank
from sesa_jax.stages import priming
from tests import scripted


def attempt(number, prediction, verdict, searches=1, passage="nothing"):
  question = types.Question(
    f"q{number}", f"What is {number}?", ("seven", "7"), 1, "", "fixed"
  )
  passages = (types.Passage("p", "A title", passage),)
  turn = types.Turn(2, 3, 3, "", "search", "x", passages, "")
  episode = types.Episode(
    question.id,
    0,
    "eval/none",
    np.arange(3, dtype=np.int32),
    2,
    np.array([False, False, True]),
    np.zeros(3, np.float32),
    (turn,) * searches,
    "answer",
  )
  return types.Attempt(question, episode, prediction, verdict, ())


RIGHT, WRONG, UNKNOWN = types.Verdict


def test_wilson_interval_by_published_values():
  """Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
  for right, total, low, high in (
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0, 0.1611),
    (1, 29, 0.0061, 0.1718),
  ):
    found = evaluation.interval(right, total, 0.95)
    assert found == pytest.approx((low, high), abs=5e-5)
  assert evaluation.interval(29, 29, 0.95) == pytest.approx(
    (0.8830, 1.0), abs=5e-5
  )
  assert evaluation.interval(0, 0, 0.95) == (0.0, 1.0)


def test_score_by_hand():
  attempts = [
    attempt(0, "Seven", RIGHT, searches=2, passage="The SEVEN, or so."),
    attempt(1, "number seven", WRONG, searches=0, passage="seven"),
    attempt(2, None, WRONG, passage="It has 7."),
    attempt(3, "six", WRONG, passage="seventy-77"),
  ]
  found = evaluation.score(attempts, ENGLISH, 0.95)
  assert found["n"] == 4
  assert found["em"] == 0.25
  assert found["f1"] == pytest.approx((1 + 2 / 3 + 0 + 0) / 4)
  assert found["answered"] == 3
  assert found["searches"] == 1.0
  assert found["prompt_tokens"] == 2
  assert [p["verdict"] for p in found["predictions"]] == [
    "right", "wrong", "wrong", "wrong",
  ]  # fmt: skip
  assert [(p["searches"], p["found"]) for p in found["predictions"]] == [
    (2, True), (0, False), (1, True), (1, False),
  ]  # fmt: skip


def test_unknown_gives_a_range_and_no_number():
  attempts = [attempt(0, "7", RIGHT), attempt(1, None, UNKNOWN)]
  found = evaluation.score(attempts, ENGLISH, 0.95)
  assert found["em"] is None
  assert (found["em_low"], found["em_high"]) == (0.5, 1.0)
  low, high = found["em_interval"]
  assert low == pytest.approx(evaluation.interval(1, 2, 0.95)[0])
  assert high == 1.0


@dataclasses.dataclass
class NoTools:
  """Tools of a scripted policy that always answers the same."""

  environments: dict
  engine: object
  tokenizer: object
  encoder: object
  language = ENGLISH
  render = None
  on_episode = None
  count_tokens = types.Tools.count_tokens


def answering_seven(seen):
  """A scripted policy, and the weights that it needs to be called."""
  from sesa_jax import prompts
  from sesa_jax.environment import SearchQA

  words = tokenizer.tiny()
  backbone = tiny_backbone()

  def script(request, attempt, turn):
    seen.append(request)
    return "<answer>seven</answer>"

  tools = NoTools(
    environments={
      "solver": SearchQA(
        "solver",
        None,
        words,
        ENGLISH,
        passages_per_search=1,
        observation_tokens=64,
        max_malformed=0,
        max_answer_words=32,
        max_query_characters=100,
      )
    },
    engine=scripted.ScriptedEngine(model.build(backbone), words, script),
    tokenizer=words,
    encoder=encoder.HashEncoder(32),
  )
  tools.render = lambda prompt: prompts.render(words, prompt)
  tools.on_episode = lambda episode: None
  return tools, model.init(backbone, scripted.jax.random.key(0))


def test_every_question_is_scored_and_twice_the_same():
  """10 questions are 10 rows, whatever the engine batches; and greedy."""
  seen = []
  tools, weights = answering_seven(seen)
  bank, _ = priming.prime(skill_bank.create(20, 32), "seeds15", tools.encoder)
  sets = {
    "seven": [attempt(i, None, WRONG).question for i in range(7)],
    "six": [
      dataclasses.replace(attempt(i, None, WRONG).question, targets=("six",))
      for i in range(7, 10)
    ],
  }
  first, second = (
    evaluation.evaluate(
      weights, bank, sets, tools, tiny.get_config(), iteration=3
    )
    for _ in range(2)
  )
  by = {(c["set"], c["bank"]): c for c in first}
  assert {k: (c["n"], c["em"]) for k, c in by.items()} == {
    ("seven", "none"): (7, 1.0),
    ("seven", "final"): (7, 1.0),
    ("six", "none"): (3, 0.0),
    ("six", "final"): (3, 0.0),
  }
  assert all(r.sampling.temperature == 0.0 for r in seen)
  assert {cell["temperature"] for cell in first} == {0.0}
  off = [p["skill_ids"] for p in by["seven", "none"]["predictions"]]
  on = [p["skill_ids"] for p in by["seven", "final"]["predictions"]]
  assert not any(off)
  assert all(on)
  more = by["seven", "final"]["prompt_tokens"]
  assert more > by["seven", "none"]["prompt_tokens"]
  for a, b in zip(first, second, strict=True):
    a.pop("seconds/question")
    b.pop("seconds/question")
    assert a == b


def test_another_bank_and_another_temperature():
  seen = []
  tools, weights = answering_seven(seen)
  own, _ = priming.prime(skill_bank.create(200, 32), "seeds15", tools.encoder)
  config = tiny.get_config().copy_and_resolve_references().unlock()
  config.eval.banks = ("final", "other")
  config.eval.other = "authored157"
  config.eval.temperature = 0.5
  config.eval.episodes = 2
  sets = {"seven": [attempt(i, None, WRONG).question for i in range(3)]}
  cells = evaluation.evaluate(weights, own, sets, tools, config, iteration=3)
  assert [cell["bank"] for cell in cells] == ["final", "other"]
  assert {r.sampling.temperature for r in seen} == {0.5}
  said = " ".join(text_of(evaluation.table(cells)).split())
  assert "temperature 0.5" in said
  for cell in cells:
    kept = [p.get("episode") for p in cell["predictions"]]
    assert [row and row["question"] for row in kept] == [
      "What is 0?", "What is 1?", None,
    ]  # fmt: skip
    assert {row["arm"] for row in kept[:2]} == {f"eval/{cell['bank']}"}
    assert kept[0]["turns"][0]["text"] == "<answer>seven</answer>"
    assert "What is 0?" in kept[0]["prompt"]
    assert "verdict: right" in text_of(show.render(kept[:2]))
  known = {record.skill.id for record in own.records}
  shown = [
    {id for p in cell["predictions"] for id in p["skill_ids"]} for cell in cells
  ]
  assert shown[0] <= known
  assert shown[1] - known


def text_of(thing):
  console = rich.console.Console(width=120, record=True, quiet=True)
  with console.capture() as caught:
    console.quiet = False
    console.print(thing)
  return caught.get()


def test_table_names_moments_and_banks():
  def cell(number, mode, attempts):
    return dict(iteration=number, bank=mode, set="s") | evaluation.score(
      attempts, ENGLISH, 0.95
    )

  right = [attempt(0, "7", RIGHT), attempt(1, "7", RIGHT)]
  lost = [attempt(0, "7", RIGHT), attempt(1, None, UNKNOWN)]
  text = text_of(
    evaluation.table(
      [
        cell(0, "none", right),
        cell(0, "final", lost),
        cell(5, "none", right),
        cell(9, "none", right),
      ]
    )
  )
  assert "before" in text
  assert "after" in text
  assert "iteration 5" in text
  assert "bank off" in text
  assert "bank on" in text
  assert "100% (1.00)" in text
  assert "[50%, 100%] unknown" in text


def test_caution_tells_how_little_it_is():
  cells = [dict(iteration=0, bank="none", n=6)] * 2
  said = evaluation.caution(cells, 0.95)
  assert "12 questions" in said
  assert "prove nothing" in said
  many = [dict(iteration=0, bank="none", n=3125)]
  assert "prove nothing" not in evaluation.caution(many, 0.95)
