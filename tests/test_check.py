"""--mode=check: what is looked at before a run, and what it finds."""

import io
import json
import shutil
from pathlib import Path

import pytest
import rich.console

from configs import common, smollm2_135m, tiny
from sesa_jax import check, main
from tests import llm_server
from tests.test_loop import tiny_config

ROOT = Path(__file__).parents[1]
ROOMY = {
  "challenger.turn_tokens": 160,
  "solver.turn_tokens": 160,
  "verifier.tokens": 64,
  "judge.base_url": "",
}


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
  monkeypatch.chdir(ROOT)


def checked(config, workdir):
  return {found.name: found for found in check.run(config, str(workdir))}


def test_a_config_that_can_run_passes_and_leaves_nothing(tmp_path):
  found = checked(tiny_config(**ROOMY), tmp_path / "run")
  assert [name for name, row in found.items() if not row.passed] == []
  assert list(found) == [
    "config and keys",
    "disk",
    "workdir",
    "tokenizer and template",
    "judge",
    "search and texts",
    "an iteration",
  ]
  assert "3 proposals (3 valid), 3 questions played, 50% of" in (
    found["an iteration"].said
  )
  assert found["judge"].said == "nobody is asked"
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("preset", ["ssp_code", "search_r1", "fixed_questions"])
def test_the_iteration_is_that_of_the_config(preset, tmp_path):
  config = tiny.get_config(preset).copy_and_resolve_references().unlock()
  config.update_from_flattened_dict(ROOMY | common.PRESETS[preset])
  row = checked(config, tmp_path)["an iteration"]
  assert row.passed
  posed = 0 if preset in ("search_r1", "fixed_questions") else 3
  assert row.said.startswith(f"{posed} proposals")


def test_each_failure_is_a_row_and_leaves_the_others(tmp_path, monkeypatch):
  usage = shutil.disk_usage("/")
  monkeypatch.setattr(
    shutil, "disk_usage", lambda path: usage._replace(free=1000)
  )
  config = tiny_config(**ROOMY | {"frontier.reward": "bel", "search.k1": 0.5})
  found = checked(config, "gs://bucket/run")
  assert not found["config and keys"].passed
  assert "bell, bell_zero" in found["config and keys"].said
  assert "no local or mounted folder" in found["workdir"].said
  assert found["tokenizer and template"].passed


def test_a_turn_that_is_too_short_for_a_question_is_said(tmp_path):
  config = tiny_config(**ROOMY | {"challenger.turn_tokens": 24})
  config.pool.fixed = {}
  row = checked(config, tmp_path)["an iteration"]
  assert not row.passed
  assert "No question came of 3 scripted proposals: 3 no_question" in row.said


def test_disk_is_compared_with_the_checkpoints(tmp_path, monkeypatch):
  config = tiny_config(**ROOMY)
  wanted = check.checkpoint_bytes(config)
  usage = shutil.disk_usage(tmp_path)
  for free, passed in ((wanted, True), (wanted - 1, False)):
    monkeypatch.setattr(
      shutil, "disk_usage", lambda path, f=free: usage._replace(free=f)
    )
    row = check._tried("disk", check._check_disk, config, str(tmp_path))
    assert row.passed == passed
    assert "GB free" in row.said


def test_bytes_of_checkpoints_by_hand():
  """SmolLM2's shape: tied embeddings, 9 query and 3 key-value heads of 64."""
  layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
  parameters = 49152 * 576 + 30 * layer + 576
  assert parameters == 134_515_008  # as the model's card has it
  config = smollm2_135m.get_config().copy_and_resolve_references().unlock()
  config.iterations = 100
  config.checkpoint.keep = 2
  config.checkpoint.milestone_every = 50
  # Two policies: 4 bytes and two moments of 4 each, three times; milestones of
  # iterations 50 and 100.
  assert check.checkpoint_bytes(config) == 2 * parameters * (3 * 12 + 2 * 4)
  config.checkpoint.milestone_every = 0  # of the end alone
  config.learner.moments = "bfloat16"
  config.policy.shared = True
  assert check.checkpoint_bytes(config) == parameters * (3 * 8 + 4)


ANSWER = json.dumps({"answer": "Paris"})


@pytest.mark.parametrize(
  ("act", "passed", "said"),
  [
    (llm_server.says(ANSWER), True, "answered 'Paris'"),
    (llm_server.body(b"no", 401), False, "did not answer"),
  ],
)
def test_the_judge_is_called_once(act, passed, said):
  with llm_server.Server(then=act) as server:
    config = tiny_config(
      **ROOMY
      | {
        "judge.base_url": server.url,
        "judge.key_env": "",
        "judge.tries": 1,
        "verifier.answerer": "judge",
      }
    )
    row = check._tried("judge", check._check_judge, config)
  assert row.passed == passed
  assert said in row.said
  assert len(server.requests) == 1


def test_a_missing_key_is_found(monkeypatch, tmp_path):
  monkeypatch.delenv("NO_SUCH_KEY", raising=False)
  config = tiny_config(
    **ROOMY
    | {
      "judge.base_url": "http://127.0.0.1:1/v1",
      "judge.key_env": "NO_SUCH_KEY",
      "verifier.answerer": "judge",
    }
  )
  row = check._tried("config and keys", check._check_config, config)
  assert not row.passed
  assert "NO_SUCH_KEY" in row.said


def test_a_search_server_that_is_down_is_found(tmp_path):
  config = tiny_config(
    **ROOMY
    | {
      "search.engine": "search_r1",
      "search.urls": ("http://127.0.0.1:9/retrieve",),
      "search.deadline": 0.5,
      "search.tries": 1,
    }
  )
  found = checked(config, tmp_path)
  assert not found["search and texts"].passed
  assert "127.0.0.1:9" in found["search and texts"].said
  assert "an iteration" not in found  # it needs the seeds


def test_a_run_that_is_played_again_needs_no_answer(tmp_path):
  changes = {
    "search.engine": "search_r1",
    "search.urls": ("http://127.0.0.1:9/retrieve",),
    "search.cache": str(tmp_path / "cache"),
    "search.replay_only": True,
  }
  config = tiny_config(**ROOMY | changes)
  row = check._tried("texts", check._check_texts, config, [])
  assert row.passed, row.said


def test_the_exit_code_says_whether_all_passed(tmp_path):
  for free, code, said in (
    (True, 0, "All passed"),
    (False, 1, "1 failed: disk"),
  ):
    config = tiny_config(**ROOMY)
    if not free:
      config.checkpoint.keep = 10**12
    out = io.StringIO()
    console = rich.console.Console(file=out, width=200)
    assert check.main(config, str(tmp_path), console) == code
    assert said in out.getvalue()
  assert main.MODES["check"] is main.check
