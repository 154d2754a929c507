"""The plan: sums by hand, programs of absent hardware, and their budgets."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import rich.console
from jax.sharding import NamedSharding, PartitionSpec

from configs import qwen3_0_6b, qwen3_4b, tiny
from sesa_jax import config as config_lib
from sesa_jax.engine import decode
from sesa_jax.plan import compiled, hlo, plan, run, tables, targets
from sesa_jax.policy import backbones, sharding

ROOT = Path(__file__).parents[1]
MIB = 2**20

# --- what a program's text says ----------------------------------------------

TEXT = """\
HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %s = f32[] add(%a, %a)
}

%inner.body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %part = bf16[4,8] fusion(%p), kind=kCustom, calls=%fused.1
  ROOT %t = (s32[], f32[8]) tuple(%p)
}

%inner.cond (p.1: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]) parameter(0)
  %end = u32[]{:T(128)} constant(4)
  ROOT %less = pred[] compare(%p.1, %end), direction=LT
}

%fused (p.2: f32[8]) -> bf16[4,8] {
  %p.2 = f32[8] parameter(0)
  ROOT %begun = bf16[4,8] all-gather(%p.2), channel_id=3
}

%fused.1 (p.7: f32[8]) -> bf16[4,8] {
  %p.7 = f32[8] parameter(0)
  ROOT %part = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%p.7), channel_id=3
}

%outer.body (p.3: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.3 = (s32[], f32[8]) parameter(0)
  %start = bf16[4,8] fusion(%p.3), kind=kCustom, calls=%fused
  %loop = (s32[], f32[8]) while(%p.3), condition=%inner.cond, body=%inner.body
  %sum = f32[8]{0} all-reduce(%p.3), channel_id=1, to_apply=%add
  %sum.1 = f32[8]{0} all-reduce(%sum), channel_id=1, to_apply=%add
  ROOT %t.1 = (s32[], f32[8]) tuple(%sum)
}

%outer.cond (p.4: (s32[], f32[8])) -> pred[] {
  %p.4 = (s32[], f32[8]) parameter(0)
  ROOT %data = pred[] get-tuple-element(%p.4), index=0
}

%yes (p.5: f32[8]) -> f32[8] {
  %p.5 = f32[8] parameter(0)
  %go = (f32[8], f32[8], u32[], u32[]) collective-permute-start(%p.5), \
channel_id=7
  ROOT %gone = f32[8] collective-permute-done(%go)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %w = (s32[], f32[8]) while(%x), condition=%outer.cond, body=%outer.body, \
backend_config={"known_trip_count":{"n":"6"}}
  %u = (s32[], f32[8]) while(%x), condition=%outer.cond, body=%unknown.body
  %c = f32[8] conditional(%x, %x), branch_computations={%yes, %add}
  %splash_mha.2 = bf16[8] custom-call(%x), custom_call_target="tpu_custom_call"
  %ragged_paged.1 = s8[8] custom-call(%x), custom_call_target="tpu_custom_call"
  %f = f32[8] custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
  %t.9 = f32[8] custom-call(%x), custom_call_target="TopK"
  ROOT %r = f32[8] copy(%x)
}

%unknown.body (p.6: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.6 = (s32[], f32[8]) parameter(0)
  ROOT %d = (s8[3,2], pred[5]) all-to-all(%p.6), channel_id=9
}
"""


def test_collectives_come_with_their_runs():
  """Each place counts, but for parts of one that is split over fusions."""
  assert set(hlo.collectives(TEXT)) == {
    hlo.Collective("all-reduce", 8 * 4, 6, 2),
    hlo.Collective("all-gather", 4 * 8 * 2, 6, 1),
    hlo.Collective("collective-permute", 8 * 4, 1, 1),
    hlo.Collective("all-to-all", 3 * 2 + 5, 0, 1),
  }
  totals = [c.total for c in hlo.collectives(TEXT)]
  assert totals == [384, 384, 32, 11]


def test_a_loop_with_another_condition_is_not_counted():
  """`i < 4 and more` may end before: its runs are unknown."""
  counted = "ROOT %less = pred[] compare(%p.1, %end), direction=LT"
  assert counted in TEXT
  also = "ROOT %less = pred[] and(%p.1, %end)"
  loop = hlo._Operation("w", "", "while", "%x), condition=%inner.cond, body=%b")
  for text, trips in (TEXT, 4), (TEXT.replace(counted, also), 0):
    assert hlo._trips(loop, hlo._computations(text)[0]) == trips


def test_kernels_are_told_apart():
  assert hlo.kernels(TEXT) == {"splash": 1, "ragged_paged": 1, "cudnn": 1}
  lowered = (
    '%0 = stablehlo.custom_call @tpu_custom_call(%a) {kernel_name = "mine"}'
    "\n%1 = stablehlo.custom_call @__cudnn$fmhaSoftmax(%a)"
    "\n%2 = stablehlo.custom_call @Sharding(%a)"
  )
  assert hlo.kernels(lowered) == {"pallas": 1, "cudnn": 1}


def test_the_text_that_a_compiler_writes_says_the_same(tmp_path):
  mesh = sharding.mesh(8, 1, jax.devices())
  rows = NamedSharding(mesh, PartitionSpec("fsdp"))
  shape = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=rows)
  lowered = jax.jit(lambda x: x @ x).lower(shape)
  known, written = (
    compiled._compile(lowered, 0.0, dump) for dump in (None, tmp_path)
  )
  assert any(tmp_path.iterdir())
  assert known.collectives == written.collectives
  assert len(known.collectives) == 1
  for path in tmp_path.glob("*after_optimizations.txt"):
    path.write_text("%0 = custom_call @__cudnn$fmha()")

  # It is what was written that is read.
  class Again:
    def compile(self, options):
      assert options["xla_dump_to"] == str(tmp_path)
      return lowered.compile()

  assert compiled._compile(Again(), 0.0, tmp_path).kernels == {"cudnn": 1}


def test_a_scan_on_eight_devices():
  """A real program: five turns of a psum of 2 x 3 floats on each device."""
  mesh = sharding.mesh(8, 1)

  def turn(x, _):
    return jax.lax.psum(x, "fsdp"), None

  function = jax.shard_map(
    lambda x: jax.lax.scan(turn, x, length=5)[0],
    mesh=mesh,
    in_specs=PartitionSpec("fsdp"),
    out_specs=PartitionSpec(),
    check_vma=False,
  )
  where = NamedSharding(mesh, PartitionSpec("fsdp"))
  x = jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=where)
  text = jax.jit(function).lower(x).compile().as_text()
  assert hlo.collectives(text) == (hlo.Collective("all-reduce", 24, 5, 1),)


# --- sums --------------------------------------------------------------------

PARAMETERS = 106_816  # of backbones.tiny(512): 32,768 + 2 x 36,992 + 64


def program(**changes):
  fields = dict(
    seconds=1.0,
    arguments=0.0,
    temporaries=0.0,
    outputs=0.0,
    aliased=0.0,
    kernels={},
    collectives=(),
  )
  return compiled.Compiled(**(fields | changes))


@pytest.fixture
def compile_to(monkeypatch):
  """Makes every compilation come to the given temporaries, at once."""

  def set_to(temporaries):
    def stand_in(lowered, arguments, dump):
      return program(arguments=arguments, temporaries=float(temporaries))

    monkeypatch.setattr(compiled, "_compile", stand_in)

  return set_to


def here(memory=1e12, devices=1):
  found = dataclasses.replace(targets.find("here"), memory=float(memory))
  return dataclasses.replace(
    found, devices=found.devices[:devices], host=found.host[:devices]
  )


def changed(**fields):
  return plan.changed(tiny.get_config(), fields)


def test_phases_by_hand(compile_to):
  compile_to(temporaries=1000)
  found = plan.make(run.read(tiny.get_config(), here(), ()))
  weights = 4 * PARAMETERS
  state = 3 * weights + 4 + 4 + 4  # Adam's count, updates, updates skipped
  assert run.read(tiny.get_config(), here(), ()).parts == {
    "challenger": state,
    "solver": state,
    "reference": weights,
  }
  resident = 2 * state + weights
  totals = {phase.name: phase.total for phase in found.phases}
  batch = 4 * 768 * (8 * 4 + 1)  # nine fields, one of them bool
  assert totals["reference scoring"] == resident + 1000 + batch
  # A gradient, its sums, old and reference logprobs beside the batch.
  sums, scores = 11 * 4, 2 * 4 * 768 * 4
  assert totals["update, gradient"] == (
    resident + weights + sums + batch + scores + 1000
  )
  assert totals["update, step"] == resident + weights + sums + 1000
  assert found.step == state + weights + sums + batch + scores + 1000
  assert found.fits


@pytest.fixture
def host_apart(monkeypatch):
  """Makes the host's memory another than the devices', as with a TPU."""
  monkeypatch.setattr(
    compiled, "_elsewhere", lambda place: place.memory_kind == "pinned_host"
  )


def test_an_offload_of_a_cpu_frees_nothing(compile_to):
  compile_to(temporaries=0)
  kept, offloaded = (
    plan.make(run.read(changed(**{"learner.offload": off}), here(), ()))
    for off in (False, True)
  )
  assert kept.phases == offloaded.phases
  assert kept.step == offloaded.step


def test_an_offload_frees_what_waits_and_not_what_runs(compile_to, host_apart):
  compile_to(temporaries=0)
  both = [
    plan.make(run.read(changed(**{"learner.offload": off}), here(), ()))
    for off in (False, True)
  ]
  kept, freed = ({p.name: p.total for p in x.phases} for x in both)
  moments, reference = 8 * PARAMETERS, 4 * PARAMETERS
  saved = {name: kept[name] - freed[name] for name in kept}
  assert saved.pop("update, step") == moments + reference
  assert saved.pop("reference scoring") == 2 * moments
  assert set(saved.values()) == {2 * moments + reference}


def test_policies_shared_or_narrow_or_started_apart():
  weights = 4 * PARAMETERS
  for fields, parts in (
    (
      {"policy.shared": True},
      {"policy": 3 * weights + 12, "reference": weights},
    ),
    (
      {"learner.moments": "bfloat16", "solver.path": "elsewhere"},
      {
        "challenger": 2 * weights + 12,
        "solver": 2 * weights + 12,
        "reference": 2 * weights,
      },
    ),
  ):
    assert run.read(changed(**fields), here(), ()).parts == parts


def test_devices_share_what_is_cut(compile_to):
  """Norms and counts are whole on each; all else is cut in eight."""
  compile_to(temporaries=0)
  sizes = {"mesh.fsdp": 8, "learner.microbatch_rows": 8, "engine.slots": 8}
  config = changed(**sizes)
  parts = run.read(config, here(devices=8), ()).parts
  norms = 5 * 64
  weights = 4 * ((PARAMETERS - norms) / 8 + norms)
  assert parts["reference"] == weights
  assert parts["solver"] == 3 * weights + 12


def test_what_is_missing_is_what_switches_give(compile_to, host_apart):
  """Memory for all but the moments of both policies, less a byte or none."""
  compile_to(temporaries=5000)
  config = changed(**{"engine.pages": 7})  # a rollout needs least
  waiting = (2 * 8 + 4) * PARAMETERS

  def make(memory):
    return plan.make(run.read(config, here(memory), ()))

  most = max(phase.total for phase in make(1e12).phases)
  assert make(most).fits
  short = make(most - 1)
  assert not short.fits
  assert short.remedies == ("--config.learner.offload=True",)
  # With one row, not four, no temporary is smaller here: nothing helps.
  assert make(most - waiting - 1e5).remedies == ()


def test_a_step_that_is_refused_is_left_out(compile_to):
  """Two heads of keys do not divide by four; two devices of a rollout help."""
  compile_to(temporaries=0)
  sizes = {"mesh.fsdp": 4, "mesh.tensor": 2, "engine.slots": 8}
  sizes |= {"engine.pages": 7, "learner.offload": True}  # no episode less

  def make(rollout, memory):
    config = changed(**sizes, **{"mesh.rollout_tensor": rollout})
    return plan.make(run.read(config, here(memory, devices=8), ()))

  one, two = (
    max(phase.total for phase in make(n, 1e12).phases) for n in (1, 2)
  )
  assert two < one
  assert make(1, two).remedies == ("--config.mesh.rollout_tensor=2",)


def test_pages_that_fit(compile_to):
  compile_to(temporaries=0)
  config = tiny.get_config()
  first = plan.make(run.read(config, here(), ()))
  cache = first.caches[0]
  # Six slots of 768 ids, and a prompt's last page each; the trash page.
  assert (cache.pages, cache.width) == (6 * (6 + 1) + 1, 6)
  page = 2 * 2 * 2 * 16 * 128 * 4  # layers, k and v, heads, size, ids, float32
  rollout = next(p for p in first.phases if p.name == plan.ROLLOUT)
  assert rollout.resident["keys and values"] == cache.pages * page
  bare = rollout.total - cache.pages * page
  less = plan.make(run.read(config, here(bare + 18.5 * page), ()))
  assert (less.caches[0].fitting, less.caches[0].episodes) == (18, 2)
  assert less.caches[0].tokens == 17 * 128
  assert not less.fits
  assert less.remedies == ("--config.engine.pages=18",)
  asked = changed(**{"engine.pages": 18})
  assert plan.make(run.read(asked, here(bare + 18.5 * page), ())).fits


def test_an_estimate_by_hand(compile_to):
  compile_to(temporaries=0)
  chip = targets.Chip(1e12, flops=1e15, bandwidth=1e12, links=1.0, source="")
  target = dataclasses.replace(here(), chip=chip)
  found = plan.make(run.read(tiny.get_config(), target, ())).estimate
  # 3 questions, 4 attempts, 768 tokens: two observations of 96, 576 sampled.
  assert found["solver/tokens"] == 12 * 768
  assert found["solver/sampled"] == 12 * 576
  kernels = 2 * 64 * (64 + 2 * 32 + 64 + 3 * 128)
  forward = 2 * kernels * 12 * 768 + 2 * 512 * 64 * 12 * 576
  forward += 4 * 2 * 64 * 12 * 768 * 769 / 2
  assert found["solver/flops/rollout"] == forward
  # One update: the reference's pass alone.
  assert found["solver/flops/score"] == forward
  assert found["solver/seconds/score"] == pytest.approx(forward / 1e15)
  # Six rows at 384 ids: all weights, float32, and 512 bytes an id, read but
  # for the new ones, which are written.
  step = 4 * PARAMETERS + 2 * 2 * 2 * 16 * 4 * (6 * 384 + 6)
  assert found["solver/bytes/rollout"] == 12 * 576 / 6 * step
  # Weights and two moments, read and written; the gradient, read twice.
  assert found["solver/bytes/update"] == 8 * 4 * PARAMETERS
  assert found["solver/seconds/update"] == pytest.approx(
    found["solver/flops/update"] / 1e15 + 8 * 4 * PARAMETERS / 1e12
  )
  seconds = [x for name, x in found.items() if "/seconds/" in name]
  assert found["hours"] == pytest.approx(sum(seconds) / 3600)


@pytest.mark.parametrize(
  ("changes", "challenger", "solver"),  # episodes played, and learned from
  [
    ({}, (3, 3), (12, 12)),
    ({"bank.control_attempts": 2}, (3, 3), (18, 12)),
    ({"challenger.group_size": 2}, (6, 6), (24, 24)),
    ({"challenger.frozen": True}, (3, 0), (12, 12)),
    ({"selfplay": False, "bank.control_attempts": 1}, (0, 0), (15, 12)),
  ],
)
def test_all_that_a_role_plays_is_counted(changes, challenger, solver):
  cache = plan.Cache("x", 1, 1, 1, 1, 1, 0.0, rows=1.0)
  one, found = (
    plan.estimate(
      run.read(plan.changed(tiny.get_config(), c), here(), ()), cache
    )
    for c in ({}, changes)
  )
  for role, (played, learned), base in (
    ("challenger", challenger, 3),
    ("solver", solver, 12),
  ):
    assert found[f"{role}/tokens"] == played * 768
    for name in ("flops/rollout", "flops/prefill", "bytes/rollout", "sampled"):
      name = f"{role}/{name}"
      assert found[name] == pytest.approx(one[name] * played / base)
    for name in ("flops/score", "flops/update"):
      name = f"{role}/{name}"
      assert found[name] == pytest.approx(one[name] * learned / base)
    assert bool(found[f"{role}/bytes/update"]) == bool(learned)


def test_a_program_is_compiled_once(compile_to, monkeypatch):
  compile_to(temporaries=0)
  texts = []
  once = compiled._compile
  monkeypatch.setattr(
    compiled,
    "_compile",
    lambda lowered, size, dump: (
      texts.append(lowered.as_text()),
      once(lowered, size, dump),
    )[1],
  )
  known = {}
  for off in False, True:
    config = changed(**{"learner.offload": off})
    plan.make(run.read(config, here(), ()), known)
  # Moments wait elsewhere; no program knows.
  assert len(texts) == len(set(texts)) == len(known) == 7


# --- what a user sees --------------------------------------------------------


@pytest.fixture
def one_device(monkeypatch):
  """`--target=here` is one device of those that tests have."""
  alone = here()
  monkeypatch.setattr(targets, "find", lambda name: alone)


def test_tables_and_json_say_the_same(compile_to, one_device, capsys):
  compile_to(temporaries=3 * MIB)
  assert tables.main(tiny.get_config(), "here", (), as_json=True) == 0
  found = json.loads(capsys.readouterr().out)
  assert found["fits"] is True
  assert found["programs"]["accumulate"]["temporaries"] == 3 * MIB
  assert {phase["name"] for phase in found["phases"]} >= {"rollout"}
  moved = found["estimate"]["solver/bytes/rollout"] / 1e9
  step = found["caches"][0]["step_bytes"] / 1e9
  assert tables.main(tiny.get_config(), "here", (), as_json=False) == 0
  shown = capsys.readouterr().out
  assert "It fits." in shown
  assert "accumulate" in shown
  lines = [line.split() for line in shown.splitlines()]
  assert [line[3] for line in lines if line[:2] == ["solver", "rollout"]] == [
    f"{moved:,.2f}"
  ]
  assert f"{step:,.2f}" in next(x for x in lines if x[:1] == ["xla"])


def test_what_does_not_fit_is_said_and_coded(compile_to, one_device, capsys):
  compile_to(temporaries=math.inf)
  assert tables.main(tiny.get_config(), "here", (), as_json=True) == 1
  found = json.loads(capsys.readouterr().out)  # no Infinity, which is no JSON
  assert found["programs"]["apply"]["temporaries"] is None
  shown = rich.console.Console(width=140)
  with shown.capture() as capture:
    tables.show(plan.make(run.read(tiny.get_config(), here(10.0), ())), shown)
  assert "take a larger target" in capture.get()


@pytest.mark.parametrize(
  ("name", "says"),
  [
    ("v7:2x2", "Choices: here, a100:8"),
    ("v5e", "such as v5e:4x4"),
    ("v5e:4by4", "such as v5e:4x4"),
    ("v5e:0x0", "such as v5e:4x4"),  # of these libtpu dies
    ("v5e:4x0", "such as v5e:4x4"),
    ("a100:16", "from 1 to 8 GPUs"),
    ("a100:2x4", "from 1 to 8 GPUs"),
  ],
)
def test_an_unknown_target_is_one_line(name, says):
  with pytest.raises(ValueError, match=says) as error:
    targets.find(name)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("name", "module"), [("v5e:4x4", "libtpu"), ("a100:8", "nvidia.cudnn")]
)
def test_what_is_not_installed_is_named(name, module, monkeypatch):
  known = targets.importlib.util.find_spec
  monkeypatch.setattr(
    targets.importlib.util,
    "find_spec",
    lambda wanted: None if wanted == module else known(wanted),
  )
  with pytest.raises(ValueError, match="needs ") as error:
    targets.find(name)
  readme = (ROOT / "README.md").read_text("utf-8")
  for way in "pip install -e '.[plan]'", ".venv/compilers/bin/python":
    assert way in str(error.value)
    assert way in readme


@pytest.mark.compiles
def test_a_topology_that_there_is_not_is_one_line():
  pytest.importorskip("libtpu")
  with pytest.raises(ValueError, match=r"--target=v5e:3x5: .*") as error:
    targets.find("v5e:3x5")
  assert "\n" not in str(error.value)


def test_the_command_line():
  """Bad input is exit code 2 and one line; a program's own words are not."""
  done = subprocess.run(
    [sys.executable, "-m", "sesa_jax.main", "--mode=plan"]
    + ["--config=configs/qwen3_4b.py", "--target=v5e:4by4"],
    capture_output=True,
    text=True,
    cwd=ROOT,
    timeout=120,
  )
  assert done.returncode == 2
  assert done.stderr.splitlines()[-1].startswith("error: Unknown --target=")
  assert not done.stdout


@pytest.mark.parametrize(("gives", "code"), [("1", 1), ("0", 0), ("None", 0)])
def test_a_modes_exit_code_is_the_commands(gives, code):
  text = (
    "import sys; from sesa_jax import main; "
    f"main.MODES['plan'] = lambda: {gives}; sys.exit(main.main())"
  )
  command = [sys.executable, "-c", text, "--mode=plan"]
  done = subprocess.run(command, cwd=ROOT, timeout=120)
  assert done.returncode == code


def test_weights_need_not_be_here(monkeypatch, tmp_path):
  monkeypatch.setenv("SESA_JAX_ASSETS", str(tmp_path))
  config = qwen3_4b.get_config()
  assert run.architecture(config) == backbones.published("qwen3_4b")
  other = plan.changed(config, {"name": "mine"})
  with pytest.raises(ValueError, match="assets:qwen3-4b.*Unknown backbone"):
    run.architecture(other)


@pytest.mark.parametrize(
  ("name", "value", "says"),
  [
    ("engine.pages", 6, "longest .* to 768 tokens, 6 pages .* at least 7"),
    ("engine.pages", -1, "at least 0"),
    ("verifier.max_tokens", 8192, "up to 8192 tokens .* context of 4096"),
    ("policy.compute_dtype", "foo", "Choices: float32, bfloat16"),
    ("policy.compute_dtype", "int8", "Choices: float32, bfloat16"),
    ("learner.moments", "int8", "Choices: float32, bfloat16"),
    ("engine.steps_per_dispatch", 0, "at least 1"),
    ("engine.page_size", 0, "at least 1"),
    ("mesh.tensor", 0, "at least 1"),
    ("mesh.rollout_tensor", 0, "at least 1"),
    ("learner.row_multiple", 0, "at least 1"),
    ("learner.row_multiple", -1, "at least 1"),
  ],
)
def test_what_a_run_refuses_has_no_plan(name, value, says):
  with pytest.raises(ValueError, match=says) as error:
    run.read(changed(**{name: value}), here(), ())
  assert "\n" not in str(error.value)


def test_pages_of_one_longest_episode_are_enough():
  found = run.read(changed(**{"engine.pages": 7}), here(), ())
  config_lib.check_longest(found.config, found.layout)


def test_sizes_that_do_not_go_together_are_refused():
  with pytest.raises(ValueError, match="microbatch_rows 3"):
    run.read(
      changed(**{"mesh.fsdp": 8, "learner.microbatch_rows": 3}),
      here(devices=8),
      (),
    )
  with pytest.raises(ValueError, match="kv_heads = 2"):
    run.read(changed(**{"mesh.rollout_tensor": 4}), here(devices=8), ())


# --- programs of absent hardware ---------------------------------------------

BUDGETS = Path(__file__).with_name("budgets.json")
GROWTH = 1.05
RENEW = "RENEW_BUDGETS=1 python -m pytest tests/test_plan.py -k budget"
# Qwen3-0.6B's layers, two of them, and a vocabulary that compiles quickly.
SMALL = dataclasses.replace(
  backbones.published("qwen3_0_6b"), layers=2, vocab_size=8192
)


@pytest.mark.slow
@pytest.mark.compiles
# A program for a machine that is absent cannot come out of the cache again.
@pytest.mark.filterwarnings("ignore:Error reading persistent")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
  ("name", "training", "rollout"),
  [("v5e:2x2", "splash", "ragged_paged"), ("a100:8", "cudnn", "cudnn")],
)
def test_memory_stays_in_its_budget(name, training, rollout):
  """One config on a TPU and on A100: kernels, aliasing, bytes of a device."""
  for module in ("libtpu", "jax_plugins.xla_cuda12"):
    pytest.importorskip(module)
  target = targets.find(name)
  changes = {
    "challenger.episode_tokens": 1024,
    "solver.episode_tokens": 1024,
    "verifier.max_tokens": 1024,
    "learner.microbatch_rows": 16,
    "engine.pages": 2048,
  }
  config = plan.changed(qwen3_0_6b.get_config(), changes)
  found = run.read(config, target, changes, SMALL)
  learner, layout = found.learners["solver"], found.layout
  rows = learner.arguments(found.lengths["solver"])
  pages = decode.arguments(layout)
  cases = {
    "accumulate": (learner.programs.accumulate, rows["accumulate"]),
    "prefill": (decode.programs(layout).prefill, pages["prefill"]),
    "decode": (decode.programs(layout).decode, pages["decode"]),
  }
  programs = {
    label: compiled.compile_program(*case, target, {})
    for label, case in cases.items()
  }
  # Forward, recomputed, and backward; the first layer's and the second's.
  assert programs["accumulate"].kernels.keys() == {training}
  assert programs["accumulate"].kernels[training] >= 3
  assert programs["decode"].kernels == {rollout: SMALL.layers}
  # The last layer's output is no key and no value.
  assert programs["prefill"].kernels == {rollout: SMALL.layers - 1}
  gradient = compiled.device_bytes(rows["accumulate"][0])
  assert programs["accumulate"].aliased >= gradient
  pool = compiled.device_bytes(pages["copy"][0])
  for label in "prefill", "decode":
    assert programs[label].aliased >= pool
    assert programs[label].outputs < 0.01 * pool
  if target.platform == "tpu":
    assert programs["decode"].temporaries < 0.05 * pool
  _within_budget(name, {label: x.total for label, x in programs.items()})


def _within_budget(name, totals):
  version = f"jax {jax.__version__}"
  budgets = json.loads(BUDGETS.read_text("utf-8"))
  if os.environ.get("RENEW_BUDGETS"):
    budgets.setdefault(version, {})[name] = totals
    BUDGETS.write_text(json.dumps(budgets, indent=1) + "\n", "utf-8")
  known = budgets.get(version, {}).get(name)
  assert known, f"{version} has no budget for {name} yet: {RENEW}"
  grown = {
    label: f"{total / MIB:.1f} MiB, {total / known[label]:.2f} of its budget"
    for label, total in totals.items()
    if total > GROWTH * known[label]
  }
  assert not grown, f"{name}: {grown}. If it must be so: {RENEW}"
