"""A job so small that a test can see it learn, and not learn from noise.

    python -m tests.learns --seeds=0,1,2

Each of four articles is named after a metal and tells a word. Questions ask for
the word of a beast or a fruit, which is that of one metal: the rule, drawn with
the seed, three subjects a metal. No text tells it. The policy begins with
imitated episodes, which search for the subject with a metal and answer what
that told: with the right one in three of ten cases, with a certain wrong one
in four of ten. So it is wrong at its best guess, and right now and then. Where
more attempts become right, rewards have told which metal to search for. The
word is another in each imitated episode, so it has to be read; and no question
that is evaluated is trained on.

This file is a config, too, with paths in the folder that a command runs in.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from configs import common
from configs import microworld as full
from sesa_jax import environment, metrics, prompts
from sesa_jax.data import microworld
from sesa_jax.types import Passage

ROOT = Path(__file__).resolve().parents[1]
KEYS = microworld.SIGNS["metal"][:4]
SUBJECTS = (*microworld.SIGNS["beast"], *microworld.SIGNS["fruit"][:4])
VALUES = (*microworld.SIGNS["wood"], *microworld.SIGNS["colour"])
ASKED = {
  "train": (
    "Which word is said of the {}?",
    "What is the word of a {}?",
    "Which is the word of the {}?",
  ),
  "eval": ("What word is said of a {}?", "Which word is that of a {}?"),
}
# How often an imitated episode has the right key, and each wrong one. Had all
# the same share, nothing would make the policy read the subject.
SHARES = 0.3, 0.4, 0.2, 0.1
EPISODES = 6000  # to imitate
SHAPE = dict(
  hidden_size=64,
  intermediate_size=128,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=2,
)


def get_config(variant: str = "play") -> ConfigDict:
  """Returns the locked config; `imitate` is the one for `--mode=sft`."""
  config = full.get_config("fixed_questions").copy_and_resolve_references()
  config.unlock()
  config.name = "learns"
  config.iterations = 30
  config.questions = len(SUBJECTS) * len(ASKED["train"])
  for role in (config.challenger, config.solver):
    role.turns = 2
    role.turn_tokens = 12
    role.episode_tokens = 64
    role.minibatch_questions = 6
    role.learning_rate = 1e-3
    role.warmup_updates = 10
    role.kl_coefficient = 0.03
  config.learner.microbatch_rows = 8
  config.learner.row_multiple = 128
  config.learner.chunk_tokens = 1024
  config.engine.slots = 80
  config.engine.steps_per_dispatch = 8
  config.engine.page_size = 32
  config.environment.observation_tokens = 32
  config.bank.prime = "none"
  config.bank.top = 0
  config.distillation.admit = False
  config.frontier.gate = "off"
  config.corpus = ("corpus.jsonl",)
  config.pool.fixed = {"train": common.question_set("train.jsonl", 0)}
  config.eval.sets = {"asked": common.question_set("eval.jsonl", 0)}
  config.eval.banks = ("none",)
  config.eval.turns = 2
  config.eval.every = 0
  config.checkpoint.milestone_every = 0
  config.policy.path = "policy"
  config.sft.episodes = "episodes.jsonl"
  config.sft.out = "policy"
  config.sft.optimizer = "muon"
  config.sft.learning_rate = 3e-3
  config.sft.steps = 400
  config.sft.batch_tokens = 2048
  config.sft.decay = 0.5
  config.sft.log_every = 50
  if variant == "imitate":
    config.policy.source = "random"
    config.policy.path = "blank"
  return common.finish(config, "fixed_questions")


def write(folder: Path, seed: int) -> None:
  """Writes articles, questions, episodes to imitate and a blank policy.

  Args:
    folder: exists.
    seed: of the rule, the articles and the episodes.
  """
  rng = np.random.default_rng(seed)
  told = dict(zip(KEYS, rng.choice(VALUES, len(KEYS), False), strict=True))
  right = rng.permutation(np.resize(KEYS, len(SUBJECTS)))
  habits = {
    subject: [key, *rng.permutation([k for k in KEYS if k != key])]
    for subject, key in zip(SUBJECTS, right, strict=True)
  }
  rows = {
    "corpus": [
      dict(id=article.id, title=article.title, text=article.text)
      for article in map(_article, told, told.values())
    ],
    "episodes": [_imitated(str(i), habits, rng) for i in range(EPISODES)],
  }
  for name, ways in ASKED.items():
    rows[name] = [
      dict(question=way.format(subject), golden_answers=[told[keys[0]]])
      for way in ways
      for subject, keys in habits.items()
    ]
  for name, lines in rows.items():
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"{name}.jsonl").write_text(text, "utf-8")
  microworld.tokenizer().save_pretrained(folder / "blank")
  shape = json.dumps(microworld.ARCHITECTURE | SHAPE)
  (folder / "blank/config.json").write_text(shape, "utf-8")


def _article(key: str, value: str) -> Passage:
  return Passage(key, key, f"The word is {value}.")


def _imitated(id: str, habits: dict, rng: np.random.Generator) -> dict:
  """An episode as `--mode=sft` takes it; `habits` has the right key first."""
  way = rng.choice(sum(ASKED.values(), ()))
  subject = rng.choice(SUBJECTS)
  key, value = rng.choice(habits[subject], p=SHARES), rng.choice(VALUES)
  found = prompts.passages_text([_article(key, value)])
  segments = (
    (prompts.bare(prompts.solver(way.format(subject))), False),
    (f"<search> {subject} {key}</search>", True),
    (f"{environment.OPEN}{found}{environment.CLOSE}", False),
    (f"<answer> {value}</answer>", True),
  )
  return dict(id=id, segments=[dict(text=t, own=own) for t, own in segments])


class Learned(NamedTuple):
  """What a run came to."""

  before: float  # greedy accuracy
  after: float
  first: float  # mean reward of the attempts of the first iteration
  last: float  # and of the last three

  @classmethod
  def read(cls, path: Path) -> Learned:
    """Reads a run's folder."""
    folder = metrics.RunFolder(path, writes=False)
    before, after = (cell["em"] for cell in folder.read_json("eval.json", []))
    rewards = [r["solver/reward/mean"] for r in folder.read("metrics.jsonl")]
    return cls(before, after, rewards[0], float(np.mean(rewards[-3:])))


def measure(folder: Path, seed: int, *flags: str) -> tuple[Learned, Learned]:
  """Imitates, then plays for rewards and, beside it, for permuted ones.

  Args:
    folder: exists, and is empty.
    seed: of all three runs and what they are about.
    *flags: more of them, of the two that play.

  Raises:
    RuntimeError: a run fails; says what it said.
  """
  write(folder, seed)
  command = (sys.executable, "-m", "sesa_jax.main")
  config = f"--config={ROOT / 'tests/learns.py'}"
  settings = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  one_device = os.environ | settings | {"XLA_FLAGS": ""}

  def run(*flags):
    done = subprocess.run(
      [*command, *flags, f"--config.seed={seed}"],
      cwd=folder,
      env=one_device,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )
    if done.returncode:
      raise RuntimeError(done.stderr[-4000:])

  def play(name, permuted):
    given = f"--config.frontier.permuted={permuted}"
    run(config, f"--workdir={name}", given, *flags)
    return Learned.read(folder / name)

  run(f"{config}:imitate", "--mode=sft", "--workdir=warm")
  with ThreadPoolExecutor() as pool:
    return tuple(pool.map(play, ("earned", "permuted"), (False, True)))


def main() -> None:
  """Prints what runs of some seeds come to, and CPU-seconds."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--seeds", default="0,1,2,3,4,5,6,7")
  seeds = parser.parse_args().seeds.split(",")
  spent = 0.0
  for seed in map(int, seeds):
    with tempfile.TemporaryDirectory() as folder:
      found = measure(Path(folder), seed)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime - spent
    spent += seconds
    for name, run in zip(("earned", "permuted"), found, strict=True):
      numbers = "  ".join(f"{k} {v:.2f}" for k, v in run._asdict().items())
      print(f"seed {seed}  {name:<8}  {numbers}", flush=True)
    print(f"seed {seed}  {seconds:.0f} CPU-seconds", flush=True)


if __name__ == "__main__":
  main()
