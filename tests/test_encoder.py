from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from sesa_jax.retrieval import encoder

WORDS = "what river flows through the old town and which one is longer".split()
TEXTS = [
  "what river flows",
  "the old town",
  "",
  "which one is longer and which one is the old one",
  "river town " * 40,  # longer than the model: truncated
]


def tiny_tokenizer() -> tokenizers.Tokenizer:
  vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, "query", ":"]
  tokenizer = tokenizers.Tokenizer(
    models.WordPiece(
      {word: i for i, word in enumerate(dict.fromkeys(vocabulary))},
      unk_token="[UNK]",
    )
  )
  tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
  tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  tokenizer.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
  )
  # As MiniLM's file has it: both must be overridden on loading.
  tokenizer.enable_truncation(5)
  tokenizer.enable_padding(length=5)
  return tokenizer


def torch_embeddings(folder: Path, texts: list[str], length: int) -> np.ndarray:
  """Mean pooling over transformers' BertModel, one text at a time."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  model = transformers.BertModel.from_pretrained(folder).eval()
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  tokenizer.no_padding()
  tokenizer.enable_truncation(length)
  rows = []
  for text in texts:
    ids = torch.tensor([tokenizer.encode(text).ids])
    with torch.no_grad():
      mean = model(input_ids=ids).last_hidden_state[0].mean(0)
    rows.append((mean / mean.norm()).numpy())
  return np.stack(rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  folder = tmp_path_factory.mktemp("bert")
  torch.manual_seed(0)
  config = transformers.BertConfig(
    vocab_size=20,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=40,
    initializer_range=0.5,
  )
  transformers.BertModel(config).save_pretrained(folder)
  tiny_tokenizer().save(str(folder / "tokenizer.json"))
  return folder


@pytest.fixture
def copy(folder, tmp_path):
  return Path(shutil.copytree(folder, tmp_path / "bert"))


def load(folder):
  return encoder.load(folder, query_prefix="query: ", passage_prefix="")


def test_random_bert_equals_transformers(folder):
  ours = load(folder).encode(TEXTS, "passage")
  theirs = torch_embeddings(folder, TEXTS, 40)
  assert ours.dtype == np.float32
  np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_prefix_belongs_to_the_kind(folder):
  """In the cache, too."""
  bert = load(folder)
  bert.encode(["the old town"], "passage")
  ours = bert.encode(["the old town"], "query")
  theirs = torch_embeddings(folder, ["query: the old town"], 40)
  np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_length_of_sentence_bert_config(copy):
  path = copy / "sentence_bert_config.json"
  path.write_text(json.dumps({"max_seq_length": 6}))
  ours = load(copy).encode([TEXTS[3]], "passage")
  theirs = torch_embeddings(copy, [TEXTS[3]], 6)
  np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_same_bytes_in_any_company(folder):
  alone = [load(folder).encode([text], "passage")[0] for text in TEXTS]
  together = load(folder).encode(TEXTS * 2 + ["river", "town"] * 9, "passage")
  for i, row in enumerate(alone):
    assert row.tobytes() == together[i].tobytes()
    assert row.tobytes() == together[i + len(TEXTS)].tobytes()


def test_cache_spares_the_forward_and_stays_bounded(folder, monkeypatch):
  bert = load(folder)
  bert._cache_texts = 3
  first = bert.encode(TEXTS, "passage")
  assert len(bert._cache) == 3
  monkeypatch.setattr(bert, "_forward", None)  # any call of it would fail
  np.testing.assert_array_equal(bert.encode(TEXTS[2:], "passage"), first[2:])
  assert bert.encode([], "query").shape == (0, 32)


def test_bad_folders(copy, tmp_path):
  with pytest.raises(ValueError, match=r"has no config\.json"):
    load(tmp_path / "nowhere")
  config = json.loads((copy / "config.json").read_text())

  def rewrite(**changes):
    (copy / "config.json").write_text(json.dumps({**config, **changes}))

  rewrite(hidden_act="relu")
  with pytest.raises(ValueError, match="hidden_act is 'relu'"):
    load(copy)
  rewrite(num_hidden_layers=3)
  with pytest.raises(ValueError, match=r"expected encoder\.layer\.2"):
    load(copy)
  rewrite(intermediate_size=49)
  with pytest.raises(ValueError, match=r"shape \(49, 32\), found \(48, 32\)"):
    load(copy)
  (copy / "config.json").write_text('{"model_type": "bert"}')
  with pytest.raises(ValueError, match="lacks hidden_size, "):
    load(copy)
  rewrite()
  (copy / "model.safetensors").write_bytes(b"\xff" * 64)
  with pytest.raises(ValueError, match="not a readable safetensors"):
    load(copy)
  (copy / "tokenizer.json").write_text("{")
  with pytest.raises(ValueError, match=r"tokenizer\.json is not readable"):
    load(copy)


def test_unknown_kind_lists_the_choices():
  with pytest.raises(ValueError, match="'skill'.*query, passage"):
    encoder.HashEncoder(4).encode(["a"], "skill")


def test_hash_encoder_counts_words():
  embed = encoder.HashEncoder(512).encode
  a, b, c, empty = embed(["Old town", "town, old!", "old", ""], "passage")
  assert a.tobytes() == b.tobytes()
  # Words that say nothing about a text do not count.
  d, common = embed(
    ["It is the old town, and that is it.", "It is the"], "query"
  )
  assert a.tobytes() == d.tobytes()
  assert common.tobytes() == empty.tobytes()
  np.testing.assert_allclose(a @ c, np.sqrt(0.5), atol=1e-6)
  np.testing.assert_array_equal(empty, np.eye(1, 512)[0])
  # Pins the hash: another one would change every tiny run.
  assert np.flatnonzero(c).tolist() == [380]


@pytest.mark.slow
def test_minilm_equals_transformers_on_real_text():
  assets = Path(
    os.environ.get("SESA_JAX_ASSETS", Path.home() / ".cache" / "sesa_jax")
  )
  folder = assets / "all-minilm-l6-v2"
  if not (folder / "model.safetensors").is_file():
    pytest.skip("all-minilm-l6-v2 is not in the assets folder")
  seeds = Path(encoder.__file__).parents[1] / "skills" / "seeds.jsonl"
  skills = [json.loads(line) for line in seeds.read_text().splitlines()]
  texts = [f"{s['description']} {s['trigger']}" for s in skills]
  texts += [skill["category"] for skill in skills]
  texts += [" ".join(texts * 2)]  # over 512 tokens
  bert = encoder.load(folder, query_prefix="", passage_prefix="")
  ours = bert.encode(texts, "passage")
  theirs = torch_embeddings(folder, texts, 512)
  assert (ours * theirs).sum(1).min() >= 0.99999
  assert len(texts) == 31
  again = encoder.load(folder, query_prefix="", passage_prefix="")
  assert again.encode(texts[4:5], "query").tobytes() == ours[4:5].tobytes()
