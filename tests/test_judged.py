"""A run whose judge and distiller are a model: verdicts, skills, outages."""

import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import qwen3_4b
from sesa_jax import config as config_lib
from sesa_jax import experiment, loop, metrics, records, types
from sesa_jax import state as state_lib
from sesa_jax import tools as tools_lib
from sesa_jax.judge import verdicts
from sesa_jax.stages import selfplay
from tests import driver, scripted
from tests.llm_server import Server, blocks, body, no_certificates, says
from tests.test_loop import SCRIPTED, Spy, silent, tiny_config

pytestmark = pytest.mark.usefixtures(no_certificates.__name__)
ROOT = Path(__file__).parents[1]
KEY = "sk-never-written-down"


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
  monkeypatch.chdir(ROOT)
  monkeypatch.setenv("DEEPSEEK_API_KEY", KEY)


def obliging(handler, usage=(10, 5)):
  """Judges, answers from passages and writes skills, as the prompt asks."""
  found = blocks(handler.asked)
  if "candidate" in found:
    right = found["candidate"].startswith("almost ")
    says(json.dumps({"verdict": "RIGHT" if right else "WRONG"}))(handler)
  elif "right answer" in found:
    digest = hashlib.sha256(handler.asked.encode()).hexdigest()
    text = f"Mind the {' '.join(re.findall('[a-f]+', digest)[:6])}."
    skill = scripted.SKILL | {"description": text}
    says(json.dumps(skill), usage=usage)(handler)
  else:
    titles = re.findall(r"^Doc \d+\(Title: (.*?)\) ", found["passages"], re.M)
    says(json.dumps({"answer": " ".join(titles)}))(handler)


def paper_judge(server, **changes):
  """The tiny config with the judge and the distiller of a paper's config.

  Nothing is evaluated: no judge has a part in that.
  """
  paper = qwen3_4b.get_config().copy_and_resolve_references()
  config = tiny_config(**SCRIPTED)
  config.eval.sets = {}
  config.judge = paper.judge
  config.verifier.answerer = paper.verifier.answerer
  config.distillation.distiller = paper.distillation.distiller
  assert (config.verifier.answerer, config.distillation.distiller) == (
    "judge",
    "chat",
  )
  config.judge.base_url = server.url
  config.judge.tries = 1
  config.update_from_flattened_dict(changes)
  return config


def run(config, folder):
  with driver.playing_the_script(), pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      experiment.plots, "plot_run", lambda path: ()
    )  # takes its time
    experiment.run(config, str(folder))
  return metrics.RunFolder(folder)


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
  """Two iterations with a model as judge, answerer and distiller."""
  patch = pytest.MonkeyPatch()
  patch.chdir(ROOT)
  patch.setenv("DEEPSEEK_API_KEY", KEY)
  folder = tmp_path_factory.mktemp("judged") / "run"
  with Server(then=obliging) as server:
    found = run(paper_judge(server, iterations=2), folder)
    yield found, server, list(server.requests)
  patch.undo()


def kind(prediction):
  if prediction in ("Nowhere at all", "Atlantis", None):
    return "wrong"
  return "almost" if prediction.startswith("almost ") else "exact"


def test_a_models_verdicts_are_the_runs(judged):
  folder, server, _ = judged
  verdict = {}
  for row in driver.rows_of(folder, "solver"):
    prediction = kind(row["prediction"])
    verdict.setdefault(prediction, set()).add(row["verdict"])
    assert row["reward"] == (row["verdict"] == "right")
  assert verdict == {
    "exact": {"right"},
    "almost": {"right"},
    "wrong": {"wrong"},
  }
  manifest = folder.read_json("manifest.json", {})
  assert manifest["judge"] == (
    f"exact match, else deepseek-v4-pro at {server.url}"
  )


def test_exact_matches_and_missing_answers_are_not_asked_about(judged):
  _, _, requests = judged
  asked = [
    found["candidate"]
    for request in requests
    if "candidate" in (found := blocks(request["messages"][1]["content"]))
  ]
  assert {kind(answer) for answer in asked} == {"almost", "wrong"}


def test_the_model_answers_the_evidence_check(judged):
  folder, _, _ = judged
  assert not driver.rows_of(folder, "evidence")
  states = [row["state"] for row in folder.read("questions.jsonl")]
  assert "valid" in states
  assert "unverified" not in states


def test_the_model_writes_the_skills(judged):
  folder, _, _ = judged
  lines = (folder.path / "skills.jsonl").read_text().splitlines()
  skills = map(json.loads, lines)
  born = [row for row in skills if row["origin"] == "chat"]
  assert born
  assert all(row["source_question"] for row in born)
  assert folder.read("failures.jsonl")


def test_what_was_paid_stands_in_the_metrics(judged):
  folder, _, requests = judged
  rows = folder.read("metrics.jsonl")
  calls = sum(row["judge/calls"] for row in rows)
  assert calls == len(requests) > 0
  for name, each in (("prompt_tokens", 10), ("completion_tokens", 5)):
    assert sum(row[f"judge/{name}"] for row in rows) == each * calls
  assert rows[-1]["judge/spent/tokens"] == 15 * calls
  assert all(row["solver/verdicts/unknown"] == 0 for row in rows)


def test_the_key_is_sent_and_never_written(judged):
  folder, server, _ = judged
  assert {h["authorization"] for h in server.headers} == {f"Bearer {KEY}"}
  for path in folder.path.rglob("*"):
    assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


def test_a_run_that_is_resumed_pays_once(tmp_path, monkeypatch):
  """Killed before its checkpoint, an iteration is done again for nothing."""

  def killed(*args, **more):
    raise KeyboardInterrupt

  with Server(then=obliging) as server:
    config = paper_judge(server, iterations=1)
    with monkeypatch.context() as patch:
      patch.setattr(state_lib, "save", killed)
      with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run")
    paid = len(server.requests)
    folder = run(config, tmp_path / "run")
    assert len(server.requests) == paid > 0
  (row,) = folder.read("metrics.jsonl")
  assert row["judge/calls"] == 0
  assert row["judge/cache_hits"] == paid
  assert row["judge/spent/tokens"] == 15 * paid


@pytest.mark.slow
def test_a_kill_within_a_distillation_loses_and_doubles_nothing(
  judged, tmp_path
):
  """By SIGKILL, as the second skill is asked for."""
  asked = []

  def killing(handler):
    if "right answer" in blocks(handler.asked):
      asked.append(handler.asked)
      if len(asked) == 2:
        os.kill(process.pid, signal.SIGKILL)
    obliging(handler)

  folder = tmp_path / "run"
  with Server(then=killing) as server:
    values = SCRIPTED | {
      "iterations": 2,
      "verifier.answerer": "judge",
      "distillation.distiller": "chat",
      "judge.base_url": server.url,
      "judge.tries": 1,
      "judge.concurrency": 1,
    }
    flags = [f"--config.{name}={value}" for name, value in values.items()]
    command = [sys.executable, "-m", "tests.driver", "never"]
    command += ["--config=configs/tiny.py", f"--workdir={folder}", *flags]
    for code in (-signal.SIGKILL, 0):
      process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
      _, said = process.communicate(timeout=200)
      assert process.returncode == code, said.decode()
    sent = [json.dumps(request) for request in server.requests]
  # The one that was on its way was never paid.
  assert len(sent) == len(set(sent)) + 1
  spent = json.loads((folder / "judge_spent.json").read_text())
  assert spent["tokens"] == 15 * len(set(sent))
  for name in ("skills.jsonl", "skills_history.jsonl", "failures.jsonl"):
    assert (folder / name).read_bytes() == (judged[0].path / name).read_bytes()


# --- outages -----------------------------------------------------------------


def leaves(tree):
  return [np.asarray(leaf).copy() for leaf in jax.tree.leaves(tree)]


def begun(config, workdir):
  with driver.playing_the_script():
    world = tools_lib.assemble(config, tools_lib.read(config), workdir)
  spy = Spy(world.tools.engine)
  world = dataclasses.replace(
    world, tools=dataclasses.replace(world.tools, engine=spy)
  )
  return world, state_lib.start(config, world)[0], spy


def waiting(name):
  page = types.Passage("1", "Bonn", "Bonn lies on a river.")
  return types.FailureRecord(
    question_id=name,
    seed_id=name,
    question=f"Which town is {name}?",
    targets=("Rome",),
    prediction="Bonn",
    other_predictions=(),
    passages=(page,),
    passages_seen=1,
    wrong_attempts=1,
    success_rate=0.5,
    skill_ids=(),
    iteration=1,
  )


def test_an_outage_of_the_judge_stops_before_the_update(tmp_path):
  with Server(then=body(b"", 503)) as server:
    config = paper_judge(server)
    with pytest.raises(
      types.Stopped, match="verdicts and answers of the judge"
    ):
      run(config, tmp_path / "run")
    folder = metrics.RunFolder(tmp_path / "run")
    assert not folder.read("metrics.jsonl")
    assert not experiment.checkpoint.has_steps(folder.path / "checkpoints")
    server.then = obliging  # it is back: the same command goes on
    run(config, tmp_path / "run")
  assert len(folder.read("metrics.jsonl")) == 2


def test_nothing_is_learned_from_what_an_outage_left_open(tmp_path):
  """A run that may lose all its verdicts: no accuracy of 1, no credit."""
  with Server(then=body(b"", 503)) as server:
    config = paper_judge(server, lost_limit=1.0)
    # Two with answers that exact match does not settle, none that it does.
    world, state, _ = begun(config, tmp_path)
    world.tools.engine.engine._script = lambda request, attempt, turn: (
      scripted.world_script(request, attempt, turn)
      if request.arm == "challenger" or not turn
      else f"<answer>{'Atlantis' if attempt else known(request.id)}</answer>"
    )
    state = dataclasses.replace(
      state, iteration=1, queue=(waiting("a"), waiting("b"))
    )
    before = leaves(state.solver.params)
    bank = state_lib.skill_bank.rows(state.bank)
    with silent() as progress:
      after, record = loop.iteration(state, world, config, progress)
  for one, two in zip(before, leaves(after.solver.params), strict=True):
    np.testing.assert_array_equal(one, two)
  assert after.queue == state.queue
  assert state_lib.skill_bank.rows(after.bank) == bank
  assert not [e for e in record.history if e["event"] == "credit"]
  assert not record.failures
  solved = [row for row in record.episodes if row["arm"] == "solver"]
  assert {row["verdict"] for row in solved} == {"right", "unknown"}
  assert all(row["reward"] is row["advantage"] is None for row in solved)
  found = record.metrics
  assert found["solver/questions"] == 0
  assert found["solver/questions_unknown"] == 2  # of the pool
  assert found["solver/verdicts/unknown"] == pytest.approx(3 / 4)
  assert found["challenger/state/valid"] == 0
  assert found["challenger/state/unverified"] > 0
  assert found["distillation/outages"] == 2
  assert found["judge/failures/server"] > 0
  for name in ("solver/reward/mean", "challenger/success/mean"):
    assert name not in found, name


def known(name):
  return scripted._answers()[name]


def test_above_2_percent_unknown_no_success_rate_is_given():
  """Those that are left are right, since exact match needs no judge."""
  question = types.Question("q", "Who?", ("x",), 1, "", "fixed")
  right, unknown = (
    types.Attempt(question, None, "x", verdict, ())
    for verdict in (types.Verdict.RIGHT, types.Verdict.UNKNOWN)
  )
  rates = {
    "solver/reward/mean": 1.0,
    "solver/success/answered": 1.0,
    "challenger/success/mean": 1.0,
    "frontier/fraction": 0.0,
  }
  found = rates | {"frontier/recorded": 0}
  few = records.edge_metrics(found, [right] * 98 + [unknown] * 2)
  assert few == found | {"solver/verdicts/unknown": 0.02}
  many = records.edge_metrics(found, [right] * 97 + [unknown] * 3)
  assert many == {"frontier/recorded": 0, "solver/verdicts/unknown": 0.03}
  assert records.edge_metrics({}, []) == {"solver/verdicts/unknown": 0.0}


def test_an_outage_of_the_distiller_alone_stops_nothing(tmp_path):
  def some(handler):
    found = blocks(handler.asked)
    (body(b"", 503) if "right answer" in found else obliging)(handler)

  with Server(then=some) as server:
    folder = run(paper_judge(server, iterations=1), tmp_path / "run")
    (row,) = folder.read("metrics.jsonl")
    assert row["frontier/recorded"] > 0
    assert row["distillation/pending"] == row["frontier/recorded"]
    server.then = obliging
    run(paper_judge(server, iterations=2), tmp_path / "run")
  rows = folder.read("metrics.jsonl")
  assert rows[1]["distillation/pending"] == 0
  assert rows[1]["distillation/admitted"] > 0


def test_an_outage_of_the_evidence_check_alone(tmp_path):
  """It is said before anything is solved; allowed, no proposal counts."""

  def mute(handler):
    checks = "passages" in blocks(handler.asked)
    (body(b"", 503) if checks else obliging)(handler)

  with Server(then=mute) as server:
    config = paper_judge(server)
    world, state, spy = begun(config, tmp_path)
    with silent() as progress, pytest.raises(types.Stopped, match="answers of"):
      loop.iteration(state, world, config, progress)
    assert [requests[0].arm for _, requests, *_ in spy.played] == ["challenger"]
    config.lost_limit = 1.0
    with silent() as progress:
      _, record = loop.iteration(state, world, config, progress)
  found = record.metrics
  assert found["challenger/state/valid"] == 0
  assert found["challenger/state/unverified"] == found["challenger/out"] > 0
  for row in record.questions:
    assert (row["reward"] is None) == (row["state"] == "unverified")
  # What was posed by others is graded, and learned from.
  assert found["solver/origin/challenger"] == 0
  assert found["solver/verdicts/unknown"] == 0
  assert found["solver/questions"] == found["solver/origin/fixed"] > 0
  assert found["solver/updates"] == 1


def test_a_budget_that_ends_within_a_distillation(tmp_path):
  """What was written is kept, the rest waits; nothing is paid twice."""

  def dear(handler):
    obliging(handler, usage=(900_000, 5))

  def asked(requests):
    found = [r["messages"][1]["content"] for r in requests]
    return [text for text in found if "right answer" in blocks(text)]

  limits = {"judge.max_tokens": 902_000, "judge.concurrency": 1}
  with Server(then=dear) as server:
    config = paper_judge(server, iterations=1, **limits)
    with pytest.raises(types.Stopped, match="budget is used up"):
      run(config, tmp_path / "run")
    folder = metrics.RunFolder(tmp_path / "run")
    (row,) = folder.read("metrics.jsonl")
    left = row["frontier/recorded"] - 1
    assert row["distillation/admitted"] == len(asked(server.requests)) == 1
    assert row["judge/failures/budget"] == row["distillation/pending"] == left
    assert left > 0
    config = paper_judge(server, iterations=2)
    server.then = obliging
    run(config, tmp_path / "run")
  assert folder.read("metrics.jsonl")[1]["distillation/pending"] == 0
  once = asked(server.requests)
  assert len(set(once)) == len(once) == len(folder.read("failures.jsonl"))


def test_a_budget_stops_the_run_and_may_be_raised(tmp_path):
  with Server(then=obliging) as server:
    config = paper_judge(server, **{"judge.max_tokens": 5_000})
    with pytest.raises(types.Stopped, match="budget is used up"):
      run(config, tmp_path / "run")
    spent = json.loads((tmp_path / "run" / "judge_spent.json").read_text())
    assert spent["tokens"] == 15 * len(server.requests) <= 5_000
    config.judge.max_tokens = 10_000_000
    folder = run(config, tmp_path / "run")
  assert len(folder.read("metrics.jsonl")) == 2


def test_one_budget_of_money_holds_for_judge_and_searches(tmp_path):
  with Server(then=obliging) as server:
    priced = {"judge.prompt_price": 10.0, "judge.completion_price": 20.0}
    config = paper_judge(server, **priced, **{"budget.cost": 0.05})
    with pytest.raises(types.Stopped, match=r"run's budget .* of 0.05 cost"):
      run(config, tmp_path / "run")
    spent = [
      json.loads((tmp_path / "run" / name).read_text())["cost"]
      for name in ("spent.json", "judge_spent.json")
    ]
    assert spent[0] == spent[1] <= 0.05
    config.budget.cost = 1000.0
    folder = run(config, tmp_path / "run")
  assert len(folder.read("metrics.jsonl")) == 2


# --- what a config asks for --------------------------------------------------


def test_a_missing_key_is_said_at_the_start(tmp_path, monkeypatch):
  monkeypatch.delenv("DEEPSEEK_API_KEY")
  monkeypatch.setattr(tools_lib.weights, "load", None)  # none is touched
  with Server() as server:
    config = paper_judge(server)
    with pytest.raises(ValueError, match="DEEPSEEK_API_KEY, which is not set"):
      experiment.run(config, str(tmp_path / "run"))
    assert not server.requests
  assert not (tmp_path / "run").exists()


def test_modes_that_ask_no_model_need_no_key(judged, monkeypatch):
  folder, server, _ = judged
  monkeypatch.delenv("DEEPSEEK_API_KEY")
  before = len(server.requests)
  config = paper_judge(server, iterations=2, **{"eval.banks": ("none",)})
  config.eval.sets = tiny_config().eval.sets
  config_lib.check(config)
  with driver.playing_the_script():
    experiment.evaluate_checkpoint(config, str(folder.path))
  assert len(server.requests) == before


@pytest.mark.parametrize(
  "changes",
  [
    {"distillation.distiller": "offline"},
    {"distillation.distiller": "chat", "distillation.admit": False},
    {"distillation.distiller": "chat", "frontier.gate": "off"},
    {"distillation.distiller": "solver"},
  ],
)
def test_without_a_model_to_ask_none_is_needed(changes):
  config = tiny_config(**changes)
  tools_lib.check_judge(config)
  assert tools_lib.judge(config) is None
  # Nor is one asked that an endpoint names, nor its key.
  config.judge.base_url, config.judge.key_env = "http://h:1", "SESA_NO_KEY"
  config.judge.verdicts = False
  assert tools_lib.judge(config) is None
  config.judge.verdicts = True
  with pytest.raises(ValueError, match="SESA_NO_KEY, which is not set"):
    tools_lib.check_judge(config)


def test_verdicts_may_be_exact_match_alone(tmp_path):
  with Server(then=obliging) as server:
    config = paper_judge(server, iterations=1, **{"judge.verdicts": False})
    folder = run(config, tmp_path / "run")
    texts = [r["messages"][0]["content"] for r in server.requests]
  assert verdicts.VERDICT not in texts
  assert verdicts.EVIDENCE in texts
  found = {
    r["verdict"]
    for r in driver.rows_of(folder, "solver")
    if kind(r["prediction"]) == "almost"
  }
  assert found == {"wrong"}
  assert folder.read_json("manifest.json", {})["judge"] == "exact match"


def test_every_setting_reaches_the_client(tmp_path, monkeypatch):
  found = {}
  monkeypatch.setattr(
    tools_lib.chat, "Chat", lambda *args, **more: found.update(more, args=args)
  )
  changes = dict(
    base_url="http://h:1/v1", model="m", key_env="K", temperature=0.5,
    concurrency=3, deadline=7.0, try_seconds=2.0, tries=4, max_tokens=9,
    max_cost=1.5, prompt_price=0.3, completion_price=0.4,
    cached_prompt_price=0.1, verdict_tokens=33, answer_tokens=44,
  )  # fmt: skip
  config = tiny_config(**{f"judge.{k}": v for k, v in changes.items()})
  config.judge.extra = {"reasoning_effort": "low"}
  judge = tools_lib.judge(config, tmp_path)
  assert found.pop("args") == ("http://h:1/v1", "m")
  ledger = found.pop("ledger")
  assert found == dict(
    key_env="K", temperature=0.5, extra={"reasoning_effort": "low"},
    concurrency=3, deadline=7.0, try_seconds=2.0, tries=4,
    cache=tmp_path / "judge_cache", log=tmp_path / "judge_failures.jsonl",
  )  # fmt: skip
  assert ledger.price == (0.3, 0.4, 0.1)
  assert ledger.limits == {"tokens": 9, "cost": 1.5}
  assert ledger._path == tmp_path / "judge_spent.json"
  assert (judge.verdict_tokens, judge.answer_tokens) == (33, 44)
  config.judge.cache = "elsewhere"
  tools_lib.judge(config, tmp_path)
  assert found["cache"] == "elsewhere"


def test_a_budget_of_money_needs_the_judges_price():
  asked = {"judge.base_url": "http://h:1", "budget.cost": 5.0}
  config = tiny_config(**asked, **{"judge.key_env": ""})
  with pytest.raises(ValueError, match="budget.cost = 5 bounds what the judge"):
    tools_lib.check_judge(config)
  config.judge.prompt_price = 0.0  # its own server's
  tools_lib.check_judge(config)
  config = tiny_config(**{"budget.cost": 5.0})  # nobody is asked
  tools_lib.check_judge(config)


def test_tokens_of_a_skill_reach_the_endpoint():
  with Server(then=obliging) as server:
    config = paper_judge(server, **{"distillation.tokens": 77})
    judge = tools_lib.judge(config)
    tools_lib.distiller(config, judge).distill_all(
      [types.Case((waiting("a"),), ())]
    )
    assert server.requests[0]["max_tokens"] == 77


# --- the policy as distiller -------------------------------------------------


def test_the_policy_writes_skills_after_its_update(tmp_path):
  changes = {"distillation.distiller": "solver", "verifier.max_tokens": 4096}
  config = tiny_config(**SCRIPTED | changes)
  world, state, spy = begun(config, tmp_path)
  assert world.tools.distiller is None
  state = dataclasses.replace(state, iteration=1, queue=(waiting("x"),))
  with silent() as progress:
    after, record = loop.iteration(state, world, config, progress)
  weights, requests, environment, iteration = spy.played[-1]
  assert weights is spy.loaded[-1] is after.solver.params
  assert iteration == 2
  assert environment is world.tools.environments["text"]
  for request in requests:
    assert request.sampling.temperature == 0.0
    assert request.limits == types.Limits(1024, 4096, 1)
  text = world.tools.tokenizer.decode(requests[-1].prompt_ids)
  assert "Which town is x?" in text
  born = [s for s in after.bank.skills if s.origin == "solver"]
  assert [s.description for s in born] == [scripted.SKILL["description"]]
  assert record.metrics["distillation/rejected/similar"] == len(requests) - 1
  assert after.queue == ()


def test_a_failure_that_has_no_room_is_used_up(tmp_path):
  config = tiny_config(**SCRIPTED | {"distillation.distiller": "solver"})
  world, state, spy = begun(config, tmp_path)  # 768 tokens at most
  state = dataclasses.replace(state, iteration=1, queue=(waiting("x"),))
  with silent() as progress:
    after, record = loop.iteration(state, world, config, progress)
  assert spy.played[-1][1][0].arm == "solver"  # nothing was played for it
  assert record.metrics["distillation/failed"] > 0
  assert after.queue == ()


@pytest.mark.slow
def test_the_real_engine_writes_a_text():
  """Without a stop string: a turn that ends itself, or none."""
  config = tiny_config()
  world = tools_lib.assemble(config, tools_lib.read(config))
  weights = world.tools.engine.load(world.references["solver"])
  prompt = loop.prompts.Prompt("distiller", "Write.", "Anything.")
  long = prompt._replace(ask="word " * 800)
  asked = dict(tools=world.tools, iteration=1, max_tokens=768)
  found = selfplay.write(weights, [prompt, long], tokens=200, **asked)
  assert found[1] is None
  assert isinstance(found[0], str | None)
  assert selfplay.write(weights, [prompt], tokens=200, **asked) == found[:1]
  assert selfplay.write(weights, [long], tokens=200, **asked) == [None]


# --- distillation beside the next iteration ----------------------------------


class Slow:
  """A distiller that ends only once the solver plays."""

  name = "offline"

  def __init__(self):
    self.playing, self.asked = threading.Event(), []

  def distill_all(self, cases):
    self.asked.append([case.records[0].question_id for case in cases])
    assert self.playing.wait(20), "nothing ran beside it"
    skill = types.Skill(
      "", "c", "Mind the gap.", "A gap.", "e", "a", ("z",), "offline"
    )
    return [skill for _ in cases]


def test_distillation_runs_beside_the_next_rollouts(tmp_path):
  config = tiny_config(**SCRIPTED | {"distillation.wait": False})
  world, state, spy = begun(config, tmp_path)
  slow = Slow()
  world = dataclasses.replace(
    world, tools=dataclasses.replace(world.tools, distiller=slow)
  )
  play = spy.play

  def played(weights, requests, environment, **more):
    if requests[0].arm == "solver":
      slow.playing.set()
    return play(weights, requests, environment, **more)

  spy.play = played
  state = dataclasses.replace(state, iteration=1, queue=(waiting("x"),))
  with silent() as progress:
    after, record = loop.iteration(state, world, config, progress)
  # Chosen from what waited before; what failed meanwhile waits on.
  assert slow.asked == [["x"]]
  assert record.failures
  assert after.queue == tuple(
    record_ for record_ in after.queue if record_.iteration == 2
  )
  assert len(after.queue) == len(record.failures)
  born = [s for s in after.bank.skills if s.description == "Mind the gap."]
  assert [s.created_at for s in born] == [2]
  shown = {
    name
    for row in record.episodes
    if row["arm"] == "solver"
    for name in row["skill_ids"]
  }
  assert born[0].id not in shown
  assert record.metrics["distillation/admitted"] == 1


@pytest.mark.slow
def test_a_resume_begins_again_what_ran_beside(tmp_path):
  """With rules as distiller: the same bytes as without the stop."""
  changes = {"distillation.wait": False, "eval.banks": ("none",)}
  found = []
  for name, stops in (("a", (4,)), ("b", (2, 3, 4))):
    for iterations in stops:
      config = tiny_config(**SCRIPTED | changes, iterations=iterations)
      folder = run(config, tmp_path / name)
    found.append((folder.path / "skills_history.jsonl").read_bytes())
  assert found[0] == found[1]
  admitted = [
    event["iteration"]
    for event in folder.read("skills_history.jsonl")
    if event["event"] == "admit"
  ]
  assert admitted
  assert min(admitted) > 1
