"""Episodes to imitate: segments of text, chats, or what a run has saved.

    {"id": "a", "segments": [{"text": "2 + 2 =", "own": false},
                             {"text": " 4<|im_end|>", "own": true}]}
    {"id": "b", "messages": [{"role": "user", "content": "2 + 2 = ?"},
                             {"role": "assistant", "content": "4"}]}

Own tokens are those that the policy is to write. A saved episode brings its ids
and its mask, and nothing is encoded again.
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from sesa_jax import metrics, types
from sesa_jax.data import lines
from sesa_jax.policy import tokenizer as tokenizer_lib

ROLES = ("system", "user", "assistant", "tool")
_SAVED = (  # the way out
  "Give what a run wrote with this tokenizer, or its text in 'segments'."
)
_Pieces = list[tuple[str, bool]]  # text, and whether it is the policy's own


@dataclasses.dataclass(frozen=True)
class Found:
  """What files held."""

  episodes: tuple[types.Episode, ...]
  left_out: int = 0  # saved episodes of another arm, or not right
  too_long: int = 0
  longest: int = 0  # tokens, of all that were asked for


def read(
  paths: Sequence[str],
  words: Any,
  *,
  ids: int,
  arms: Sequence[str] = ("solver",),
  only_right: bool = True,
  max_tokens: int | None = None,
) -> Found:
  """Reads episodes, and encodes those that are text, once.

  Segments are encoded apart, as an engine does with prompts, turns and
  observations; what a tokenizer takes for a special token becomes one. A chat
  is rendered by the tokenizer's template; own are the assistant's turns with
  the token that ends each. Nothing predicts an episode's first token, so it is
  never own.

  Args:
    paths: JSONL files, episode files of runs (.jsonl.zst) or runs' folders.
    words: the tokenizer.
    ids: that the weights have rows for.
    arms: of saved episodes, those that are taken.
    only_right: of them, those alone whose verdict is right; for the challenger,
      whose question is valid.
    max_tokens: longer episodes are left out, and counted.

  Raises:
    ValueError: a path is neither; the file, line and key of a fault; saved ids
      are of another tokenizer; or nothing is left.
  """
  known = 1 + max(words.get_vocab().values())  # tables may have more rows
  kept: list[types.Episode] = []
  left_out = 0
  for path in lines.files(paths):
    texts: list[tuple[str, str, _Pieces]] = []  # where, id, pieces
    seen = False  # a saved episode of this file
    for where, row in lines.objects(path):
      if "ids" in row:
        _check_saved(row, where, None if seen else words, ids)
        seen = True
        if _wanted(row, arms, only_right):
          kept.append(_saved(row, where, known))
        else:
          left_out += 1
        continue
      pieces = _pieces(row, where, words)
      texts.append((where, row["id"], pieces))
    kept += _encoded(texts, words)
  longest = max((len(e.ids) for e in kept), default=0)
  fitting = [e for e in kept if not max_tokens or len(e.ids) <= max_tokens]
  found = Found(tuple(fitting), left_out, len(kept) - len(fitting), longest)
  if not kept and not left_out:
    raise ValueError(
      f"--episodes={','.join(paths)} holds no episode. Give one a line; "
      "docs/sft.md has the formats."
    )
  if not fitting:
    raise ValueError(
      f"No episode is left of {', '.join(paths)}: {found.too_long} are longer "
      f"than {max_tokens} tokens, {left_out} saved ones are of another arm "
      f"than {', '.join(arms)}" + (" or not right." if only_right else ".")
    )
  return found


# --- text --------------------------------------------------------------------


def _pieces(row: Mapping[str, Any], where: str, words: Any) -> _Pieces:
  forms = {"segments": _segments, "messages": _chat}
  form = next((name for name in forms if name in row), None)
  if form is None:
    raise ValueError(
      f"{where}: an episode has 'segments', 'messages' or, saved by a run, "
      f"'ids'; this has {', '.join(map(repr, row)) or 'no key'}."
    )
  for key in row:
    if key not in ("id", form):
      raise ValueError(f"{where}, key {key!r}: unknown. Keys: id, {form}.")
  if not isinstance(row.get("id"), str):
    raise ValueError(f"{where}, key 'id': {row.get('id')!r} is no string.")
  parts = row[form]
  if not isinstance(parts, list) or not parts:
    raise ValueError(f"{where}, key {form!r}: a list of at least one object.")
  return forms[form](parts, where, words)


def _segments(parts: Sequence[Any], where: str, words: Any) -> _Pieces:
  del words
  keys = {"text": str, "own": bool}
  for number, part in enumerate(parts):
    _check_object(part, keys, f"{where}, key 'segments', number {number}")
  return [(part["text"], part["own"]) for part in parts]


def _check_object(part: Any, keys: Mapping[str, type], where: str) -> None:
  if not isinstance(part, dict):
    raise ValueError(f"{where}: {part!r} is no object.")
  for key in (*keys, *part):
    if key not in keys:
      raise ValueError(
        f"{where}, key {key!r}: unknown. Keys: {', '.join(keys)}."
      )
    if not isinstance(part.get(key), keys[key]):
      raise ValueError(
        f"{where}, key {key!r}: {part.get(key)!r} is no {keys[key].__name__}."
      )
    lone = re.search("[\ud800-\udfff]", str(part[key]))
    if lone:
      raise ValueError(
        f"{where}, key {key!r}: {lone[0]!r} is half of a character, which "
        "cannot be encoded. Write the whole character, or remove it."
      )


def _chat(parts: Sequence[Any], where: str, words: Any) -> _Pieces:
  place = f"{where}, key 'messages'"
  for number, part in enumerate(parts):
    _check_object(
      part, {"role": str, "content": str}, f"{place}, number {number}"
    )
    if part["role"] not in ROLES:
      raise ValueError(
        f"{place}, number {number}, key 'role': {part['role']!r} is none of "
        f"{', '.join(ROLES)}."
      )
  if parts[0]["role"] == "assistant":
    raise ValueError(f"{place}: the assistant cannot begin a chat.")
  if not words.chat_template:
    raise ValueError(
      f"{place}: the tokenizer has no chat template. Give segments."
    )
  ends = words.convert_ids_to_tokens(tokenizer_lib.end_ids(words))
  try:
    return _turns(parts, words, ends, place)
  except jinja2.TemplateError as error:
    said = " ".join(str(error).split())
    raise ValueError(f"{place}: the chat template fails: {said}.") from error


def _turns(parts, words, ends, place) -> _Pieces:
  """Cuts a rendered chat where turns of the assistant begin and end."""

  def render(count: int, **options: Any) -> str:
    return words.apply_chat_template(parts[:count], tokenize=False, **options)

  text = render(len(parts))
  pieces, done = [], 0
  for number, part in enumerate(parts):
    if part["role"] != "assistant":
      continue
    # As prompts are rendered; but of a model that thinks, some templates drop
    # the empty thought of a turn that others follow.
    heads = (
      render(number, add_generation_prompt=True, **options)
      for options in ({"enable_thinking": False}, {})
    )
    head = next((h for h in heads if text.startswith(h)), None)
    if head is None:
      raise ValueError(
        f"{place}: the chat template renders what stands before message "
        f"{number} otherwise once others follow. Give segments."
      )
    own = text[len(head) :]
    sizes = [own.index(end) + len(end) for end in ends if end in own]
    stop = len(head) + min(sizes, default=len(own))
    pieces += [(text[done : len(head)], False), (text[len(head) : stop], True)]
    done = stop
  return [*pieces, (text[done:], False)]


def _encoded(texts, words) -> Iterator[types.Episode]:
  """Encodes all pieces at once, which is many times faster than one by one."""
  flat = [text for *_, pieces in texts for text, _ in pieces]
  encoded = iter(
    words.backend_tokenizer.encode_batch(flat, add_special_tokens=False)
  )
  for where, name, pieces in texts:
    parts = [(next(encoded).ids, own) for _, own in pieces]
    yield _episode(
      where,
      name,
      np.concatenate([np.asarray(part, np.int32) for part, _ in parts]),
      np.repeat([own for _, own in parts], [len(part) for part, _ in parts]),
    )


def _episode(where, name, found, mask) -> types.Episode:
  """Checks the mask, and makes an episode."""
  mask = np.array(mask, bool)
  mask[:1] = False
  if not mask.any():
    raise ValueError(
      f"{where}: no token is the policy's own, or only the first, which "
      "nothing predicts."
    )
  return types.Episode(
    request_id=name,
    attempt=0,
    arm="",
    ids=found,
    prompt_length=int(np.argmax(mask)),
    mask=mask,
    logprobs=np.broadcast_to(np.float32(0), found.shape),
    turns=(),
    finish="",
  )


# --- saved episodes ----------------------------------------------------------


def _check_saved(
  row: Mapping[str, Any], where: str, words: Any, ids: int
) -> None:
  """Refuses a row that no run has saved, or one with another tokenizer."""
  if row.get("schema") != metrics.SCHEMA:
    raise ValueError(
      f"{where}, key 'schema': {row.get('schema')}; this version reads "
      f"{metrics.SCHEMA}."
    )
  for key in ("arm", "request_id", "mask", "prompt_length"):
    if key not in row:
      raise ValueError(f"{where}, key {key!r}: missing.")
  _check_integers(row, "ids", where, ids, "for which the weights have rows")
  _check_integers(row, "mask", where, 2, "or of bools", (int, bool))
  if len(row["mask"]) != len(row["ids"]):
    raise ValueError(f"{where}, key 'mask': it is not as long as 'ids'.")
  start = row["prompt_length"]
  if type(start) is not int or not 0 <= start <= len(row["ids"]):
    raise ValueError(
      f"{where}, key 'prompt_length': {start!r} is none of 0 to "
      f"{len(row['ids'])}, the length of 'ids'. {_SAVED}"
    )
  if words is None or "prompt" not in row:
    return
  prompt = row["ids"][:start]
  if words.decode(prompt, skip_special_tokens=False) != row["prompt"]:
    raise ValueError(
      f"{where}: its ids do not decode to its prompt: they are of another "
      "tokenizer than policy.path's."
    )


def _check_integers(
  row: Mapping[str, Any],
  key: str,
  where: str,
  end: int,
  which: str,
  kinds: Sequence[type] = (int,),
) -> None:
  """Refuses what is no list of integers from 0 on, below `end`."""
  values = row[key]
  wrong = [values]
  if isinstance(values, list):
    wrong = [v for v in values if type(v) not in kinds or not 0 <= v < end]
  if wrong:
    raise ValueError(
      f"{where}, key {key!r}: {reprlib.repr(wrong[0])}; it is a list of "
      f"integers from 0 to {end - 1}, {which}. {_SAVED}"
    )


def _wanted(
  row: Mapping[str, Any], arms: Sequence[str], only_right: bool
) -> bool:
  if row["arm"] not in arms or not any(row["mask"]):  # lost before a token
    return False
  right = row.get("verdict") == "right" or row.get("state") == "valid"
  return right or not only_right


def _saved(row: Mapping[str, Any], where: str, known: int) -> types.Episode:
  _check_integers(row, "ids", where, known, "which the tokenizer has")
  found = np.asarray(row["ids"], np.int32)
  return _episode(where, row["request_id"], found, row["mask"])
