"""The rollout benchmark: its workload, its arithmetic, its two ends."""

import dataclasses
import functools
import io
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex
from jax.sharding import PartitionSpec as P
from rich.console import Console

from benchmarks import ours, rollout, sides, workload
from benchmarks.peers import turns
from sesa_jax import types
from sesa_jax.engine import attention
from sesa_jax.policy import backbones, model, sharding

Turn = workload.Turn

# --- the workload ----------------------------------------------------------


def test_the_workload_is_the_one_that_figures_are_quoted_for():
  """Figures are of the definition's first implementation."""
  episodes = workload.draw()
  assert len(episodes) == 64
  assert workload.sampled(episodes) == 9566
  playing = [sum(len(e.turns) > turn for e in episodes) for turn in range(5)]
  assert playing == [64, 56, 33, 7, 0]
  assert sum(len(episodes[4 * q].prompt) for q in range(16)) == 4428
  assert max(episode.length for episode in episodes) == 1267
  assert episodes[0].prompt[:3] == (24846, 29181, 13791)
  assert episodes[-1].turns[0].observation[-3:] == (15910, 13419, 8559)


def test_the_workload_keeps_to_its_ranges():
  episodes = workload.draw(questions=40)
  assert episodes == workload.draw(questions=40)
  assert episodes[:64] == workload.draw()
  assert episodes[:64] != workload.draw(seed=1)
  for number, episode in enumerate(episodes):
    assert episode.question == number // 4
    assert episode.prompt == episodes[number // 4 * 4].prompt
    assert 192 <= len(episode.prompt) <= 320
    assert episode.turns[-1].observation == ()
    for turn in episode.turns:
      assert 24 <= turn.sample <= 96
    for turn in episode.turns[:-1]:
      assert 150 <= len(turn.observation) <= 250
      assert all(10 <= i <= 30_999 for i in turn.observation)


TWO = (
  workload.Episode(0, (11, 12, 13), (Turn(2, (14,)), Turn(1, ()))),
  workload.Episode(0, (11, 12, 13), (Turn(2, ()),)),
)


def test_work_by_hand():
  # Prompt: 3 tokens with 1 + 2 + 3 keys. The first goes on at positions 3, 4
  # and 5, the second at 3; the last ids of both are never looked at.
  assert workload.work(TWO) == workload.Work(
    tokens=3 + 3 + 1, pairs=6 + (4 + 5 + 6) + 4, sampled=3 + 2
  )
  again = tuple(dataclasses.replace(e, question=1) for e in TWO)
  assert workload.work(TWO + again) == workload.Work(14, 50, 10)


def dot_flops(jaxpr):
  """Two operations for each multiply-add of the matmuls of a program."""
  total = 0
  for equation in jaxpr.eqns:
    for inner in jex.jaxprs_in_params(equation.params):
      total += dot_flops(inner)
    if equation.primitive.name == "dot_general":
      (contracted, _), _ = equation.params["dimension_numbers"]
      shape = equation.invars[0].aval.shape
      inner = np.prod([shape[axis] for axis in contracted])
      total += 2 * int(inner) * int(np.prod(equation.outvars[0].aval.shape))
  return total


def test_flops_are_those_of_the_model_s_matmuls():
  backbone = backbones.Backbone(
    vocab_size=96,
    dim=40,
    ffn=56,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=12,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=True,
    qk_norm=True,
    qkv_bias=False,
    context=64,
  )
  graphdef, size = model.build(backbone), 9

  def attend(_, q, k, v):
    q = q.reshape(*q.shape[:2], 2, 3, 12)
    shares = jnp.einsum("btkgh,bskh->bkgts", q, k)
    return jnp.einsum("bkgts,bskh->btkgh", shares, v).reshape(1, size, 6, 12)

  def forward(params, ids, positions):
    weights = model.unstack(params, jnp.float32)
    hidden = model.decode(graphdef, weights, ids, positions, attend)
    return model.logits(graphdef, weights, hidden)

  ids = jax.ShapeDtypeStruct((1, size), jnp.int32)
  params = model.abstract_params(backbone)
  counted = dot_flops(jax.make_jaxpr(forward)(params, ids, ids).jaxpr)
  work = workload.Work(tokens=size, pairs=size * size, sampled=size)
  assert sum(workload.flops(backbone, work).values()) == counted


# --- how a sampler without memory plays ------------------------------------


@pytest.mark.parametrize("by_length", [True, False])
def test_peers_see_whole_contexts(by_length):
  episodes = (
    *TWO,
    workload.Episode(1, (21,), (Turn(1, (22, 23)), Turn(3, ()))),
  )
  calls = []

  def generate(contexts, steps, number):
    calls.append((contexts, steps, number))
    # A row draws its own length, over and over, then what is thrown away.
    rows = [[len(context)] * steps + [99] for context in contexts]
    return rows, [[-1.0] * len(row) for row in rows]

  seen = []
  generate_copy = lambda c, s, n: generate([list(x) for x in c], s, n)  # noqa: E731
  kept = turns.play(episodes, generate_copy, 2, by_length)
  seen = [(contexts, steps) for contexts, steps, _ in calls]
  assert kept == 3 + 2 + 4
  prompt = [11, 12, 13]
  second = [[11, 12, 13, 3, 3, 14], [21, 1, 22, 23]]
  if by_length:
    first = [([[21], prompt], 2), ([prompt], 2)]
    second.reverse()
  else:
    first = [([prompt, prompt], 2), ([[21]], 1)]
  assert seen == [*first, (second, 3)]
  assert [number for *_, number in calls] == [0, 1, 2]


# --- how ours plays --------------------------------------------------------


class Loop:
  """An engine that samples the id 7, one episode after the other."""

  def __init__(self):
    self.prefilled, self.plays = 0, []

  def play(self, weights, requests, environment, *, iteration):
    assert weights == "weights"
    self.plays.append([(r.id, r.attempts) for r in requests])
    episodes = []
    for request in requests:
      self.prefilled += len(request.prompt_ids)
      episodes += [
        self._episode(request, attempt, environment)
        for attempt in range(request.attempts)
      ]
    sampled = sum(int(e.mask.sum()) for e in episodes)
    return types_played(tuple(episodes), {"tokens/sampled": sampled})

  def _episode(self, request, attempt, environment):
    ids, mask = list(request.prompt_ids), [False] * len(request.prompt_ids)
    limit, turn, reply = request.limits.turn_tokens, 0, types.Reply("append")
    while reply.kind == "append":
      ids += [7] * limit
      mask += [True] * limit
      reply = environment.respond(
        types.Pause(
          request_id=request.id,
          attempt=attempt,
          turn=turn,
          malformed=0,
          ids=(7,) * limit,
          reason="turn_tokens",
          room=request.limits.episode_tokens - len(ids),
          turns=request.limits.turns,
        )
      )
      self.prefilled += len(reply.ids)
      ids += reply.ids
      mask += [False] * len(reply.ids)
      turn, limit = turn + 1, reply.turn_tokens
    return types.Episode(
      request_id=request.id,
      attempt=attempt,
      arm="benchmark",
      ids=np.array(ids),
      prompt_length=len(request.prompt_ids),
      mask=np.array(mask),
      logprobs=np.where(mask, -1.0, 0.0),
      turns=(),
      finish=reply.finish,
    )


@dataclasses.dataclass
class types_played:  # noqa: N801
  episodes: tuple
  metrics: dict


def player(**chosen):
  """A player of 6 episodes, without a model."""
  made = object.__new__(ours.Player)
  made._chosen = ours.SETTINGS | {"slots": 4} | chosen
  made._engine, made._weights = Loop(), "weights"
  made.episodes = (
    *TWO,
    workload.Episode(1, (21,), (Turn(3, (22,)), Turn(1, (23,)), Turn(2, ()))),
    workload.Episode(1, (21,), (Turn(1, (24,)), Turn(2, ()))),
    workload.Episode(2, (31, 32), (Turn(1, ()),)),
    workload.Episode(2, (31, 32), (Turn(1, ()),)),
  )
  return made


@pytest.mark.parametrize(
  ("chosen", "prefilled", "plays"),
  [
    # Prompts once a question, observations.
    ({}, 3 + 1 + 2 + 4, 1),
    ({"share": False}, 6 + 2 + 4 + 4, 1),
    ({"refill": False}, 3 + 1 + 2 + 4, 2),  # 4 episodes, then 2
    # The contexts before each later turn again: 6, 5, 3, and 7.
    ({"resume": False}, 3 + 1 + 2 + 6 + 5 + 3 + 7, 3),
  ],
)
def test_every_way_of_ours_plays_the_forced_lengths(chosen, prefilled, plays):
  plays_it = player(**chosen)
  kept, counts = plays_it.play(iteration=1)  # asserts every episode's lengths
  assert kept == counts["tokens/sampled"] == 3 + 2 + 6 + 3 + 1 + 1
  assert plays_it._engine.prefilled == prefilled
  assert len(plays_it._engine.plays) == plays


def test_observations_come_where_the_workload_has_them():
  episodes = player().episodes
  asked, forced = ours.requests(episodes, share=True)
  played = Loop().play("weights", asked, forced, iteration=0).episodes
  for episode, wanted in zip(played, episodes, strict=True):
    ids = list(wanted.prompt)
    for turn in wanted.turns:
      ids += [7] * turn.sample + list(turn.observation)
    assert episode.ids.tolist() == ids


def test_attempts_share_a_request_unless_told_otherwise():
  episodes = player().episodes
  asked, forced = ours.requests(episodes, share=True)
  assert [r.attempts for r in asked] == [2, 2, 2]
  assert [r.limits.turn_tokens for r in asked] == [2, 1, 1]
  asked, _ = ours.requests(episodes, share=False)
  assert [r.limits.turn_tokens for r in asked] == [2, 2, 3, 1, 1, 1]
  pause = types.Pause("question-1", 0, 0, 0, (), "stop", 9, 9)
  assert forced.respond(pause).kind == "go_on"


def test_gathered_attention_is_the_engine_s_attention():
  """Rows of a page and a bit, of exactly one page, of a single key."""
  kind, rng = attention.KINDS["xla"], np.random.default_rng(0)
  draw = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)  # noqa: E731
  pool = jax.tree.map(
    lambda x: draw(*x.shape), kind.pool(7, 8, 2, 16, jnp.float32)
  )
  tables = jnp.array([[1, 2], [3, 4], [5, 6]], jnp.int32)
  arguments = (
    draw(3, 4, 16),
    pool,
    jnp.array([11, 8, 1], jnp.int32),
    tables,
    jnp.arange(4, dtype=jnp.int32),
    jnp.int32(3),
  )
  plain, gathered = (
    jax.jit(attend, static_argnames="decode")(*arguments, decode=True)
    for attend in (kind.attend, ours._gathering(kind.attend))
  )
  np.testing.assert_allclose(gathered, plain, atol=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_gumbel_sampling_follows_the_distribution(devices):
  rows = 4000
  logits = jnp.tile(jnp.log(jnp.array([0.5, 0.25, 0.125, 0.125])), (rows, 1))
  keys = np.random.default_rng(0).integers(0, 2**32, (rows, 2), np.uint32)
  sample = ours._gumbel
  if devices > 1:
    sample = jax.shard_map(
      functools.partial(sample, axis="tensor"),
      mesh=sharding.rollout_mesh(devices, jax.devices()[:devices]),
      in_specs=(P(None, "tensor"), P(), P(), P()),
      out_specs=P(),
      check_vma=False,
    )
  ids, logprobs = sample(
    logits, keys, np.zeros(rows, np.int32), np.full(rows, 0.5, np.float32)
  )
  expected = np.array([16, 4, 1, 1]) / 22  # squares, at temperature 1/2
  sigma = np.sqrt(expected * (1 - expected) / rows)
  seen = np.bincount(ids, minlength=4) / rows
  assert (abs(seen - expected) < 4 * sigma).all()
  np.testing.assert_allclose(logprobs, np.log(expected)[ids], atol=1e-5)


# --- sides -----------------------------------------------------------------

FAKE = """
import os
from benchmarks import sides

def start(settings):
  chosen = sides.merged({"speed": 1}, settings)
  print("a library says hello")

  def play(run):
    if run == 3:
      raise RuntimeError("out of luck")
    return dict(tokens=10 * run, seconds=chosen["speed"], compile_seconds=0)

  about = dict(settings=chosen, malloc=os.environ["GLIBC_TUNABLES"])
  return dict(start=lambda: about, play=play)

sides.serve(start)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
  (tmp_path / "fake_side.py").write_text(FAKE)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  monkeypatch.setenv("GLIBC_TUNABLES", "")
  return sides.Side("fake", "fake_side", {"speed": 4})


def test_a_side_obeys_and_its_prints_come_between_nothing(fake):
  with sides.Process(fake) as process:
    assert process.about["settings"] == {"speed": 4}
    answer = process.ask("play", run=2)
    assert (answer["tokens"], answer["seconds"]) == (20, 4)
    assert 2**20 < answer["peak_rss_bytes"] < 2**30
    with pytest.raises(sides.SideError, match="fake ended.*play.*out of luck"):
      process.ask("play", run=3)
    with pytest.raises(sides.SideError, match="out of luck"):
      process.ask("play", run=1)


def test_a_side_has_huge_pages_unless_told_otherwise(fake, monkeypatch):
  with rollout._start(fake) as process:
    assert process.about["malloc"] == ""
  monkeypatch.delenv("GLIBC_TUNABLES")
  with rollout._start(fake) as process:
    assert process.about["malloc"] == "glibc.malloc.hugetlb=1"


def test_an_unknown_setting_is_named_with_the_choices(fake):
  wrong = dataclasses.replace(fake, settings={"sped": 1})
  with pytest.raises(sides.SideError) as error:
    sides.Process(wrong)
  assert str(error.value) == (
    "fake ended (exit 1) when told to start: Unknown setting 'sped'. "
    "Choices: speed."
  )


@pytest.fixture
def pip(tmp_path, monkeypatch):
  """Stands in for venv and pip; returns what was run."""
  monkeypatch.setenv("SESA_JAX_ASSETS", str(tmp_path))
  ran = []

  def run(command, **_):
    ran.append(command)
    python = tmp_path / "benchmarks" / "peer" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.touch()
    wrong = "broken==1" in command
    return subprocess.CompletedProcess(
      command, int(wrong), stdout="", stderr="one\nERROR: No match\n"
    )

  monkeypatch.setattr(sides.subprocess, "run", run)
  return ran


def test_an_environment_is_made_once_for_its_pins(pip, tmp_path):
  python = sides.set_up("peer", ["a==1", "b==2"])
  assert python == str(tmp_path / "benchmarks" / "peer" / "bin" / "python")
  assert pip[0][1:] == ["-m", "venv", str(tmp_path / "benchmarks" / "peer")]
  assert pip[1][0] == python
  assert pip[1][-2:] == ["a==1", "b==2"]
  assert sides.set_up("peer", ["a==1", "b==2"]) == python
  assert len(pip) == 2
  sides.set_up("peer", ["a==2"])
  assert len(pip) == 4


def test_an_environment_that_fails_says_the_way_out_and_is_made_anew(pip):
  for count in (2, 4):
    with pytest.raises(
      sides.SideError, match="peer.*ERROR: No match.*leave the peer out"
    ):
      sides.set_up("peer", ["broken==1"])
    assert len(pip) == count


# --- the report ------------------------------------------------------------


class Scripted:
  """A process whose runs are given: (seconds, of which compiling)."""

  log = []

  def __init__(self, side):
    self.side = side
    self._runs = iter(side.settings["runs"])
    self.about = dict(
      settings={"a": 1, "b": 2 if side.name == "ours" else 3},
      versions={"jax": "1"},
      flops={"x": 300, "y": 300},
    )

  def __enter__(self):
    self.log.append((self.side.name, "in"))
    return self

  def __exit__(self, *_):
    self.log.append((self.side.name, "out"))

  def ask(self, order, **arguments):
    self.log.append((self.side.name, order))
    if order == "matmul":
      return dict(flops_per_second=[90.0, 100.0, 1000.0])
    seconds, compiling = (9, 5.5) if order == "warm" else next(self._runs)
    return dict(
      tokens=60,
      seconds=seconds,
      compile_seconds=compiling,
      cpu_seconds=seconds * 1.5,
      peak_rss_bytes=2_000_000_000,
      counts={
        "seconds/host": 0.006,
        "tokens/sampled": 60,
        "tokens/prefilled": 15,
      },
    )


def scripted(name, runs, module=rollout.MODULE):
  return sides.Side(name, module, {"runs": runs})


def measured(alternate=True):
  Scripted.log = []
  report = rollout.measure(
    [
      scripted("ours", [(10, 0), (13, 1), (30, 0)]),
      scripted("peer", [(60, 0), (40, 0), (20, 0)], "other"),
    ],
    3,
    alternate=alternate,
    start=Scripted,
  )
  rollout.add_ratios(report, {})
  return report


def test_figures_by_hand():
  ours_, peer = measured()["sides"]
  # 60 tokens in 10, 12 and 30 seconds; in 60, 40, 20.
  assert ours_["tokens_per_second"] == dict(median=5, least=2, greatest=6)
  assert peer["tokens_per_second"] == dict(median=1.5, least=1, greatest=3)
  assert ours_["speedup_of_base"] == 1
  assert peer["speedup_of_base"] == pytest.approx(5 / 1.5)
  assert ours_["compile_seconds"] == 5.5
  assert ours_["share_of_matmul"] == pytest.approx(600 / 12 / 100)
  assert peer["share_of_matmul"] == pytest.approx(600 / 40 / 100)
  assert ours_["host_microseconds_per_token"] == pytest.approx(80)
  assert peer["cores_busy"] == 1.5
  assert peer["tokens_per_cpu_second"] == pytest.approx(60 / 60)


def test_sides_alternate_and_the_machine_is_measured_in_between():
  measured()
  matmul = ("ours", "matmul")
  assert Scripted.log == [
    ("ours", "in"),
    ("peer", "in"),
    ("ours", "warm"),
    ("peer", "warm"),
    *[matmul, ("ours", "play"), matmul, ("peer", "play")] * 3,
    ("peer", "out"),
    ("ours", "out"),
  ]
  measured(alternate=False)
  names = [name for name, _ in Scripted.log]
  assert names == sorted(names)


def test_ratios_are_against_the_base_of_each():
  report = dict(
    sides=[
      dict(name=name, tokens_per_second=dict(median=rate))
      for name, rate in (("all", 12), ("no refill", 3), ("few", 6))
    ]
  )
  rollout.add_ratios(report, {"no refill": "few"})
  ratios = [side["speedup_of_base"] for side in report["sides"]]
  assert ratios == [1, 2, 2]


def test_the_table_and_json_hold_the_figures():
  report = measured()
  assert json.loads(json.dumps(report)) == report
  console = Console(width=120, record=True, file=io.StringIO())
  console.print(rollout.table(report, "Title"))
  lines = console.export_text().splitlines()
  (row,) = (line for line in lines if "peer" in line)
  cells = [cell.strip() for cell in row.strip("│┃ ").split("│")]
  assert cells == [
    "peer", "1.5", "1.0-3.0", "3.33 x", "15.0%", "1.50", "5.5", "2.00", "80.0"
  ]  # fmt: skip
  assert rollout.notes(report)[-2:] == [
    "ours: a=1, b=2 (jax 1)",
    "peer: as ours, but b=3",
  ]


# --- the command line ------------------------------------------------------


def test_settings_are_read():
  words = ["ours.slots=8", "hf.cache=static", "ours.share=false"]
  assert rollout.parse_settings(words) == {
    "ours": {"slots": 8, "share": False},
    "hf": {"cache": "static"},
  }


@pytest.mark.parametrize(
  ("argument", "says"),
  [
    ("--peers=hf,vllm", "Unknown peer 'vllm'. Choices: hf, tunix."),
    ("--runs=0", "at least one run"),
    ("--set=ours.slots", "write SIDE.NAME=VALUE"),
    ("--set=theirs.slots=1", "with a side of ours, hf, tunix"),
  ],
)
def test_wrong_arguments_are_one_line(argument, says, capsys):
  with pytest.raises(SystemExit) as exit_:
    rollout.main([argument])
  assert exit_.value.code == 2
  assert says in capsys.readouterr().err.splitlines()[-1]


def test_all_trials_and_ablations_are_settings_that_exist():
  for change in (
    *rollout.OUR_TRIALS,
    *rollout.ABLATIONS.values(),
    *rollout.SMOLLM2.values(),
  ):
    sides.merged(ours.SETTINGS, change)
  for side in rollout.sides_of_scale({"ours": {"slots": 8}}):
    assert sides.merged(ours.SETTINGS, side.settings)["slots"] == 8


@pytest.mark.slow
def test_the_engine_plays_for_real():
  done = subprocess.run(
    [
      *(sys.executable, "-m", "benchmarks.rollout", "--json", "--peers="),
      *("--runs=1", "--set=ours.model=tiny", "--set=ours.questions=2"),
      *("--set=ours.slots=4", "--set=ours.sample=4"),
    ],
    cwd=sides.ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  (side,) = json.loads(done.stdout)["sides"]
  (run,) = side["runs"]
  assert run["tokens"] == run["counts"]["tokens/sampled"] > 0
  assert side["compile_seconds"] > run["compile_seconds"] == 0
