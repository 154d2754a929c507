"""Weights out, judged by transformers, which opens what was written."""

import dataclasses
import functools
import json
import re
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from configs import tiny
from sesa_jax import checkpoint, metrics, state, types
from sesa_jax.policy import backbones, export, model, tokenizer, weights

ROOT = Path(__file__).parents[1]

COMMON = dict(
  vocab_size=530,  # the tokenizer's 512 ids, and some that are not used
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=2,
  rms_norm_eps=1e-4,
)
FAMILIES = {
  "llama": lambda: transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      **COMMON,
      head_dim=12,
      tie_word_embeddings=True,
      rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
      },
    )
  ),
  "qwen2": lambda: transformers.Qwen2ForCausalLM(
    transformers.Qwen2Config(**COMMON)
  ),
  "qwen3": lambda: transformers.Qwen3ForCausalLM(
    transformers.Qwen3Config(**COMMON, head_dim=12)
  ),
}


def reader(params):
  """Leaves of a tree by path, as a checkpoint gives them."""
  return lambda path: np.asarray(
    functools.reduce(lambda node, key: node[key], path.split("/"), params)
  )


@pytest.fixture(scope="module")
def words():
  return tokenizer.tiny()


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request, tmp_path_factory):
  """A transformers model, its folder, and the folder that we make of it."""
  torch.manual_seed(0)
  reference = FAMILIES[request.param]().eval()
  with torch.no_grad():
    for name, weight in reference.named_parameters():
      weight.normal_("norm" in name, 0.2)
  folder = tmp_path_factory.mktemp(request.param)
  reference.save_pretrained(folder / "theirs")
  backbone, params = weights.load("hf", folder / "theirs")
  assert backbone.table_rows > backbone.vocab_size  # so padding is stripped
  export.save(folder / "ours", backbone, tokenizer.tiny(), reader(params))
  return reference, folder


def load_all(folder):
  """All tensors of a folder, by the library whose format it is."""
  tensors = {}
  for path in sorted(folder.glob("*.safetensors")):
    tensors |= safetensors.torch.load_file(path)
  return tensors


def test_transformers_opens_it_with_equal_logits(family):
  reference, folder = family
  ours = transformers.AutoModelForCausalLM.from_pretrained(folder / "ours")
  assert type(ours) is type(reference)
  ids = torch.arange(5, 45)[None]
  with torch.no_grad():
    assert torch.equal(ours(ids).logits, reference(ids).logits)


def test_the_configuration_is_the_same(family):
  reference, folder = family
  ours = transformers.AutoConfig.from_pretrained(folder / "ours")
  ours = ours.to_dict()
  for name, value in reference.config.to_dict().items():
    if not name.endswith(("_token_id", "_name_or_path")):
      assert ours[name] == value, name
  backbone = weights.check("hf", folder / "ours")
  assert backbone == weights.check("hf", folder / "theirs")


def test_every_bit_returns(family):
  _, folder = family
  theirs, ours = load_all(folder / "theirs"), load_all(folder / "ours")
  assert theirs.keys() == ours.keys()
  for name, tensor in theirs.items():
    assert ours[name].dtype == torch.float32
    assert torch.equal(ours[name], tensor), name


def test_bfloat16_is_rounded_to_the_nearest_even(family, words):
  reference, folder = family
  backbone, params = weights.load("hf", folder / "theirs")
  out = folder / "half"
  export.save(out, backbone, words, reader(params), dtype="bfloat16")
  theirs = load_all(folder / "theirs")
  for name, tensor in load_all(out).items():
    assert tensor.dtype == torch.bfloat16
    assert torch.equal(tensor, theirs[name].to(torch.bfloat16)), name
  opened = transformers.AutoModelForCausalLM.from_pretrained(out)
  assert opened.dtype == torch.bfloat16


def test_what_came_from_bfloat16_returns_exactly(family, words):
  reference, folder = family
  half = folder / "published"
  type(reference)(reference.config).to(torch.bfloat16).save_pretrained(half)
  backbone, params = weights.load("hf", half)
  export.save(
    folder / "back", backbone, words, reader(params), dtype="bfloat16"
  )
  theirs, ours = load_all(half), load_all(folder / "back")
  assert theirs.keys() == ours.keys()
  for name, tensor in theirs.items():
    bits = tensor.view(torch.int16)
    assert torch.equal(bits, ours[name].view(torch.int16)), name


def test_ties_go_to_even(tmp_path, words):
  backbone = backbones.tiny()
  params = model.init(backbone, jax.random.key(0))
  # 1 + 2^-8 lies between 1 and 1 + 2^-7, 1 + 3 * 2^-8 between that and the
  # next: even mantissas are those of 1 and of 1 + 2^-6.
  ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], np.float32)
  scale = np.ones(64, np.float32)
  scale[:3] = ties
  params["norm"]["scale"] = scale
  out = tmp_path / "out"
  export.save(out, backbone, words, reader(params), dtype="bfloat16")
  written = load_all(out)["model.norm.weight"][:3].float()
  assert written.tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]


@pytest.mark.parametrize("limit", [1, 20_000, 60_000])
def test_files_are_cut_at_the_limit(family, words, limit):
  reference, folder = family
  backbone, params = weights.load("hf", folder / "theirs")
  out = folder / f"limit{limit}"
  export.save(out, backbone, words, reader(params), limit=limit)
  files = sorted(out.glob("*.safetensors"))
  assert len(files) > 1
  count = len(files)
  assert [path.name for path in files] == [
    f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)
  ]
  index = json.loads((out / "model.safetensors.index.json").read_text())
  total = 0
  for path in files:
    tensors = safetensors.torch.load_file(path)
    sizes = [t.numel() * t.element_size() for t in tensors.values()]
    assert sum(sizes) <= limit or len(sizes) == 1
    assert {index["weight_map"][name] for name in tensors} == {path.name}
    total += sum(sizes)
  assert index["metadata"]["total_size"] == total
  assert index["weight_map"].keys() == load_all(folder / "theirs").keys()
  opened = transformers.AutoModelForCausalLM.from_pretrained(out)
  for name, tensor in opened.state_dict().items():
    assert torch.equal(tensor, reference.state_dict()[name]), name
  again, read = weights.load("hf", out)
  assert again == backbone
  jax.tree.map(np.testing.assert_array_equal, read, params)


def test_a_file_is_filled_before_the_next():
  sizes = {"a": 3, "b": 2, "c": 1, "d": 9, "e": 1, "f": 4}
  assert export._shards(sizes, 5) == [["a", "b"], ["c"], ["d"], ["e", "f"]]
  assert export._shards(sizes, 100) == [list(sizes)]


def test_the_limit_is_that_of_transformers():
  assert export.LIMIT == 5 * 10**9


def test_tokenizer_and_generation_config_are_opened(family, words):
  _, folder = family
  opened = transformers.AutoTokenizer.from_pretrained(folder / "ours")
  messages = [{"role": "user", "content": "Which river,\n in 1987? <search>"}]
  for text in ("a caf\u00e9 of 1987", "<think> the<|im_end|>\n\n\u65e5"):
    assert opened(text)["input_ids"] == words(text)["input_ids"]
  rendered = [
    t.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    for t in (opened, words)
  ]
  assert rendered[0] == rendered[1]
  vocab = words.get_vocab()
  ends = sorted([vocab["<|im_end|>"], vocab["<|endoftext|>"]])
  generation = transformers.GenerationConfig.from_pretrained(folder / "ours")
  assert generation.eos_token_id == ends
  assert generation.pad_token_id == vocab["<|pad|>"]
  config = transformers.AutoConfig.from_pretrained(folder / "ours")
  assert config.eos_token_id == vocab["<|im_end|>"]
  assert config.pad_token_id == vocab["<|pad|>"]
  # And so does our own loader, for a run that begins with it.
  ours = tokenizer.load("hf", folder / "ours")
  assert tokenizer.end_ids(ours) == tuple(ends)
  # transformers 4 has no other name for it.
  written = json.loads((folder / "ours" / "tokenizer_config.json").read_text())
  assert written["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_one_leaf_is_held_at_a_time(tmp_path, words):
  backbone = dataclasses.replace(backbones.tiny(), tied=False, qkv_bias=True)
  params = model.init(backbone, jax.random.key(0))
  whole, alive, seen = reader(params), [], []

  def read(path):
    assert not any(leaf() is not None for leaf in alive), path
    leaf = whole(path).copy()
    alive.append(weakref.ref(leaf))
    seen.append(path)
    return leaf

  export.save(tmp_path / "out", backbone, words, read)
  assert sorted(seen) == sorted(set(seen))
  assert len(seen) == len(jax.tree.leaves(params))


def test_a_folder_that_holds_something_stays(tmp_path, words):
  out = tmp_path / "out"
  out.mkdir()
  (out / "mine").write_text("x")
  params = model.init(backbones.tiny(), jax.random.key(0))
  with pytest.raises(ValueError, match="exists and is no empty folder"):
    export.save(out, backbones.tiny(), words, reader(params))
  assert [path.name for path in out.iterdir()] == ["mine"]
  (out / "mine").unlink()
  export.save(out, backbones.tiny(), words, reader(params))
  assert (out / "config.json").is_file()
  with pytest.raises(ValueError, match="exists and is no empty folder"):
    export.save(out / "config.json", backbones.tiny(), words, reader(params))
  with pytest.raises(ValueError, match="'f16' is unknown. Choices: float32"):
    export.check(tmp_path / "new", "f16")


def test_a_failure_leaves_nothing(tmp_path, words):
  params = model.init(backbones.tiny(), jax.random.key(0))
  whole = reader(params)

  def read(path):
    if path.startswith("norm"):
      raise OSError("the disk is gone")
    return whole(path)

  with pytest.raises(OSError, match="gone"):
    export.save(tmp_path / "deep" / "out", backbones.tiny(), words, read)
  assert not list((tmp_path / "deep").iterdir())


@pytest.mark.parametrize("out", ["link", "dangling", ".", "new/.."])
def test_what_a_rename_cannot_replace_is_refused_early(
  tmp_path, monkeypatch, words, out
):
  (tmp_path / "work").mkdir()
  (tmp_path / "target").mkdir()
  (tmp_path / "link").symlink_to("target")
  (tmp_path / "dangling").symlink_to("nowhere")
  monkeypatch.chdir(tmp_path / "work")
  path = out if "." in out else tmp_path / out
  with pytest.raises(ValueError, match="link, the working directory or a mou"):
    export.check(path, "float32")


KILLED = """
import os, signal, sys
from sesa_jax.policy import backbones, export, tokenizer

def read(path):
  os.kill(os.getpid(), int(sys.argv[2]))

export.save(sys.argv[1], backbones.tiny(), tokenizer.tiny(), read)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_killed_export_left_goes_with_the_next(tmp_path, words, number):
  out = tmp_path / "out"
  done = subprocess.run(
    [sys.executable, "-c", KILLED, str(out), str(int(number))],
    cwd=ROOT,
    timeout=120,
    capture_output=True,
  )
  assert done.returncode == -number, done.stderr
  (left,) = tmp_path.iterdir()
  assert left.name.startswith(".out.")
  # Somebody's own, and that of an export to another place.
  (tmp_path / ".out.mine").mkdir()
  shutil.copytree(left, tmp_path / ".outer.1")
  params = reader(model.init(backbones.tiny(), jax.random.key(0)))
  export.save(out, backbones.tiny(), words, params)
  names = {path.name for path in tmp_path.iterdir()}
  assert names == {"out", ".out.mine", ".outer.1"}


def test_an_export_that_goes_on_is_left_alone(tmp_path, words):
  out = tmp_path / "out"
  params = reader(model.init(backbones.tiny(), jax.random.key(0)))
  with export.beside(out):
    (other,) = tmp_path.iterdir()
    export.save(out, backbones.tiny(), words, params)
    assert other.is_dir()
  assert [path.name for path in tmp_path.iterdir()] == ["out"]


# --- the mode --------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
  """A run's folder with two checkpoints, of tiny policies."""
  folder = metrics.RunFolder(tmp_path / "run")
  folder.write_json("config.json", metrics.plain(tiny.get_config().to_dict()))
  saved = {}
  store = checkpoint.Checkpoints(tmp_path / "run" / "checkpoints")
  for step in (1, 2):
    for number, name in enumerate(("challenger", "solver")):
      params = model.init(backbones.tiny(), jax.random.key(10 * step + number))
      moments = jax.tree.map(jnp.zeros_like, params)
      saved[step, name] = types.Policy(params, (moments,), jnp.int32(step))
    store.save(
      step,
      trees={name: saved[step, name] for name in ("challenger", "solver")},
      host={},
      arrays={},
      files={},
    )
  store.close()
  return tmp_path / "run", saved


@pytest.mark.slow
def test_the_command_exports_the_newest_checkpoint(run, tmp_path):
  folder, saved = run
  done = subprocess.run(
    [sys.executable, "-m", "sesa_jax.main", "--mode=export"]
    + ["--config=configs/tiny.py", f"--workdir={folder}"]
    + ["--policy=solver", f"--out={tmp_path / 'out'}"],
    capture_output=True,
    text=True,
    cwd=ROOT,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr
  assert "The solver after iteration 2" in done.stderr
  assert "Writing" not in done.stderr  # no bar where nobody looks
  theirs = load_all(tmp_path / "out")
  np.testing.assert_array_equal(
    theirs["model.layers.1.self_attn.q_proj.weight"].numpy().T,
    saved[2, "solver"].params["layers"]["q"]["kernel"][1],
  )


def test_a_policy_goes_out_and_comes_in_again(run, tmp_path):
  folder, saved = run
  out = tmp_path / "out"
  state.export(folder, "challenger", out, "float32")
  _, read = weights.load("hf", out)
  params = saved[2, "challenger"].params
  jax.tree.map(np.testing.assert_array_equal, read, params)
  state.export(folder, "challenger", tmp_path / "half", "bfloat16")
  half = load_all(tmp_path / "half")
  assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
  assert not list(tmp_path.glob(".*"))


def test_an_earlier_checkpoint_goes_out(run, tmp_path):
  folder, saved = run
  for step in (1, 2):
    out = tmp_path / f"after {step}"
    state.export(folder, "solver", out, "float32", iteration=step)
    _, read = weights.load("hf", out)
    params = saved[step, "solver"].params
    jax.tree.map(np.testing.assert_array_equal, read, params)


def config(**changes):
  changed = tiny.get_config().copy_and_resolve_references().unlock()
  changed.update_from_flattened_dict(changes)
  return changed


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"policy": "teacher"}, "'teacher'. Choices: challenger, solver"),
    ({"dtype": "float16"}, "'float16' is unknown. Choices: float32, bfloat16"),
    ({"policy": None}, "--policy is missing: name challenger or solver"),
    ({"iteration": 7}, "run keeps the checkpoints of 1, 2. checkpoint.keep"),
    ({"workdir": "no/run"}, "no/run is not the folder of a run"),
    ({"out": ROOT / "tests"}, "tests exists and is no empty folder"),
    (
      {"config": config(**{"policy.path": "there", "policy.source": "hf"})},
      'policy.path: "" -> "there"; policy.source: "random" -> "hf"',
    ),
  ],
)
def test_bad_input_is_refused(run, tmp_path, changes, says):
  values = dict(
    workdir=run[0], policy="solver", out=tmp_path / "out", dtype="float32"
  )
  with pytest.raises(ValueError, match=re.escape(says)):
    state.export(**values | changes)
  assert not (tmp_path / "out").exists()


def test_other_fields_of_the_config_may_differ(run, tmp_path):
  other = config(**{"eval.every": 7, "policy.compute_dtype": "bfloat16"})
  state.export(run[0], "solver", tmp_path / "out", "float32", other)
  assert (tmp_path / "out").is_dir()


def test_a_run_without_checkpoints_is_an_error(tmp_path):
  bare = metrics.RunFolder(tmp_path / "bare")
  bare.write_json("config.json", metrics.plain(tiny.get_config().to_dict()))
  with pytest.raises(ValueError, match="has no checkpoint yet"):
    state.export(bare.path, "solver", tmp_path / "out", "float32")


def test_a_checkpoint_of_another_model_is_an_error(run, tmp_path):
  folder, _ = run
  other = dataclasses.replace(backbones.tiny(), ffn=64)
  params = model.init(other, jax.random.key(0))
  policy = types.Policy(params, (), jnp.int32(0))
  store = checkpoint.Checkpoints(folder / "checkpoints")
  trees = {"solver": policy, "challenger": policy}
  store.save(3, trees=trees, host={}, arrays={}, files={})
  store.close()
  with pytest.raises(ValueError, match=r"solver\.params\.layers\.down\.kernel"):
    state.export(folder, "solver", tmp_path / "out", "float32")


def test_a_damaged_checkpoint_is_an_error(run, tmp_path):
  folder, _ = run
  shutil.rmtree(folder / "checkpoints" / "2" / "solver")
  with pytest.raises(ValueError, match="iteration 2 .* is damaged"):
    state.export(folder, "solver", tmp_path / "out", "float32")
  assert not (tmp_path / "out").exists()


def test_an_array_that_cannot_be_read_is_named(run, tmp_path, monkeypatch):
  folder, _ = run

  def restore(self, folder, args):
    raise OSError("torn")

  handler = checkpoint.ocp.PyTreeCheckpointHandler
  monkeypatch.setattr(handler, "restore", restore)
  with pytest.raises(ValueError, match="solver is damaged at params/.*torn"):
    state.export(folder, "solver", tmp_path / "out", "float32")
  assert not (tmp_path / "out").exists()
