import io
import json

import numpy as np
import pytest
import rich.console

from sesa_jax import metrics, show
from sesa_jax.types import Episode, Passage, Turn

PROMPT = (
  "<|im_start|>system\nUse the tools.<|im_end|>\n"
  "<|im_start|>user\nWho lifted [the] siege?<|im_end|>\n"
  "<|im_start|>assistant\n"
)


def make_row(number, *, arm="solver", verdict="right", skills=(), **extra):
  passage = Passage("d7", "Joan of Arc", "She lifted the siege.", 2.5)
  turns = (
    Turn(3, 5, 8, "<search>siege</search>", "search", "siege", (passage,), ""),
    Turn(8, 10, 10, "<answer>Joan</answer>", "answer", "Joan", (), ""),
  )
  episode = Episode(
    request_id=f"q{number}",
    attempt=number,
    arm=arm,
    ids=np.arange(10, dtype=np.int32),
    prompt_length=3,
    mask=np.array([0, 0, 0, 1, 1, 0, 0, 0, 1, 1], bool),
    logprobs=np.zeros(10, np.float32),
    turns=turns,
    finish="answer",
  )
  texts = {3: PROMPT, 0: ""}
  return metrics.episode_row(
    episode,
    decode=lambda ids: (
      texts.get(len(ids), "") if ids[:1] != [5] else "OBSERVED"
    ),
    question=f"Who lifted siege {number}?",
    verdict=verdict,
    skill_ids=list(skills),
    **{"iteration": 0, "targets": ["Joan", "Jeanne"]} | extra,
  )


def text_of(rows, **more):
  out = io.StringIO()
  console = rich.console.Console(file=out, width=100)
  console.print(show.render(rows, **more))
  return out.getvalue()


def test_an_episode_reads_as_it_was_played():
  row = make_row(
    1, skills=["s3"], reward=1.0, advantage=1.155, prediction="Joan"
  )
  text = text_of([row], skills={"s3": "Name the person."})
  want = [
    "iteration 0, solver: q1 #1",
    "question: Who lifted siege 1?",
    "targets: Joan | Jeanne",
    "prediction: Joan",
    "verdict: right",
    "reward: 1.0",
    "finish: answer",
    "skill shown: s3 (Name the person.)",
    "trained on: 4 tokens, advantage +1.155",
    "prompt: 3 tokens, observed",
    "  system: ",
    "    Use the tools.",
    "  user: ",
    "    Who lifted [the] siege?",
    "turn 1: 2 tokens sampled, action: search",
    "  ▌ <search>siege</search>",
    "  query: siege",
    "  passage: d7, Joan of Arc, score 2.50",
    "  observed: 3 tokens",
    "    OBSERVED",
    "turn 2: 2 tokens sampled, action: answer",
    "  ▌ <answer>Joan</answer>",
  ]
  lines = iter(line.strip(" ─") for line in text.splitlines())
  for line in want:  # in this order
    assert line.strip() in lines, f"{line!r} is not in its place:\n{text}"
  # The bar marks what was sampled and nothing else.
  assert text.count("▌") == 2
  assert "mask disagrees" not in text
  assert "im_end" not in text


def test_an_episode_without_advantage_was_not_trained_on():
  assert "trained on: no (4 tokens sampled)" in text_of([make_row(1)])
  equal = text_of([make_row(1, advantage=0.0)])
  assert "advantage +0.000: no effect but the KL's" in equal


def test_a_mask_over_observed_tokens_is_shouted():
  row = make_row(1)
  row["mask"][5] = 1
  assert "trains on 2 of 2 sampled and 1 of 3 observed" in text_of([row])


def test_other_templates_are_shown_as_they_are():
  row = make_row(1) | {"prompt": "Question: [x]\nAnswer:"}
  assert "  Question: [x]\n  Answer:\n" in text_of([row])
  row = make_row(1) | {
    "prompt": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"
    "Hello<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
  }
  assert "  user: \n    Hello\n  assistant: \n" in text_of([row])


ROWS = [
  make_row(1, arm="challenger", verdict=None),
  make_row(2, verdict="wrong", skills=["s1"]),
  make_row(3, skills=["s1", "s2"]),
  make_row(4, arm="eval/nq/none", iteration=1),
]


@pytest.mark.parametrize(
  ("filters", "found"),
  [
    ({}, ["q1", "q2", "q3", "q4"]),
    ({"question": "q2"}, ["q2"]),
    ({"question": "LIFTED siege 3"}, ["q3"]),
    ({"verdict": "wrong"}, ["q2"]),
    ({"skill": "s1"}, ["q2", "q3"]),
    ({"skill": "s1", "verdict": "right"}, ["q3"]),
    ({"iteration": 0}, ["q1", "q2", "q3"]),
    ({"iteration": 1}, ["q4"]),
    ({"arm": "eval"}, ["q4"]),
    ({"arm": "challenger"}, ["q1"]),
  ],
)
def test_filters(filters, found):
  got = show.select(ROWS, show.Filters(**filters), 10)
  assert [row["request_id"] for row in got] == found


def test_limit_stops_reading():
  rows = iter(ROWS)
  assert len(show.select(rows, show.Filters(), 2)) == 2
  assert next(rows)["request_id"] == "q3"


def test_nothing_matched_says_what_there_is():
  with pytest.raises(ValueError, match="No episode matches") as caught:
    show.select(ROWS, show.Filters(verdict="unknown", iteration=0), 10)
  said = str(caught.value)
  assert "matches verdict=unknown, iteration=0." in said
  assert "arm: challenger, solver, eval/nq/none" in said
  assert "verdict: wrong, right;" in said
  assert "skill: s1, s2;" in said
  assert "iteration: 0, 1;" in said


def test_main_prints_a_run(tmp_path):
  folder = metrics.RunFolder(tmp_path)
  folder.write_episodes(0, ROWS[:3])
  folder.write_episodes(1, ROWS[3:])
  skill = {"id": "s2", "description": "Ask twice."}
  (tmp_path / "skills.jsonl").write_text(json.dumps(skill) + "\n")
  out = io.StringIO()
  console = rich.console.Console(file=out, width=100)
  show.main(tmp_path, skill="s1", limit=5, console=console)
  text = out.getvalue()
  assert "skill shown: s2 (Ask twice.)" in text
  assert "skill shown: s1\n" in text
  assert "q4" not in text


def test_main_prints_episodes_that_evaluations_kept(tmp_path):
  folder = metrics.RunFolder(tmp_path)
  folder.write_json(
    "eval.json",
    [
      {"predictions": [{"episode": ROWS[3]}, {"verdict": "right"}]},
      {"predictions": []},
    ],
  )
  out = io.StringIO()
  console = rich.console.Console(file=out, width=100)
  show.main(tmp_path, console=console)
  folder.write_episodes(0, ROWS[:3])
  show.main(tmp_path, arm="eval", console=console)
  assert out.getvalue().count("eval/nq/none: q4 #4") == 2
  assert "q1" not in out.getvalue()


def test_main_errors(tmp_path):
  with pytest.raises(ValueError, match="no such folder"):
    show.main(tmp_path / "nothing")
  with pytest.raises(ValueError, match="has no episodes"):
    show.main(tmp_path)
  metrics.RunFolder(tmp_path).write_episodes(0, ROWS)
  with pytest.raises(ValueError, match="limit=0"):
    show.main(tmp_path, limit=0)
  with pytest.raises(ValueError, match="No episode matches question=zebra"):
    show.main(tmp_path, question="zebra")
