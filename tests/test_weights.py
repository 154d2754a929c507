import collections
import dataclasses
import hashlib
import json
import math
import os
import socket
import struct
import subprocess
import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from sesa_jax.policy import backbones, model, sharding, weights


def llama(**changes):
  torch.manual_seed(0)
  sizes = dict(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
  )
  config = transformers.LlamaConfig(**(sizes | changes))
  return transformers.LlamaForCausalLM(config)


@pytest.fixture
def folder(tmp_path):
  llama().save_pretrained(tmp_path)
  return tmp_path


def rewrite(folder, change):
  """Changes the tensors of a folder with the library that wrote them."""
  path = folder / "model.safetensors"
  tensors = safetensors.torch.load_file(path)
  change(tensors)
  safetensors.torch.save_file(tensors, path)


def test_shards_and_one_file_hold_the_same(tmp_path):
  reference = llama()
  reference.save_pretrained(tmp_path / "one")
  reference.save_pretrained(tmp_path / "many", max_shard_size="6KB")
  assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
  backbone, one = weights.load("hf", tmp_path / "one")
  again, many = weights.load("hf", tmp_path / "many")
  assert backbone == again
  jax.tree.map(np.testing.assert_array_equal, one, many)
  theirs = reference.model.layers[1].mlp.down_proj.weight.detach().T
  np.testing.assert_array_equal(one["layers"]["down"]["kernel"][1], theirs)


def test_bfloat16_files_become_float32_masters(tmp_path):
  reference = llama().to(torch.bfloat16)
  reference.save_pretrained(tmp_path)
  _, params = weights.load("hf", tmp_path, vocab_multiple=1)
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {
    jnp.dtype(jnp.float32)
  }
  np.testing.assert_array_equal(
    params["head"]["embedding"], reference.lm_head.weight.detach().float()
  )


def test_structure_is_that_of_init(folder):
  backbone, params = weights.load("hf", folder)
  drawn = model.abstract_params(backbone)
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, drawn)


def test_check_returns_the_backbone_without_loading(folder):
  assert weights.check("hf", str(folder)).layers == 2
  assert weights.check("random", "").table_rows == 512


def test_random_weights_follow_the_key():
  backbone, one = weights.load("random", "", jax.random.key(0))
  _, same = weights.load("random", "", jax.random.key(0))
  _, other = weights.load("random", "", jax.random.key(1))
  assert dataclasses.replace(backbone, vocab_multiple=1) == backbones.tiny()
  jax.tree.map(np.testing.assert_array_equal, one, same)
  assert not np.array_equal(
    one["embed"]["embedding"], other["embed"]["embedding"]
  )


def test_all_wrong_tensors_are_listed_in_one_error(folder):
  def change(tensors):
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(16, 24)

  rewrite(folder, change)
  with pytest.raises(ValueError, match="does not hold") as error:
    weights.check("hf", str(folder))
  text = str(error.value)
  assert "missing (1): model.norm.weight;" in text
  assert "unexpected (1): model.layers.0.self_attn.q_proj.bias;" in text
  assert "model.layers.1.mlp.up_proj.weight is [16, 24], not [24, 16]" in text
  assert "\n" not in text


def test_quantized_tensors_are_named(folder):
  def change(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)

  rewrite(folder, change)
  with pytest.raises(ValueError, match="lm_head.weight is I8"):
    weights.check("hf", str(folder))


def test_a_copy_of_a_tied_head_is_no_fault(tmp_path):
  llama(tie_word_embeddings=True).save_pretrained(tmp_path)
  rewrite(
    tmp_path,
    lambda tensors: tensors.update(
      {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    ),
  )
  assert weights.check("hf", str(tmp_path)).tied


def test_missing_files_are_named(folder, tmp_path):
  with pytest.raises(ValueError, match="is not a folder"):
    weights.check("hf", str(tmp_path / "nowhere"))
  with pytest.raises(ValueError, match="is not a file"):
    weights.check("gguf", str(tmp_path / "nowhere.gguf"))
  with pytest.raises(ValueError, match="Choices: hf, gguf, random"):
    weights.check("hub", "")
  (folder / "model.safetensors").unlink()
  with pytest.raises(ValueError, match=r"lacks \(1\): model\.safe"):
    weights.check("hf", str(folder))
  (folder / "config.json").write_text("{")
  with pytest.raises(ValueError, match=r"config\.json is not JSON"):
    weights.check("hf", str(folder))
  (folder / "config.json").unlink()
  with pytest.raises(ValueError, match=r"lacks config\.json"):
    weights.check("hf", str(folder))


def test_a_missing_shard_is_named(tmp_path):
  llama().save_pretrained(tmp_path, max_shard_size="6KB")
  shard = sorted(tmp_path.glob("*.safetensors"))[1]
  shard.unlink()
  with pytest.raises(ValueError, match=rf"lacks \(1\): {shard.name}\."):
    weights.check("hf", str(tmp_path))


def test_faults_of_files_and_of_tensors_stand_in_one_error(tmp_path):
  llama(num_hidden_layers=6).save_pretrained(tmp_path, max_shard_size="6KB")
  index = tmp_path / "model.safetensors.index.json"
  owners = json.loads(index.read_text())["weight_map"]
  cut, cut_too, gone, *whole = sorted(set(owners.values()))
  for name in (cut, cut_too):
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-1])
  (tmp_path / gone).unlink()
  last = whole[-1]
  tensors = safetensors.torch.load_file(tmp_path / last)
  dropped, kept = [n for n in owners if owners[n] == last][:2]
  del tensors[dropped]
  tensors[kept] = tensors[kept].to(torch.int8)
  first = safetensors.torch.load_file(tmp_path / whole[0])
  twice = next(iter(first))
  tensors |= {twice: first[twice]}
  tensors |= {f"extra.{n}": torch.zeros(1) for n in range(9)}
  safetensors.torch.save_file(tensors, tmp_path / last)
  with pytest.raises(ValueError, match="does not hold") as error:
    weights.check("hf", tmp_path)
  text = str(error.value)
  assert "\n" not in text
  assert f"truncated or corrupt (2): {tmp_path / cut} (" in text
  assert f"{tmp_path / cut_too} (" in text
  assert f"lacks (1): {gone};" in text
  # Tensors of files that cannot be read are not missing on top.
  assert f"missing (1): {dropped};" in text
  assert f"{kept} is I8" in text
  assert f"in two files (1): {twice};" in text
  assert "unexpected (9): extra." in text
  assert text.count("extra.") == 5
  assert "and 4 more" in text


@pytest.mark.parametrize("index", [{"weight_map": {"a": 1}}, {"weight_map": 7}])
def test_an_index_that_names_no_files_is_an_error(folder, index):
  (folder / "model.safetensors").unlink()
  path = folder / "model.safetensors.index.json"
  path.write_text(json.dumps(index))
  with pytest.raises(ValueError, match="weight_map"):
    weights.check("hf", folder)


def test_a_single_file_goes_before_an_index(tmp_path):
  llama().save_pretrained(tmp_path, max_shard_size="6KB")
  other = llama()
  with torch.no_grad():
    other.lm_head.weight.fill_(3.0)
  other.save_pretrained(tmp_path / "other")
  (tmp_path / "other" / "model.safetensors").rename(
    tmp_path / "model.safetensors"
  )
  _, params = weights.load("hf", tmp_path, vocab_multiple=1)
  theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
  np.testing.assert_array_equal(
    params["head"]["embedding"], theirs.lm_head.weight.detach()
  )


def test_tables_of_rotations_that_old_files_carry_are_no_fault(folder):
  rewrite(
    folder,
    lambda tensors: tensors.update(
      {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    ),
  )
  assert weights.check("hf", folder).layers == 2


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_safetensors_file_is_an_error(folder, kept):
  path = folder / "model.safetensors"
  path.write_bytes(path.read_bytes()[:kept])
  with pytest.raises(ValueError, match="truncated or corrupt") as error:
    weights.check("hf", str(folder))
  assert str(path) in str(error.value)


def write_gguf(path, reference, **changes):
  """Writes a file as llama.cpp's converter does, q and k permuted."""
  config = reference.config
  writer = gguf.GGUFWriter(path, "llama")
  fields = dict(
    vocab_size=config.vocab_size,
    embedding_length=config.hidden_size,
    feed_forward_length=config.intermediate_size,
    block_count=config.num_hidden_layers,
    head_count=config.num_attention_heads,
    head_count_kv=config.num_key_value_heads,
    context_length=config.max_position_embeddings,
    layer_norm_rms_eps=config.rms_norm_eps,
    rope_freq_base=config.rope_parameters["rope_theta"],
    rope_dimension_count=config.head_dim,
    key_length=config.head_dim,
  )
  for name, value in (fields | changes).items():
    getattr(writer, f"add_{name}")(value)

  def permuted(weight, heads):
    halves = weight.reshape(heads, 2, config.head_dim // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)

  names = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q"}
  names |= {"self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
  names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate"}
  names |= {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
  names |= {"post_attention_layernorm": "ffn_norm"}
  names |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
  names |= {"lm_head": "output", "model.layers": "blk"}
  for name, weight in reference.state_dict().items():
    weight = weight.numpy()
    if ".q_proj" in name:
      weight = permuted(weight, config.num_attention_heads)
    if ".k_proj" in name:
      weight = permuted(weight, config.num_key_value_heads)
    for theirs, ours in names.items():
      name = name.replace(theirs, ours)
    writer.add_tensor(name, weight)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def test_gguf_equals_the_folder_of_the_same_model(tmp_path):
  reference = llama(
    rope_parameters={"rope_type": "default", "rope_theta": 700.0}
  )
  reference.save_pretrained(tmp_path)
  write_gguf(tmp_path / "m.gguf", reference)
  backbone, params = weights.load("gguf", tmp_path / "m.gguf")
  expected_backbone, expected = weights.load("hf", tmp_path)
  assert backbone == expected_backbone
  jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("kept", [0, 3, 30, 400, -100])
def test_a_truncated_gguf_file_is_an_error(tmp_path, kept):
  path = tmp_path / "m.gguf"
  write_gguf(path, llama())
  path.write_bytes(path.read_bytes()[:kept])
  with pytest.raises(ValueError, match="truncated or corrupt") as error:
    weights.check("gguf", str(path))
  assert str(path) in str(error.value)


def test_a_gguf_of_another_shape_is_an_error(tmp_path):
  path = tmp_path / "m.gguf"
  write_gguf(path, llama(), feed_forward_length=25)
  with pytest.raises(ValueError, match=r"ffn_up\.weight is \[24, 16\], not"):
    weights.check("gguf", str(path))
  write_gguf(path, llama(), rope_dimension_count=4)
  with pytest.raises(ValueError, match="RoPE over 4 of 8"):
    weights.check("gguf", str(path))


def test_a_corrupt_safetensors_header_is_an_error(folder):
  path = folder / "model.safetensors"
  content = path.read_bytes()
  (size,) = struct.unpack("<Q", content[:8])
  header = json.loads(content[8 : 8 + size])
  header["model.norm.weight"]["data_offsets"][1] += 4
  text = json.dumps(header).encode()
  path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
  with pytest.raises(ValueError, match="truncated or corrupt"):
    weights.check("hf", str(folder))


# --- sharded ---------------------------------------------------------------

MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
  """Two shards with everything that a leaf can be, cut by up to eight."""
  torch.manual_seed(1)
  config = transformers.Qwen2Config(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=4,
  )
  reference = transformers.Qwen2ForCausalLM(config)
  with torch.no_grad():
    for name, weight in reference.named_parameters():
      weight.normal_("norm" in name, 0.2)
  folder = tmp_path_factory.mktemp("wide")
  reference.to(torch.bfloat16).save_pretrained(folder, max_shard_size="30KB")
  assert len(list(folder.glob("*.safetensors"))) > 1
  return folder


@pytest.mark.parametrize(
  ("source", "shape"),
  [*((s, m) for s in ("hf", "gguf") for m in MESHES), ("random", (4, 2))],
)
def test_a_mesh_holds_what_one_device_does(source, shape, wide, tmp_path):
  path = {"hf": wide, "gguf": tmp_path / "m.gguf", "random": ""}[source]
  if source == "gguf":
    write_gguf(path, llama(num_attention_heads=16, num_key_value_heads=8))
  mesh = sharding.mesh(*shape)
  key = jax.random.key(3)
  backbone, alone = weights.load(source, path, key)
  again, spread = weights.load(source, path, key, mesh=mesh)
  assert backbone == again
  jax.tree.map(np.testing.assert_array_equal, alone, spread)
  where = sharding.shardings(mesh, alone)
  assert jax.tree.map(lambda leaf: leaf.sharding, spread) == where


class Counted:
  """A safetensors file that says how many bytes of each tensor were read."""

  def __init__(self, real, counts):
    self.real, self.counts = real, counts

  def keys(self):
    return self.real.keys()

  def get_slice(self, name):
    part = self.real.get_slice(name)

    class Slice:
      get_shape, get_dtype = part.get_shape, part.get_dtype

      def __getitem__(_, index):  # noqa: N805
        values = part[index]
        self.counts[name] += values.nbytes
        return values

    return Slice()


@pytest.fixture
def counts(monkeypatch):
  counts = collections.Counter()
  real = weights.safe_open
  monkeypatch.setattr(
    weights, "safe_open", lambda *a, **k: Counted(real(*a, **k), counts)
  )
  return counts


def sizes(folder):
  """Bytes of each tensor, by the library that wrote it."""
  return {
    name: tensor.numel() * tensor.element_size()
    for path in folder.glob("*.safetensors")
    for name, tensor in safetensors.torch.load_file(path).items()
  }


@pytest.mark.parametrize("shape", [(1, 1), *MESHES])
def test_every_byte_is_read_once(wide, counts, shape):
  weights.load("hf", wide, mesh=sharding.mesh(*shape))
  assert counts == sizes(wide)


def test_nothing_is_read_to_check(wide, counts):
  weights.check("hf", wide)
  assert not counts


PROGRAM = """
import collections, hashlib, json, sys
import jax, numpy as np
from sesa_jax import distributed
distributed.initialize()
from sesa_jax.policy import sharding, weights
from tests import test_weights
counts = collections.Counter()
real = weights.safe_open
weights.safe_open = lambda *a, **k: test_weights.Counted(real(*a, **k), counts)
_, params = weights.load("hf", sys.argv[1], mesh=sharding.mesh(8, 1))
shares = {
  jax.tree_util.keystr(path): [
    [
      [[axis.start, axis.stop] for axis in shard.index],
      hashlib.md5(np.asarray(shard.data)).hexdigest(),
    ]
    for shard in leaf.addressable_shards
  ]
  for path, leaf in jax.tree_util.tree_leaves_with_path(params)
}
print("SAID", json.dumps([counts, shares]))
"""


@pytest.mark.slow
def test_a_process_reads_its_devices_share(wide):
  with socket.socket() as sock:
    sock.bind(("localhost", 0))
    port = sock.getsockname()[1]
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", PROGRAM, str(wide)],
      env=os.environ
      | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port - 1),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for rank in range(2)
  ]
  try:
    outs = [process.communicate(timeout=120) for process in processes]
  finally:
    for process in processes:
      process.kill()
  _, whole = weights.load("hf", wide)
  size = sizes(wide)
  seen = collections.defaultdict(set)
  for out, err in outs:
    lines = [line for line in out.splitlines() if line.startswith("SAID")]
    assert lines, err
    counts, shares = json.loads(lines[0].removeprefix("SAID"))
    for name, read in counts.items():  # norms and biases are not cut by fsdp
      cut = "proj.weight" in name or "embed" in name or "lm_head" in name
      assert read == size[name] / (2 if cut else 1), name
    for path, leaf in jax.tree_util.tree_leaves_with_path(whole):
      for index, digest in shares[jax.tree_util.keystr(path)]:
        part = np.asarray(leaf)[tuple(slice(*axis) for axis in index)]
        mine = hashlib.md5(np.ascontiguousarray(part)).hexdigest()
        assert mine == digest
        seen[jax.tree_util.keystr(path)].add(str(index))
  cut = [path for path, indices in seen.items() if len(indices) > 1]
  assert {len(seen[path]) for path in cut} == {8}
  assert len(cut) == 9  # two tables, seven kernels


def test_bfloat16_is_loaded_as_such(wide):
  _, masters = weights.load("hf", wide)
  _, copy = weights.load("hf", wide, dtype="bfloat16")
  for one, other in zip(
    jax.tree.leaves(masters), jax.tree.leaves(copy), strict=True
  ):
    assert (one.dtype, other.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(one, other.astype(jnp.float32))


def test_masters_are_rounded_to_the_nearest(folder):
  _, copy = weights.load("hf", folder, dtype="bfloat16", vocab_multiple=1)
  table = safetensors.torch.load_file(folder / "model.safetensors")
  expected = table["lm_head.weight"].to(torch.bfloat16).float().numpy()
  np.testing.assert_array_equal(
    copy["head"]["embedding"].astype(jnp.float32), expected
  )


@pytest.mark.parametrize("shape", [(1, 1), (1, 8)])
@pytest.mark.parametrize(
  ("multiple", "rows"), [(1, 97), (8, 104), (128, 128), (256, 256)]
)
def test_padded_rows_are_zero(wide, multiple, rows, shape):
  if rows == 97 and shape == (1, 8):
    return
  mesh = sharding.mesh(*shape)
  backbone, params = weights.load(
    "hf", wide, mesh=mesh, vocab_multiple=multiple
  )
  assert (backbone.vocab_size, backbone.table_rows) == (97, rows)
  theirs = {}
  for path in wide.glob("*.safetensors"):
    theirs |= safetensors.torch.load_file(path)
  for leaf, name in [("embed", "model.embed_tokens"), ("head", "lm_head")]:
    table = np.asarray(params[leaf]["embedding"])
    assert table.shape == (rows, 32)
    np.testing.assert_array_equal(
      table[:97], theirs[f"{name}.weight"].float().numpy()
    )
    assert not table[97:].any()


def test_a_draw_is_padded_with_zeros():
  key = jax.random.key(0)
  _, params = weights.load("random", "", key, vocab_multiple=768)
  table = np.asarray(params["embed"]["embedding"])
  assert table.shape == (768, 64)
  assert table[:512].any(1).all()
  assert not table[512:].any()


@pytest.mark.parametrize("shape", [(1, 1), (4, 2)])
def test_progress_ends_at_its_total(wide, monkeypatch, shape):
  seen = []

  def progress(what, total):
    seen.append(total)
    return real(what, total)

  real = weights.progress
  monkeypatch.setattr(weights, "progress", progress)
  advanced = []
  monkeypatch.setattr(
    weights.rich.progress.Progress,
    "advance",
    lambda self, task, size: advanced.append(size),
  )
  _, params = weights.load("hf", wide, mesh=sharding.mesh(*shape))
  shares = sum(
    len({str(shard.index) for shard in leaf.addressable_shards})
    * leaf.addressable_shards[0].data.nbytes
    for leaf in jax.tree.leaves(params)
  )
  assert seen == [sum(advanced)] == [shares]
  assert len(advanced) > 3 * math.prod(shape)


def test_progress_shows_on_a_terminal_only(wide, capsys, monkeypatch):
  weights.load("hf", wide)
  assert capsys.readouterr().err == ""
  monkeypatch.setenv("FORCE_COLOR", "1")
  weights.load("hf", wide)
  assert "Reading" in capsys.readouterr().err
