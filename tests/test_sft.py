"""--mode=sft: from files of episodes to a folder of weights, through kills."""

import functools
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as orbax
import pytest
import torch
import transformers

from sesa_jax import metrics, sft, state, types
from sesa_jax.learner import grpo
from sesa_jax.policy import tokenizer, weights
from tests.test_loop import tiny_config

ROOT = Path(__file__).parents[1]
SETTINGS = {
  "sft.steps": 12,
  "sft.batch_tokens": 256,
  "sft.learning_rate": 3e-3,
  "sft.warmup_steps": 2,
  "sft.decay": 0.5,
  "sft.validation": 0.1,
  "sft.log_every": 3,
  "sft.validate_every": 6,
  "sft.checkpoint_every": 4,
  "learner.row_multiple": 32,
  "learner.microbatch_rows": 2,
}


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
  monkeypatch.chdir(ROOT)


def config(**changes):
  return tiny_config(**SETTINGS | changes)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  """Episodes in which the answer is the question's last word."""
  path = tmp_path_factory.mktemp("data") / "a.jsonl"
  words = ["book", "city", "river", "country", "capital", "author"]
  rows = []
  for number in range(60):
    word = words[number % 6]
    parts = [
      ("<|im_start|>user\nwhat is " + f"the {word}" * (1 + number % 3), False),
      (f"<search>the {word}</search>", True),
      ("<information>Doc 1</information>", False),
      (f"<answer>{word}</answer><|im_end|>", True),
    ]
    segments = [{"text": text, "own": own} for text, own in parts]
    rows.append({"id": str(number), "segments": segments})
  path.write_text("\n".join(map(json.dumps, rows)))
  return str(path)


@pytest.fixture(scope="module")
def tuned(data, tmp_path_factory):
  """A run that was never stopped."""
  folder = tmp_path_factory.mktemp("tuned") / "run"
  sft.run(config(), str(folder), [data])
  return folder


def rows_of(folder):
  return metrics.RunFolder(folder, writes=False).read("metrics.jsonl")


def timeless(rows):
  timed = ("seconds", "tokens_per_second")
  return [{k: v for k, v in row.items() if k not in timed} for row in rows]


def exported(folder):
  return (folder / "export" / "model.safetensors").read_bytes()


def test_what_a_run_leaves(tuned, data):
  rows = rows_of(tuned)
  # Every log, validation and checkpoint.
  assert [row["step"] for row in rows] == [3, 4, 6, 8, 9, 12]
  assert [row["step"] for row in rows if "validation/loss" in row] == [6, 12]
  assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
  assert rows[-1]["validation/loss"] < rows[2]["validation/loss"]
  assert [row["lr"] for row in rows][:2] == pytest.approx([3e-3, 3e-3])
  assert rows[-1]["lr"] == pytest.approx(3e-3 / 6)
  assert not any(row["skipped"] for row in rows)
  manifest = json.loads((tuned / "manifest.json").read_text())
  assert len(manifest["hashes"]["episodes"]) == 64


def test_the_folder_is_a_policy_for_us_and_for_transformers(tuned, data):
  """The loss that was reported is the one that transformers finds."""
  out = str(tuned / "export")
  policy = transformers.LlamaForCausalLM.from_pretrained(out)
  words = tokenizer.load("hf", out)
  assert words.get_vocab() == tokenizer.tiny().get_vocab()
  plan = sft._plan(config(), [data])
  assert len(plan.held_out) == 6
  assert len(plan.lessons) == 54
  total = count = 0
  for episode in plan.held_out:
    labels = np.where(episode.mask, episode.ids, -100)
    with torch.no_grad():
      found = policy(
        input_ids=torch.tensor(episode.ids[None], dtype=torch.long),
        labels=torch.tensor(labels[None], dtype=torch.long),
      )
    total += float(found.loss) * episode.mask.sum()
    count += episode.mask.sum()
  last = rows_of(tuned)[-1]
  assert last["validation/tokens"] == count
  assert last["validation/loss"] == pytest.approx(total / count, rel=1e-5)
  # And a config takes it as its policy.
  backbone, params = weights.load("hf", out)
  assert backbone == weights.check("random", "")
  _, before = weights.load("random", "", jax.random.key(0))
  moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), params, before)
  assert min(jax.tree.leaves(moved)) > 0


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_each_checkpoint_that_is_kept_is_a_policy(tuned, tmp_path):
  name = "model.safetensors"
  state.export(tuned, None, tmp_path / "last", "float32")
  assert (tmp_path / "last" / name).read_bytes() == exported(tuned)
  for step in (8, 12):
    out = tmp_path / str(step)
    state.export(tuned, None, out, "float32", iteration=step)
    _, read = weights.load("hf", out)
    place = tuned / "checkpoints" / str(step) / "policy"
    saved = orbax.PyTreeCheckpointer().restore(place)["params"]
    jax.tree.map(np.testing.assert_array_equal, read["norm"], saved["norm"])
    jax.tree.map(np.testing.assert_array_equal, read["layers"], saved["layers"])
  assert (tmp_path / "8" / name).read_bytes() != exported(tuned)
  with pytest.raises(ValueError, match="keeps the checkpoints of 8, 12"):
    state.export(tuned, None, tmp_path / "out", "float32", iteration=4)
  with pytest.raises(ValueError, match="has one policy. Leave it out"):
    state.export(tuned, "solver", tmp_path / "out", "float32")


def test_a_place_that_holds_another_policy_is_refused(tuned, data, tmp_path):
  """Also by a run that has ended, which writes nothing more."""
  state.export(tuned, None, tmp_path / "other", "float32", iteration=8)
  before = (tmp_path / "other/model.safetensors").read_bytes()
  with pytest.raises(ValueError, match="other exists and is no empty folder"):
    sft.run(config(), str(tuned), [data], out=str(tmp_path / "other"))
  assert (tmp_path / "other/model.safetensors").read_bytes() == before
  sft.run(config(), str(tuned), [data])  # its own is left as it is
  sft.run(config(), str(tuned), [data], out=str(tmp_path / "new"))
  new = (tmp_path / "new/model.safetensors").read_bytes()
  assert new == exported(tuned) != before


def test_how_often_it_saves_may_change_when_it_resumes(tuned, data, tmp_path):
  folder = tmp_path / "run"
  shutil.copytree(tuned, folder)
  shutil.rmtree(folder / "checkpoints/12")
  shutil.rmtree(folder / "export")
  often = {"sft.checkpoint_every": 1, "sft.log_every": 1, "checkpoint.keep": 4}
  sft.run(config(**often), str(folder), [data])
  assert exported(folder) == exported(tuned)
  steps = {int(p.name) for p in folder.glob("checkpoints/[0-9]*")}
  assert steps == {9, 10, 11, 12}
  with pytest.raises(ValueError, match=r"0.01\. Name .* run's own config\.$"):
    sft.run(config(**{"sft.learning_rate": 0.01}), str(folder), [data])


@pytest.mark.parametrize("place", ["begin", "end"])
def test_a_stopped_run_goes_on_to_the_same_weights(
  tuned, data, tmp_path, monkeypatch, place
):
  real, saves = sft._save, []

  def save(store, folder, policy, step):
    saves.append(step)
    if len(saves) == 2:
      if place == "end":
        real(store, folder, policy, step)
      raise KeyboardInterrupt
    real(store, folder, policy, step)

  folder = tmp_path / "run"
  monkeypatch.setattr(sft, "_save", save)
  with pytest.raises(KeyboardInterrupt):
    sft.run(config(), str(folder), [data])
  assert not (folder / "export").exists()
  sft.run(config(), str(folder), [data])
  assert saves == {"begin": [4, 8, 8, 12], "end": [4, 8, 12]}[place]
  assert timeless(rows_of(folder)) == timeless(rows_of(tuned))
  assert exported(folder) == exported(tuned)


@pytest.mark.slow
def test_a_killed_process_goes_on(tuned, data, tmp_path):
  flags = ["--mode=sft", "--config=configs/tiny.py", f"--episodes={data}"]
  flags += [f"--config.{name}={value}" for name, value in SETTINGS.items()]
  flags += [f"--workdir={tmp_path / 'run'}"]

  def driver(kill):
    command = [sys.executable, "-m", "tests.driver", kill, *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

  assert driver("sft:2").returncode == -signal.SIGKILL
  done = driver("never")
  assert done.returncode == 0, done.stderr
  assert "Resumed after step 4" in done.stderr
  assert exported(tmp_path / "run") == exported(tuned)


def test_the_same_command_again_changes_nothing(tuned, data, tmp_path):
  folder = tmp_path / "run"
  shutil.copytree(tuned, folder)
  sft.run(config(), str(folder), [data])
  assert exported(folder) == exported(tuned)
  assert timeless(rows_of(folder)) == timeless(rows_of(tuned))
  # A kill between the last checkpoint and the export.
  shutil.rmtree(folder / "export")
  sft.run(config(), str(folder), [data])
  assert exported(folder) == exported(tuned)


def test_a_folder_belongs_to_its_config_and_its_episodes(tuned, data, tmp_path):
  with pytest.raises(ValueError, match="sft.decay: 0.5 -> 0.4"):
    sft.run(config(**{"sft.decay": 0.4}), str(tuned), [data])
  other = tmp_path / "b.jsonl"
  other.write_text("\n".join(Path(data).read_text().splitlines()[1:]))
  with pytest.raises(ValueError, match="begun with other episodes"):
    sft.run(config(), str(tuned), [str(other)])


def test_a_folder_of_another_mode(data, tmp_path):
  folder = metrics.RunFolder(tmp_path / "run")
  folder.write_json("manifest.json", {"hashes": {"weights": "none"}})
  with pytest.raises(ValueError, match="is the folder of another mode"):
    sft.run(config(), str(folder.path), [data])


def test_another_seed_is_another_order(data, tmp_path):
  one, other = (sft._plan(config(seed=seed), [data]) for seed in (0, 1))
  assert [e.request_id for e in one.held_out] != [
    e.request_id for e in other.held_out
  ]
  assert one.digest == other.digest


@pytest.mark.parametrize(
  ("rows", "most", "fsdp", "expected"),
  [
    (4, 8, 1, (4, 4)),  # one micro-batch holds all
    (10, 4, 1, (9, 3)),  # three of three, since two of four are fewer
    (41, 2, 1, (40, 2)),
    (33, 4, 1, (33, 3)),
    (37, 4, 1, (36, 4)),  # as are twelve of three
    (12, 4, 2, (12, 4)),
    (11, 4, 2, (8, 4)),  # ten divide over the mesh
    (24, 16, 8, (16, 16)),
  ],
)
def test_rows_of_a_step_by_hand(rows, most, fsdp, expected):
  """As many as can be, in micro-batches of one size that is allowed."""
  changes = {"sft.batch_tokens": 32 * rows + 31}
  changes |= {"learner.microbatch_rows": most}
  assert sft._shape(config(**changes), 32, fsdp) == expected


def test_the_digest_tells_which_tokens_are_own(tmp_path):
  def digest(*own):
    texts = zip(("the city", "a river", "a book"), own, strict=True)
    parts = [{"text": text, "own": mine} for text, mine in texts]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"id": "a", "segments": parts}))
    return sft._plan(config(), [str(path)]).digest

  assert digest(False, True, False) == digest(False, True, False)
  assert digest(False, True, False) != digest(False, False, True)


def test_random_weights_follow_the_seed(data, tmp_path, monkeypatch):
  drawn = []

  def load(source, path, key, **options):
    drawn.append(jax.random.key_data(key).tolist())
    raise KeyboardInterrupt

  monkeypatch.setattr(sft.weights, "load", load)
  for seed in (3, 4):
    with pytest.raises(KeyboardInterrupt):
      sft.run(config(seed=seed), str(tmp_path / str(seed)), [data])
  keys = [jax.random.key_data(jax.random.key(s)).tolist() for s in (3, 4)]
  assert drawn == keys


def test_a_line_of_metrics_by_hand():
  """Means over tokens, of the steps that were applied; the newest rate."""
  interval = sft._Interval()
  for segments, loss, tokens, finite, norm, lr in (
    ([[1, 1, 0, 0], [1, 2, 2, 0]], 6.0, 2.0, True, 1.0, 0.1),
    ([[1, 1, 1, 1], [0, 0, 0, 0]], 1.0, 5.0, True, 2.0, 0.2),
    ([[1, 0, 0, 0], [0, 0, 0, 0]], np.nan, 1.0, False, np.nan, 0.3),
  ):
    segments = np.array(segments)
    batch = SimpleNamespace(ids=segments, segments=segments)
    sums = grpo.zero_sums()._replace(loss=loss, tokens=tokens)
    interval.add([batch], (sums, (finite, norm, lr)))
  row = interval.row()
  assert row["tokens"] == 7
  assert row["loss"] == 1.0
  assert row["grad_norm"] == 1.5
  assert (row["skipped"], row["lr"]) == (1, 0.3)
  assert row["padding_fraction"] == pytest.approx(14 / 24)
  assert row["tokens_per_second"] * row["seconds"] == pytest.approx(24)


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    (
      {"sft.too_long": "refuse", "sft.max_tokens": 40},
      "sft.max_tokens = 40; the longest has 4[5-9] tokens. Raise it",
    ),
    ({"sft.max_tokens": 5000}, "sft.max_tokens = 5000 is above .* 4096"),
    (
      {"sft.batch_tokens": 31},
      "sft.batch_tokens = 31 holds no row of .* least",
    ),
    ({"sft.optimizer": "lion"}, "Unknown sft.optimizer 'lion'. .*adamw, muon"),
    ({"sft.arms": ("evidence",)}, "Unknown sft.arms 'evidence'"),
    ({"sft.too_long": "cut"}, "Unknown sft.too_long 'cut'. Choices: skip, ref"),
    ({"sft.validation": 1.0}, "sft.validation = 1.0: it must be from 0 to 0.9"),
  ],
)
def test_what_is_refused(data, tmp_path, changes, says):
  with pytest.raises(ValueError, match=says):
    sft.run(config(**changes), str(tmp_path / "run"), [data])
  assert not (tmp_path / "run").exists()


def test_an_out_that_is_taken(data, tmp_path):
  (tmp_path / "x").write_text("")
  with pytest.raises(ValueError, match="exists and is no empty folder"):
    sft.run(config(), str(tmp_path / "run"), [data], out=str(tmp_path))
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["/proc/x/y", "FILE/y"])
def test_an_out_that_cannot_be_made_is_refused_first(
  data, tmp_path, monkeypatch, place
):
  def never(*_):
    raise AssertionError("episodes were read")

  monkeypatch.setattr(sft, "_plan", never)
  out = place.replace("FILE", data)
  with pytest.raises(ValueError, match=f"--out={out} cannot be made: .*Name"):
    sft.run(config(), str(tmp_path / "run"), [data], out=out)
  assert not (tmp_path / "run").exists()


def test_progress_says_step_and_loss(data, tmp_path, monkeypatch):
  said, clock = [], iter(range(0, 10**6, 11))  # a line at each step
  progress = functools.partial(metrics.Progress, clock=lambda: next(clock))
  monkeypatch.setattr(sft.metrics, "Progress", progress)
  log = SimpleNamespace(info=lambda form, *of: said.append(form % of))
  monkeypatch.setattr(metrics, "logging", log)
  changes = {"sft.steps": 4, "sft.log_every": 2, "sft.validation": 0.0}
  for _ in range(2):
    sft.run(config(**changes), str(tmp_path / "run"), [data])
  losses = {row["step"]: row["loss"] for row in rows_of(tmp_path / "run")}
  assert said[0] == "sft: begins, 0/4 steps"
  assert said[2].startswith("sft: 2/4 steps, ")
  assert "loss" not in said[2]  # none was read yet
  assert said[3].startswith(f"sft: 3/4 steps, loss {losses[2]:.4f}, ")
  assert f", 4/4 steps, loss {losses[4]:.4f}, " in said[5]
  assert said[6] == "sft: begins, 4/4 steps"


def test_long_ones_are_left_out_and_said(data, capsys):
  sizes = [len(x.episode.ids) for _, x in sft._plan(config(), [data]).lessons]
  most = int(np.median(sizes))
  plan = sft._plan(config(**{"sft.max_tokens": most}), [data])
  assert 0 < len(plan.lessons) + len(plan.held_out) < 60
  assert max(len(x.episode.ids) for _, x in plan.lessons) <= most


def test_epochs_make_steps(data):
  changes = {"sft.steps": 0, "sft.epochs": 3, "sft.validation": 0.0}
  plan = sft._plan(config(**changes), [data])
  steps = list(sft._lines(config(**changes), plan, 0))
  assert len(steps) == plan.steps
  numbers = [i for _, rows in steps for row in rows for i, _ in row]
  assert sorted(numbers) == sorted(list(range(60)) * 3)
  assert all(len(rows) == plan.rows for _, rows in steps[:-1])
  assert [epoch for epoch, _ in steps] == sorted(epoch for epoch, _ in steps)
  # From a step on it is the rest of the same.
  rest = list(sft._lines(config(**changes), plan, 4))
  names = [[[i for i, _ in row] for row in rows] for _, rows in steps[4:]]
  assert names == [[[i for i, _ in row] for row in rows] for _, rows in rest]


def test_a_loss_that_is_no_number_stops(data, tmp_path):
  changes = {"sft.learning_rate": 1.0, "learner.adam_eps": 1e-30}
  changes |= {"learner.weight_decay": 1e30}
  with pytest.raises(types.Stopped, match="steps in a row, up to step"):
    sft.run(config(**changes), str(tmp_path / "run"), [data])


def test_a_shape_and_a_tokenizer_of_a_folder_without_weights(data, tmp_path):
  """policy.source = "random" with a path: the folder says what is drawn."""
  shape = tmp_path / "shape"
  tokenizer.tiny().save_pretrained(shape)
  fields = dict(
    model_type="qwen3",
    vocab_size=520,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=2,
    head_dim=16,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
  )
  (shape / "config.json").write_text(json.dumps(fields))
  changes = {"policy.path": str(shape), "sft.steps": 1, "sft.optimizer": "muon"}
  out = tmp_path / "out"
  sft.run(config(**changes), str(tmp_path / "run"), [data], out=str(out))
  backbone = weights.check("hf", str(out))
  assert (backbone.dim, backbone.layers, backbone.vocab_size) == (32, 3, 520)
  assert backbone.qk_norm
  saved = tokenizer.load("hf", str(out))
  assert saved.get_vocab() == tokenizer.load("random", str(shape)).get_vocab()
