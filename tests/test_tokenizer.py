import functools
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from sesa_jax import prompts, types
from sesa_jax.learner import packing
from sesa_jax.policy import backbones, model, tokenizer

SMOLLM2 = (
  pathlib.Path(
    os.environ.get("SESA_JAX_ASSETS", "~/.cache/sesa_jax")
  ).expanduser()
  / "smollm2-135m-instruct"
  / "SmolLM2-135M-Instruct.Q4_1.gguf"
)
MIXED = (
  "In 1987, 42 of 3.14159 people wrote <search>naïve café</search>\n\n\t"
  "They'd say “日本語” or Ελλάδα 🎉👩‍👩‍👧; x_1==y**2  \r\n"
  "<|im_start|>user\nHi<|im_end|>\n"
)


@pytest.fixture(scope="module")
def tiny():
  return tokenizer.tiny()


def test_tiny_has_512_ids_in_the_order_of_its_sections(tiny):
  assert len(tiny) == 512
  table = tokenizer.token_bytes(tiny)
  assert table[:4] == [b""] * 4
  assert sorted(table[4:260]) == [bytes([byte]) for byte in range(256)]
  assert min(map(len, table[260:])) == 2
  assert len(set(table[4:])) == 508


def test_tiny_is_the_same_in_every_process(tiny):
  """The ids of saved episodes depend on it; a change is a new format."""
  text = json.dumps(tiny.convert_ids_to_tokens(range(512)))
  digest = hashlib.sha256(text.encode()).hexdigest()
  assert digest == (
    "3a879094c50076301013d36dd429ddafd9b0d914203c0b22cf352da7fa6b618c"
  )
  code = (
    "import hashlib, json; from sesa_jax.policy import tokenizer as t;"
    "s = json.dumps(t.tiny().convert_ids_to_tokens(range(512)));"
    "print(hashlib.sha256(s.encode()).hexdigest())"
  )
  root = pathlib.Path(tokenizer.__file__).parents[2]
  for threads in "1", "2":
    printed = subprocess.run(
      [sys.executable, "-c", code],
      env=os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONPATH": str(root)},
      capture_output=True,
      text=True,
      check=True,
    ).stdout
    assert printed.strip() == digest


@given(st.text())
def test_bytes_of_ids_are_the_text(tiny, text):
  table = tokenizer.token_bytes(tiny)
  ids = tiny.encode(text, add_special_tokens=False)
  # Text that spells a special token becomes that token, which has no bytes.
  if not set(ids) & set(range(4)):
    assert b"".join(table[i] for i in ids) == text.encode()
    assert tiny.decode(ids) == text


def test_tags_are_several_tokens(tiny):
  for tag in "<search>", "</search>", "<answer>", "</answer>", "</question>":
    assert len(tiny.encode(tag)) > 1


def test_tiny_renders_a_chat(tiny):
  chat = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?"},
  ]
  text = tiny.apply_chat_template(
    chat, tokenize=False, add_generation_prompt=True
  )
  assert text == (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
  )
  ids = tiny.encode(text)
  assert ids.count(1) == 3
  assert ids.count(2) == 2


def test_turns_end_at_their_marks(tiny):
  assert tokenizer.end_ids(tiny) == (0, 2)
  assert tiny.eos_token_id == 2
  assert tiny.pad_token_id == 3


def test_a_saved_folder_loads_as_itself(tiny, tmp_path):
  tiny.save_pretrained(tmp_path)
  again = tokenizer.load("hf", str(tmp_path))
  assert again.encode(MIXED) == tiny.encode(MIXED)
  assert again.chat_template == tiny.chat_template
  assert tokenizer.token_bytes(again) == tokenizer.token_bytes(tiny)
  assert tokenizer.end_ids(again) == (0, 2)


def test_a_folder_never_cleans_text_up(tiny, tmp_path):
  tiny.save_pretrained(tmp_path)
  path = tmp_path / "tokenizer_config.json"
  asked = json.loads(path.read_text()) | {"clean_up_tokenization_spaces": True}
  path.write_text(json.dumps(asked))
  again = tokenizer.load("hf", str(tmp_path))
  assert again.clean_up_tokenization_spaces is False
  assert again.decode(again.encode("It 's here .")) == "It 's here ."


@pytest.mark.parametrize("pad", [None, "<|im_end|>"])
def test_a_missing_pad_token_changes_nothing(tiny, pad):
  """Some families have none, or pad with the token that ends a turn."""
  other = tokenizer.tiny()
  other.pad_token = pad
  assert tokenizer.end_ids(other) == tokenizer.end_ids(tiny)
  assert tokenizer.token_bytes(other) == tokenizer.token_bytes(tiny)
  for template in prompts.TEMPLATES:
    prompt = prompts.solver("Who?")
    assert prompts.render(other, prompt, template) == prompts.render(
      tiny, prompt, template
    )


def test_padding_never_hides_a_real_end(tiny):
  """Rows are filled with id 0, which also ends a turn: masks tell which is."""
  ids = [1, 40, 0, 41, 42, 0]
  assert 0 in tokenizer.end_ids(tiny)
  graphdef = model.build(backbones.tiny())
  params = model.init(backbones.tiny(), jax.random.key(0))
  forward = jax.jit(
    functools.partial(model.hidden, compute_dtype="float32", remat=False),
    static_argnums=0,
  )

  def hidden(ids, length, filling=0):
    episode = types.Episode(
      request_id="q",
      attempt=0,
      arm="solver",
      ids=np.array(ids, np.int32),
      prompt_length=1,
      mask=np.arange(len(ids)) > 0,
      logprobs=np.zeros(len(ids), np.float32),
      turns=(),
      finish="answer",
    )
    lesson = types.Lesson(episode, 1.0)
    (batch,) = packing.pack(
      [(0, lesson)],
      rows=1,
      row_multiple=length,
      loss="grpo",
      most_tokens=10,
      packed=False,
    )
    batch.ids[batch.segments == 0] = filling
    return np.asarray(forward(graphdef, params, *batch[:3])[0, : len(ids)])

  alone, padded = hidden(ids, len(ids)), hidden(ids, 16)
  np.testing.assert_allclose(padded, alone, atol=1e-6)
  np.testing.assert_array_equal(hidden(ids, 16, filling=7), padded)
  # A real end is read like any other token, also by those after it.
  changed = hidden([1, 40, 43, 41, 42, 0], 16)
  assert (np.abs(changed - padded).max(-1) > 1e-3).tolist() == [
    False,
    False,
    True,
    True,
    True,
    True,
  ]


def test_added_tokens_that_are_not_special_keep_their_bytes():
  ours = tokenizer.tiny()
  ours.add_tokens(["<tool é>"])
  assert tokenizer.token_bytes(ours)[512] == "<tool é>".encode()


def test_ids_may_have_gaps():
  bpe = tokenizers.models.BPE(vocab={"a": 0, "b": 5}, merges=[])
  words = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(bpe))
  assert tokenizer.token_bytes(words) == [b"a", *[b""] * 4, b"b"]


def test_every_family_s_turns_end():
  """At the marks of their published templates, whatever `eos_token` says."""
  for mark in "<|eot_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>":
    bpe = tokenizers.models.BPE(vocab={"a": 0, mark: 1}, merges=[])
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(bpe))
    assert tokenizer.end_ids(words) == (1,), mark


@pytest.mark.parametrize("part", ["model", "added_tokens"])
def test_a_file_that_is_no_tokenizer_is_named(tiny, tmp_path, part):
  tiny.save_pretrained(tmp_path)
  path = tmp_path / "tokenizer.json"
  parts = json.loads(path.read_text())
  del parts[part]
  for content in parts, {}:
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer\.json has no '"):
      tokenizer.load("hf", tmp_path)


def test_what_is_not_byte_level_is_an_error():
  word = tokenizers.Tokenizer(tokenizers.models.WordLevel({"中": 0}, "中"))
  with pytest.raises(ValueError, match="not byte-level"):
    tokenizer.token_bytes(PreTrainedTokenizerFast(tokenizer_object=word))


def test_missing_files_are_named(tmp_path):
  with pytest.raises(ValueError, match=r"lacks tokenizer\.json"):
    tokenizer.load("hf", str(tmp_path))
  with pytest.raises(ValueError, match="is not a file"):
    tokenizer.load("gguf", str(tmp_path / "nowhere.gguf"))
  with pytest.raises(ValueError, match="Choices: hf, gguf, random"):
    tokenizer.load("hub", "")


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason="SmolLM2 is not fetched")
def test_smollm2_has_the_ids_of_transformers():
  ours = tokenizer.load("gguf", str(SMOLLM2))
  theirs = transformers.AutoTokenizer.from_pretrained(
    SMOLLM2.parent, gguf_file=SMOLLM2.name
  )
  assert len(ours) == 49152
  assert ours.encode(MIXED) == theirs.encode(MIXED)
  assert tokenizer.end_ids(ours) == (0, 2)
  table = tokenizer.token_bytes(ours)
  plain = MIXED.replace("<|im_start|>", "").replace("<|im_end|>", "")
  assert b"".join(table[i] for i in ours.encode(MIXED)) == plain.encode()
