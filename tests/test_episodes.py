"""Episodes to imitate: what is read of files, and what is refused."""

import json

import numpy as np
import pytest

from sesa_jax import metrics, types
from sesa_jax.data import episodes
from sesa_jax.policy import tokenizer

WORDS = tokenizer.tiny()


def encode(text):
  return WORDS.encode(text, add_special_tokens=False)


def write(path, *rows):
  path.write_text("\n".join(map(json.dumps, rows)) + "\n")
  return str(path)


def segments(*parts, name="a"):
  return {
    "id": name,
    "segments": [{"text": text, "own": own} for text, own in parts],
  }


def chat(*turns, name="a"):
  return {
    "id": name,
    "messages": [{"role": r, "content": c} for r, c in turns],
  }


def read(*paths, **options):
  return episodes.read(list(paths), WORDS, ids=512, **options)


def own_text(episode):
  return WORDS.decode(episode.ids[episode.mask], skip_special_tokens=False)


def test_segments_are_encoded_apart(tmp_path):
  # Together the two would be merged over their border.
  parts = [("the sea", False), ("rch<|im_end|>", True), ("the", False)]
  assert encode("the search") != encode("the sea") + encode("rch")
  found = read(write(tmp_path / "a.jsonl", segments(*parts, name="x")))
  (episode,) = found.episodes
  sizes = [len(encode(text)) for text, _ in parts]
  assert episode.ids.tolist() == sum((encode(t) for t, _ in parts), [])
  assert episode.ids.dtype == np.int32
  assert episode.mask.tolist() == (
    [False] * sizes[0] + [True] * sizes[1] + [False] * sizes[2]
  )
  assert episode.request_id == "x"
  assert episode.ids[episode.mask][-1] == WORDS.eos_token_id
  assert (found.left_out, found.too_long) == (0, 0)


def test_files_and_lines_keep_their_order(tmp_path):
  one = write(
    tmp_path / "1.jsonl",
    segments(("the", False), ("city", True), name="1"),
    chat(("user", "the"), ("assistant", "city"), name="2"),
  )
  two = write(tmp_path / "2.jsonl", segments(("a b", True), name="3"))
  found = read(two, one)
  assert [e.request_id for e in found.episodes] == ["3", "1", "2"]


def test_the_first_token_is_never_own(tmp_path):
  path = write(tmp_path / "a.jsonl", segments(("the city", True)))
  (episode,) = read(path).episodes
  assert episode.mask.tolist() == [False] + [True] * (len(episode.ids) - 1)


def test_a_chat_by_hand(tmp_path):
  row = chat(
    ("system", "be brief"),
    ("user", "who"),
    ("assistant", "the city"),
    ("user", "where"),
    ("assistant", "river"),
  )
  (episode,) = read(write(tmp_path / "a.jsonl", row)).episodes
  assert WORDS.decode(episode.ids, skip_special_tokens=False) == (
    "<|im_start|>system\nbe brief<|im_end|>\n"
    "<|im_start|>user\nwho<|im_end|>\n"
    "<|im_start|>assistant\nthe city<|im_end|>\n"
    "<|im_start|>user\nwhere<|im_end|>\n"
    "<|im_start|>assistant\nriver<|im_end|>\n"
  )
  assert own_text(episode) == "the city<|im_end|>river<|im_end|>"
  # What stands before an own turn is what an engine begins with.
  head = WORDS.apply_chat_template(
    row["messages"][:2], add_generation_prompt=True, return_dict=False
  )
  assert episode.ids[: episode.prompt_length].tolist() == head


def with_template(template):
  words = tokenizer.tiny()
  words.chat_template = template
  return words


_THINKS = (  # drops the empty thought of turns that others follow
  "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
  "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
  "{{ m['content'] }}<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n"
  "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


def test_an_empty_thought_is_part_of_the_prompt(tmp_path):
  row = chat(
    ("user", "who"), ("assistant", "a"), ("user", "b"), ("assistant", "c")
  )
  path = write(tmp_path / "a.jsonl", row)
  words = with_template(_THINKS)
  (episode,) = episodes.read([path], words, ids=512).episodes
  assert own_text(episode) == "a<|im_end|>c<|im_end|>"


def test_a_turn_ends_at_its_first_end(tmp_path):
  """Not at what the template writes behind the whole chat."""
  row = chat(("user", "who"), ("assistant", "a"))
  path = write(tmp_path / "a.jsonl", row)
  end = "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
  words = with_template(WORDS.chat_template + end)
  assert {"<|im_end|>", "<|endoftext|>"} <= set(
    words.convert_ids_to_tokens(tokenizer.end_ids(words))
  )
  (episode,) = episodes.read([path], words, ids=512).episodes
  assert own_text(episode) == "a<|im_end|>"
  assert episode.ids[-1] == words.convert_tokens_to_ids("<|endoftext|>")


@pytest.mark.parametrize(
  ("template", "says"),
  [
    (None, "no chat template. Give segments"),
    ("{{ messages[7]['content'] }}", "the chat template fails: "),
    ("{{ messages | length }}", "what stands before message 1 otherwise"),
  ],
)
def test_templates_that_cannot_tell(tmp_path, template, says):
  path = write(tmp_path / "a.jsonl", chat(("user", "a"), ("assistant", "b")))
  with pytest.raises(ValueError, match=f"a.jsonl, line 1, .*{says}"):
    episodes.read([path], with_template(template), ids=512)


@pytest.mark.parametrize(
  ("row", "says"),
  [
    ([1], " holds no JSON object"),
    ({"id": "a"}, "'segments', 'messages' or, saved by a run, 'ids'; this"),
    ({"id": "a", "segments": []}, "key 'segments': a list of at least one"),
    ({"segments": [{"text": "a", "own": True}]}, "key 'id': None is no string"),
    (segments(("a", True)) | {"x": 1}, "key 'x': unknown. Keys: id, segments"),
    (segments(("a", 1)), "number 0, key 'own': 1 is no bool"),
    (segments((None, True)), "number 0, key 'text': None is no str"),
    ({"id": "a", "segments": ["a"]}, "number 0: 'a' is no object"),
    (
      {"id": "a", "segments": [{"text": "a", "own": True, "role": ""}]},
      "number 0, key 'role': unknown. Keys: text, own",
    ),
    (segments(("a b c", False)), "no token is the policy's own"),
    (chat(("user", "a"), ("bot", "b")), "number 1, key 'role': 'bot' is none"),
    (chat(("assistant", "b")), "the assistant cannot begin"),
    (chat(("user", "b")), "no token is the policy's own"),
    ({"id": "a", "messages": {}}, "key 'messages': a list"),
    (segments(("a \ud800", True)), r"'text': '.ud800' is half of a character"),
    (chat(("user", "\udfff a")), r"number 0, key 'content': '.udfff' is half"),
  ],
)
def test_faults_name_file_line_and_key(tmp_path, row, says):
  path = write(tmp_path / "a.jsonl", segments(("a b", True)), row)
  with pytest.raises(ValueError, match=f"a.jsonl, line 2.*{says}"):
    read(path)


def test_files_that_are_none(tmp_path):
  with pytest.raises(ValueError, match="--episodes=no: there is no such file"):
    read("no")
  with pytest.raises(ValueError, match="a folder without episodes"):
    read(str(tmp_path))
  (tmp_path / "a.jsonl").write_text("{\n")
  with pytest.raises(ValueError, match="a.jsonl, line 1 is not JSON"):
    read(str(tmp_path / "a.jsonl"))
  (tmp_path / "b.jsonl").write_text("\n")
  with pytest.raises(ValueError, match="b.jsonl holds no episode. Give one"):
    read(str(tmp_path / "b.jsonl"))


def test_long_episodes_are_counted(tmp_path):
  rows = [segments(("the ", False), ("a" * n, True)) for n in (1, 40, 2)]
  path = write(tmp_path / "a.jsonl", *rows)
  sizes = [len(e.ids) for e in read(path).episodes]
  found = read(path, max_tokens=sizes[2])
  assert [len(e.ids) for e in found.episodes] == [sizes[0], sizes[2]]
  assert (found.too_long, found.longest) == (1, sizes[1])
  with pytest.raises(ValueError, match="left of .*: 3 are longer than 1 tok"):
    read(path, max_tokens=1)


# --- saved by a run ----------------------------------------------------------


def saved(arm="solver", prompt="who wrote the book", **extra):
  ids = [*encode(prompt), *encode("the answer<|im_end|>"), *encode("Doc 1")]
  mask = np.zeros(len(ids), bool)
  start = len(encode(prompt))
  mask[start : start + len(encode("the answer<|im_end|>"))] = True
  episode = types.Episode(
    request_id="q",
    attempt=0,
    arm=arm,
    ids=np.asarray(ids, np.int32),
    prompt_length=start,
    mask=mask,
    logprobs=np.where(mask, -1, 0).astype(np.float32),
    turns=(),
    finish="answer",
  )
  known = {"verdict": None, "state": None} | extra

  def decode(ids):
    return WORDS.decode(ids, skip_special_tokens=False)

  return metrics.episode_row(episode, decode, **known)


def run_folder(tmp_path, *rows):
  folder = metrics.RunFolder(tmp_path / "run")
  folder.write_episodes(1, rows[:1])
  folder.write_episodes(2, rows[1:])
  return str(folder.path)


ROWS = (
  saved(verdict="right"),
  saved(verdict="wrong"),
  saved("control", verdict="right"),
  saved("challenger", state="valid"),
  saved("challenger", state="length"),
  saved("evidence"),
)


@pytest.mark.parametrize(
  ("options", "taken"),
  [
    ({}, [0]),
    ({"only_right": False}, [0, 1]),
    ({"arms": ("solver", "control")}, [0, 2]),
    ({"arms": ("challenger",)}, [3]),
    ({"arms": ("challenger",), "only_right": False}, [3, 4]),
  ],
)
def test_saved_episodes_by_arm_and_verdict(tmp_path, options, taken):
  rows = [dict(row, request_id=str(i)) for i, row in enumerate(ROWS)]
  found = read(run_folder(tmp_path, *rows), **options)
  assert [e.request_id for e in found.episodes] == list(map(str, taken))
  assert found.left_out == len(rows) - len(taken)
  for episode in found.episodes:
    assert episode.ids.tolist() == ROWS[0]["ids"]
    assert episode.mask.tolist() == list(map(bool, ROWS[0]["mask"]))


def test_a_lost_episode_teaches_nothing(tmp_path):
  lost = saved(verdict="unknown")
  lost["mask"] = [0] * len(lost["mask"])
  found = read(run_folder(tmp_path, ROWS[0], lost), only_right=False)
  assert (len(found.episodes), found.left_out) == (1, 1)


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"prompt": "who wrote a book"}, "do not decode to its prompt"),
    ({"schema": 2}, "key 'schema': 2; this version reads 1"),
    ({"mask": [1]}, "key 'mask': it is not as long"),
    ({"mask": 5}, "key 'mask': 5; it is a list of integers from 0 to 1"),
    ({"mask": ["x", 0, 1]}, "key 'mask': 'x'; it is a list"),
    ({"mask": [0, 1.0]}, "key 'mask': 1.0; it is a list"),
    ({"mask": [0, 2]}, "key 'mask': 2; it is a list"),
    ({"ids": None}, "'ids': None; it is a list of integers .*511, .*Give what"),
    ({"ids": "abc"}, "key 'ids': 'abc'; "),
    ({"ids": [1, 2.7, 3]}, "key 'ids': 2.7; "),
    ({"ids": [1, True]}, "key 'ids': True; "),
    ({"ids": [1, -1]}, "key 'ids': -1; "),
    ({"ids": [1, 512]}, "key 'ids': 512; .* 511, for which the weights have"),
    ({"ids": [99999999999]}, "key 'ids': 99999999999; "),
    ({"ids": [[1, 2], 3]}, r"key 'ids': \[1, 2\]; "),
    ({"prompt_length": "z"}, "'prompt_length': 'z' is none of 0 to 1., the"),
    ({"prompt_length": True}, "'prompt_length': True is none"),
    ({"prompt_length": -1}, "'prompt_length': -1 is none"),
    ({"prompt_length": 99}, "'prompt_length': 99 is none"),
    ({"arm": None}, ""),
  ],
)
def test_rows_that_fit_no_run_of_this_tokenizer(tmp_path, changes, says):
  row = ROWS[0] | changes
  if row["arm"] is None:
    del row["arm"]
    says = "key 'arm': missing"
  path = write(tmp_path / "a.jsonl", row)
  with pytest.raises(ValueError, match=f"a.jsonl, line 1.*{says}"):
    read(path)


def test_every_file_is_of_this_tokenizer(tmp_path):
  one = write(tmp_path / "a.jsonl", ROWS[0])
  two = write(tmp_path / "b.jsonl", ROWS[0] | {"prompt": "who wrote a book"})
  with pytest.raises(ValueError, match="b.jsonl, line 1.*do not decode to its"):
    read(one, two)


def test_ids_that_stand_for_no_text_are_not_imitated(tmp_path):
  """Weights may have more rows than the tokenizer has ids."""
  row = dict(ROWS[0], ids=[*ROWS[0]["ids"][:-1], len(WORDS)])
  lost = row | {"verdict": "wrong"}
  path = write(tmp_path / "a.jsonl", ROWS[0], lost, row)
  says = f"line 3, key 'ids': {len(WORDS)}; .*{len(WORDS) - 1}, which the token"
  with pytest.raises(ValueError, match=says):
    episodes.read([path], WORDS, ids=len(WORDS) + 1)


def test_masks_of_bools(tmp_path):
  row = ROWS[0] | {"mask": list(map(bool, ROWS[0]["mask"]))}
  one, other = read(write(tmp_path / "a.jsonl", ROWS[0], row)).episodes
  assert one.mask.tolist() == other.mask.tolist()


def test_a_saved_line_that_is_no_object(tmp_path):
  folder = run_folder(tmp_path, ROWS[0], 5)
  with pytest.raises(ValueError, match="line 1 holds no JSON object"):
    read(folder)


def test_nothing_is_right(tmp_path):
  folder = run_folder(tmp_path, ROWS[1], ROWS[2])
  with pytest.raises(ValueError, match="2 saved ones are of another arm than"):
    read(folder)
