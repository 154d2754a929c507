"""Tokenizers, all byte-level BPE, all as transformers' fast tokenizer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from sesa_jax.policy import weights

# Tokens at which a model ends its turn, in the families that are implemented.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")

_CHATML = (
  "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
  "{{ message['content'] }}<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TINY_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_TINY_TEXT = """
<think>the question asks for a person</think>
<search>who wrote the book</search>
<information>Doc 1 (Title: "The book") It was written in the city.</information>
<question>What is the name of the river in the north of the country?</question>
<answer>the answer is the capital</answer>
system user assistant question answer search information think
Answer the given question. You must conduct reasoning first every time you get
new information. If you find you lack some knowledge, you can call a search
engine, and it will return the top results. You can search as many times as you
want. If you find no further knowledge needed, provide the answer, without
detailed illustrations. For example, Where was the author born? When did the
first war end? Which of these states has more people than the other one?
Skills that may help: when the question names two places, search for each of
them before you compare; do not trust the first result, because names repeat.
The passages were found, the evidence tells right from wrong, and so on.
"""


def load(source: str, path: str | Path) -> PreTrainedTokenizerFast:
  """Loads the tokenizer that belongs to a policy's weights.

  Args:
    source: "hf", "gguf" or "random" (without a path: `tiny`).
    path: as `weights.load`.

  Raises:
    ValueError: the source is unknown, or the files do not hold a tokenizer.
  """
  if source == "random" and not path:
    return tiny()
  if source in ("hf", "random"):
    return _load_hf(Path(path))
  if source == "gguf":
    return _load_gguf(path)
  raise ValueError(
    f"Unknown policy.source {source!r}. Choices: {', '.join(weights.SOURCES)}."
  )


def tiny() -> PreTrainedTokenizerFast:
  """Trains the 512-id tokenizer of tests: 4 special, 256 bytes, 252 merges."""
  tokenizer = _byte_level(models.BPE())
  trainer = BpeTrainer(
    vocab_size=512,
    min_frequency=1,
    special_tokens=list(_TINY_SPECIALS),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(_TINY_TEXT.splitlines(), trainer)
  return PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    eos_token="<|im_end|>",
    pad_token="<|pad|>",
    chat_template=_CHATML,
    model_max_length=4096,
    clean_up_tokenization_spaces=False,
  )


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
  """Returns the bytes of each id; special tokens, and unused ids, have none.

  Bytes, not text: an id may hold part of a character.

  Raises:
    ValueError: a token is not byte-level.
  """
  added = tokenizer.added_tokens_decoder
  byte_of = _byte_of_character()
  vocab = tokenizer.get_vocab()
  # Not its size: ids may have gaps.
  table = [b""] * (max(vocab.values(), default=-1) + 1)
  for token, index in vocab.items():
    if index in added:
      table[index] = b"" if added[index].special else token.encode()
      continue
    if not all(character in byte_of for character in token):
      raise ValueError(
        f"Token {index}, {token!r}, is not byte-level; only byte-level BPE "
        "tokenizers are implemented."
      )
    table[index] = bytes(byte_of[character] for character in token)
  return table


def end_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
  """Returns the ids that end a turn, in ascending order."""
  vocab = tokenizer.get_vocab()
  ends = {vocab[token] for token in _TURN_ENDS if token in vocab}
  if tokenizer.eos_token_id is not None:
    ends.add(tokenizer.eos_token_id)
  return tuple(sorted(ends))


def _load_hf(folder: Path) -> PreTrainedTokenizerFast:
  parts = weights.read_json(folder / "tokenizer.json")
  weights.read_json(folder / "tokenizer_config.json")
  for name, kind in (("model", dict), ("added_tokens", list)):
    if not isinstance(parts.get(name), kind):
      raise ValueError(
        f"{folder / 'tokenizer.json'} has no {name!r}, so it is no tokenizer; "
        "fetch the file anew."
      )
  # Not AutoTokenizer: its classes build some of the parts anew from the
  # vocabulary, while tokenizer.json is what the model was trained with.
  return PreTrainedTokenizerFast.from_pretrained(
    folder,
    local_files_only=True,
    # Some folders ask for it; text would then not be what its ids say.
    clean_up_tokenization_spaces=False,
  )


def _load_gguf(path: str | Path) -> PreTrainedTokenizerFast:
  metadata = weights.read_gguf(path).metadata
  names = (
    "model pre tokens token_type merges eos_token_id padding_token_id"
  ).split()
  missing = [n for n in names if f"tokenizer.ggml.{n}" not in metadata]
  if missing:
    raise ValueError(f"{path} lacks tokenizer.ggml.{missing[0]}.")
  kind, split, tokens, types, merges, eos, pad = (
    metadata[f"tokenizer.ggml.{name}"] for name in names
  )
  if (kind, split) != ("gpt2", "smollm"):
    raise ValueError(
      f"{path}: tokenizer {kind!r} with pre-tokenizer {split!r} is not "
      "implemented; only 'gpt2' with 'smollm' is."
    )
  vocab = {token: index for index, token in enumerate(tokens)}
  pairs = [tuple(merge.split(" ", 1)) for merge in merges]
  tokenizer = _byte_level(models.BPE(vocab=vocab, merges=pairs))
  control = 3  # of GGUF's token types
  tokenizer.add_special_tokens(
    [
      AddedToken(token, special=True, normalized=False)
      for token, type_ in zip(tokens, types, strict=True)
      if type_ == control
    ]
  )
  return PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    eos_token=tokens[eos],
    pad_token=tokens[pad],
    chat_template=metadata.get("tokenizer.chat_template"),
    model_max_length=metadata["llama.context_length"],
    clean_up_tokenization_spaces=False,
  )


def _byte_level(bpe: models.BPE) -> Tokenizer:
  """Splits digits singly, then as GPT-2 does; maps bytes to characters."""
  tokenizer = Tokenizer(bpe)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer


def _byte_of_character() -> dict[str, int]:
  """Inverts byte-level BPE's alphabet.

  Printable Latin-1 bytes stand for themselves, the others, in order, for the
  characters from U+0100 on. Source: Radford et al. 2019, GPT-2.
  """
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = sorted(set(range(256)) - set(printable))
  return {chr(byte): byte for byte in printable} | {
    chr(0x100 + rank): byte for rank, byte in enumerate(others)
  }
