"""Runs against a real search server that is lost, flaky, or too dear."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from pathlib import Path

import pytest

from configs import tiny
from sesa_jax import experiment, loop, metrics, serve, types
from sesa_jax.data import corpus
from sesa_jax.search import bm25
from tests import driver, test_loop
from tests.llm_server import no_certificates

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures(no_certificates.__name__)


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
  monkeypatch.chdir(ROOT)


class Switch:
  """An engine that is down for the requests that `down` names, from 0."""

  def __init__(self):
    passages = corpus.load("tests/world/corpus.jsonl", passage_words=40)
    self.engine = bm25.Bm25(passages)
    self.down = lambda number: False
    self.numbers = itertools.count()
    self.asked = 0

  def search(self, queries, k):
    self.asked += len(queries)
    if self.down(next(self.numbers)):
      return [types.SearchFailure("down for a while", "server")] * len(queries)
    return self.engine.search(queries, k)


@contextlib.contextmanager
def serving(switch):
  with serve.Server(switch, "127.0.0.1", 0) as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
      yield f"http://127.0.0.1:{server.server_port}"
    finally:
      server.shutdown()
      thread.join()


def run(folder, url, evaluates=True, **changes):
  config = tiny.get_config().copy_and_resolve_references()
  config.unlock()
  config.update_from_flattened_dict(
    {
      "iterations": 1,
      "solver.turn_tokens": 160,
      "challenger.turn_tokens": 160,
      "eval.banks": ("none",),
      "search.engine": "search_r1",
      "search.urls": (url,),
      "search.batch": 1,
      "search.tries": 1,
    }
    | {name.replace("__", "."): value for name, value in changes.items()}
  )
  if not evaluates:
    config.eval.sets = {}
  with driver.playing_the_script():
    experiment.run(config, str(folder))
  return left(folder)


def left(folder):
  """What a run came to, without times and what its searches took of it."""
  found = metrics.RunFolder(folder)
  rows = [
    {
      name: value
      for name, value in row.items()
      if not any(t in name for t in ("search/", "second", "/engine/"))
    }
    for row in found.read("metrics.jsonl")
  ]
  cells = found.read_json("eval.json", [])
  for cell in cells:
    cell.pop("seconds/question")
  played = [
    list(metrics.read_episodes(path)) for path in metrics.episode_files(folder)
  ]
  return rows, cells, played


def searched(folder):
  (row,) = metrics.RunFolder(folder).read("metrics.jsonl")
  return {
    name.removeprefix("search/"): value
    for name, value in row.items()
    if name.startswith("search/") and value
  }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """What a run with a whole server leaves, and what it searched."""
  folder, here = tmp_path_factory.mktemp("whole") / "run", Path.cwd()
  os.chdir(ROOT)
  cache = tmp_path_factory.mktemp("cache")
  with serving(Switch()) as url:
    found = run(folder, url, search__cache=str(cache))
  os.chdir(here)
  return found, searched(folder), cache, url


def test_searches_are_counted(undisturbed):
  (_, _, (played,)), counts, *_ = undisturbed
  searches = sum(
    turn["action"] == "search" for row in played for turn in row["turns"]
  )
  assert counts["cache_hits"] + counts["cache_misses"] == searches > 0
  assert counts["queries"] == counts["cache_misses"]
  rate = counts["cache_hits"] / searches
  assert counts["hit_rate"] == pytest.approx(rate)
  assert set(counts) == {"cache_hits", "cache_misses", "hit_rate", "queries"}


def test_a_server_that_is_down_from_the_start(tmp_path):
  switch = Switch()
  switch.down = lambda number: True
  with (
    serving(switch) as url,
    pytest.raises(types.Stopped, match="No search server answers: .*503"),
  ):
    run(tmp_path / "run", url)
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("evaluates", [False, True])
def test_an_outage_changes_nothing_and_the_run_goes_on(
  undisturbed, tmp_path, evaluates
):
  folder, switch = tmp_path / "run", Switch()
  switch.down = lambda number: number > 0  # but the check at the start
  says = "evaluation have no verdict" if evaluates else "episodes stayed lost"
  with serving(switch) as url:
    with pytest.raises(types.Stopped, match=says):
      run(folder, url, evaluates)
    assert left(folder) == ([], [], [])
    assert not (folder / "skills_history.jsonl").exists() or (
      '"credit"' not in (folder / "skills_history.jsonl").read_text()
    )
    switch.down = lambda number: False
    rows, cells, played = run(folder, url, evaluates)
  whole = undisturbed[0]
  assert (rows, played) == (whole[0], whole[2])
  assert cells == (whole[1] if evaluates else [])


def test_lost_calls_replay_their_episodes_from_their_keys(
  undisturbed, tmp_path
):
  switch = Switch()
  with serving(switch) as url:
    switch.down = lambda number: number in (6, 9, 12, 13)
    found = run(tmp_path / "run", url)
  assert found == undisturbed[0]
  assert searched(tmp_path / "run")["failures/server"] == 4


def test_a_budget_stops_before_the_update_and_can_be_raised(
  undisturbed, tmp_path
):
  folder, switch = tmp_path / "run", Switch()
  with serving(switch) as url:
    says = r"run's budget is used up \(8 of 8 searches"
    with pytest.raises(types.Stopped, match=says):
      run(folder, url, budget__searches=8)
    assert left(folder)[0] == []
    spent = json.loads((folder / "spent.json").read_text())
    assert spent["searches"] == 8
    assert run(folder, url, budget__searches=500) == undisturbed[0]
  spent = json.loads((folder / "spent.json").read_text())
  assert spent["searches"] == switch.asked - 2  # the checks are free


def test_each_iteration_takes_its_share_of_the_budget():
  config, world, state, _ = test_loop.spied()
  limits = world.texts.library.ledger.limits
  assert limits == {"searches": None, "cost": None}
  config.budget.searches, config.budget.cost = 70, 7.0
  with test_loop.silent() as progress:
    loop.iteration(state, world, config, progress)
  assert limits == {"searches": 70, "cost": 7.0}


def test_a_run_is_played_again_without_the_server(undisturbed, tmp_path):
  whole, _, cache, url = undisturbed
  folder = tmp_path / "run"
  again = {"search__cache": str(cache), "search__replay_only": True}
  assert run(folder, url, **again) == whole
  assert set(searched(folder)) == {"cache_hits", "hit_rate"}
