"""Breaks the code in one place at a time, and says which test notices.

    python -m tests.mutants [--list] [--only=NAME,NAME] [--widen]

A suite that stays green when an advantage changes its sign protects nothing.
Each mutant is a patch of a copy of the tree, in a temporary folder: its text
must stand there exactly once. The tests that should know run first; with
--widen all fast ones run for a mutant that survives those. Exit code 1 where
one does: NOTES.md lists them, with the reason. It runs on demand, since it
takes half an hour; `test_mutants.py` checks that all patches still apply.

Those of `BLIND` were chosen from the code alone, in this order, before any file
of tests/ was opened; those of `KNOWN` are faults that RL code is known for;
those of `SUBTLE` were added later, in search of survivors.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
_LEFT_OUT = shutil.ignore_patterns(
  ".git", ".venv", "runs", "__pycache__", "*.egg-info", ".*_cache"
)
SECONDS = 600.0  # of a mutant's tests; one that hangs is noticed by that


class Mutant(NamedTuple):
  """One patch of one file."""

  name: str
  file: str  # below sesa_jax/
  old: str  # occurs exactly once
  new: str
  tests: str  # files that should notice, without test_ and .py


BLIND = (
  Mutant(
    "std with the divisor n",
    "learner/grpo.py",
    "np.maximum(count - 1, 1)",
    "np.maximum(count, 1)",
    "grpo",
  ),
  Mutant(
    "k3 of the reversed ratio",
    "learner/grpo.py",
    "d = log_ratio(reference, new)",
    "d = log_ratio(new, reference)",
    "grpo",
  ),
  Mutant(
    "importance weight inverted",
    "learner/grpo.py",
    "weight = jnp.exp(log_ratio(old, engine))",
    "weight = jnp.exp(log_ratio(engine, old))",
    "grpo learner",
  ),
  Mutant(
    "sides of the clip exchanged",
    "learner/grpo.py",
    "1 - clip_low, 1 + clip_high",
    "1 - clip_high, 1 + clip_low",
    "grpo",
  ),
  Mutant(
    "entropy is a penalty",
    "learner/grpo.py",
    "token_loss -= entropy_coefficient",
    "token_loss += entropy_coefficient",
    "grpo",
  ),
  Mutant(
    "the first update has a rate of 0",
    "learner/learner.py",
    "warm = (state.updates + 1) /",
    "warm = state.updates /",
    "learner",
  ),
  Mutant(
    "small gradients are blown up",
    "learner/learner.py",
    "scale = jnp.minimum(1.0, recipe",
    "scale = jnp.maximum(1.0, recipe",
    "learner",
  ),
  Mutant(
    "norms decay",
    "learner/learner.py",
    'return "norm" not in name and "bias" not in name',
    'return "bias" not in name',
    "learner",
  ),
  Mutant(
    "positions run on over a row's episodes",
    "learner/packing.py",
    "batch.positions[place] = np.arange(len(episode.ids))",
    "batch.positions[place] = place[1].start + np.arange(len(episode.ids))",
    "packing learner",
  ),
  Mutant(
    "long episodes weigh more",
    "learner/packing.py",
    "sampled * grpo.LOSSES[loss].weight(",
    "sampled * count * grpo.LOSSES[loss].weight(",
    "packing learner",
  ),
  Mutant(
    "training forgets the temperature",
    "learner/logprobs.py",
    "project(hidden).astype(dtype) / temperature",
    "project(hidden).astype(dtype)",
    "logprobs",
  ),
  Mutant(
    "the gate opens for one of both",
    "stages/frontier.py",
    "right >= min_right and wrong >=",
    "right >= min_right or wrong >=",
    "frontier",
  ),
  Mutant(
    "the rarest wrong answer is recorded",
    "stages/frontier.py",
    "firsts[max(firsts, key=times.__getitem__)]",
    "firsts[min(firsts, key=times.__getitem__)]",
    "frontier",
  ),
  Mutant(
    "malformed attempts are out of p",
    "stages/frontier.py",
    "total=len(group),",
    "total=sum(a.prediction is not None for a in group),",
    "frontier",
  ),
  Mutant(
    "a question sees the skill that it gave birth to",
    "skills/bank.py",
    "vectors, k, ~born_from(bank, questions)",
    "vectors, k, None",
    "bank",
  ),
  Mutant(
    "skills of net 0 retire",
    "skills/bank.py",
    "retrieved[row] >= after and net[row] < 0",
    "retrieved[row] >= after and net[row] <= 0",
    "bank",
  ),
  Mutant(
    "the best skill is evicted",
    "skills/bank.py",
    "rows.sort(key=lambda row: (net[row], row))",
    "rows.sort(key=lambda row: (-net[row], row))",
    "bank",
  ),
  Mutant(
    "noise tells the target",
    "stages/validity.py",
    " and not names(source) & names(candidate)",
    "",
    "validity",
  ),
  Mutant(
    "own passages are cut first",
    "stages/validity.py",
    "shown = [*own.values(), *rest[:fitting]]",
    "shown = [*own.values()][:fitting] + rest",
    "validity",
  ),
  Mutant(
    "an outage uses records up",
    "stages/distillation.py",
    "for record in case.records} - lost",
    "for record in case.records}",
    "distillation",
  ),
  Mutant(
    "the loss reads observations",
    "engine/play.py",
    "playing.append(reply.ids)",
    "playing.append(reply.ids, sampled=True)",
    "engine",
  ),
  Mutant(
    "all attempts draw alike",
    "engine/shard.py",
    '{request_id}/{attempt}".encode()',
    '{request_id}".encode()',
    "engine",
  ),
  Mutant(
    "every place draws the same number",
    "engine/sampling.py",
    "jax.random.fold_in(key, position)",
    "jax.random.fold_in(key, 0)",
    "decode engine",
  ),
  Mutant(
    "placebos are the nearest skills",
    "skills/arms.py",
    'np.argsort(score, kind="stable")',
    'np.argsort(-score, kind="stable")',
    "arms",
  ),
  Mutant(
    "evaluation samples",
    "evaluation.py",
    "types.Sampling(config.eval.temperature)",
    "types.Sampling(config.solver.temperature)",
    "evaluation",
  ),
  Mutant(
    "every epoch has the same order",
    "data/seeds.py",
    "default_rng([seed, epoch])",
    "default_rng([seed, 0])",
    "seeds",
  ),
  Mutant(
    "the evidence check samples",
    "stages/selfplay.py",
    """      attempts=1,
      sampling=types.Sampling(temperature=0.0),
      limits=types.Limits(tokens, max_tokens, 1),
      arm="evidence",""",
    """      attempts=1,
      sampling=types.Sampling(temperature=1.0),
      limits=types.Limits(tokens, max_tokens, 1),
      arm="evidence",""",
    "selfplay",
  ),
)

KNOWN = (
  Mutant(
    "advantages negated",
    "stages/frontier.py",
    "types.Lesson(episode, float(advantage))",
    "types.Lesson(episode, -float(advantage))",
    "frontier",
  ),
  Mutant(
    "mask inverted",
    "learner/packing.py",
    "batch.mask[place] = sampled\n",
    "batch.mask[place] = ~sampled\n",
    "packing learner",
  ),
  Mutant(
    "logprobs shifted by one",
    "learner/logprobs.py",
    "x = jnp.roll(jnp.take_along_axis(x, back_BT, axis=1), 1, axis=1)",
    "x = jnp.take_along_axis(x, back_BT, axis=1)",
    "logprobs",
  ),
  Mutant(
    "engine's logprobs shifted by one",
    "learner/packing.py",
    "np.where(sampled, episode.logprobs, 0.0)",
    "np.where(sampled, np.roll(episode.logprobs, 1), 0.0)",
    "packing learner",
  ),
  Mutant(
    "groups merged",
    "stages/frontier.py",
    "np.array([episode.request_id for episode in episodes])",
    "np.array([episode.arm for episode in episodes])",
    "frontier",
  ),
  Mutant(
    "skills of another question",
    "skills/bank.py",
    "for question, found, close in zip(questions, rows, scores, strict=True)\n"
    "  }\n\n\ndef ranking(",
    "for question, found, close in zip(\n"
    "      questions, rows[::-1], scores[::-1], strict=True\n"
    "    )\n  }\n\n\ndef ranking(",
    "bank",
  ),
  Mutant(
    "a lost verdict is WRONG",
    "judge/verdicts.py",
    "verdicts[i] = Verdict.UNKNOWN if lost else reply",
    "verdicts[i] = Verdict.WRONG if lost else reply",
    "verdicts",
  ),
  Mutant(
    "a lost episode is WRONG",
    "stages/selfplay.py",
    "verdict = types.Verdict.UNKNOWN",
    "verdict = types.Verdict.WRONG",
    "selfplay",
  ),
  Mutant(
    "questions with a lost verdict stay in",
    "stages/frontier.py",
    "    if len(group) == group_size\n"
    "    and all(a.verdict is not types.Verdict.UNKNOWN for a in group)",
    "    if len(group) == group_size",
    "frontier",
  ),
  Mutant(
    "optimizer states swapped by a resume",
    "state.py",
    '    challenger=shared or policies["challenger"],\n'
    '    solver=shared or policies["solver"],',
    '    challenger=shared\n    or policies["challenger"]._replace(\n'
    '      opt_state=policies["solver"].opt_state\n    ),\n'
    '    solver=shared\n    or policies["solver"]._replace(\n'
    '      opt_state=policies["challenger"].opt_state\n    ),',
    "checkpoint loop",
  ),
  Mutant(
    "the bell turned upside down",
    "stages/frontier.py",
    "inside = 4 * (p - low) * (high - p)",
    "inside = -4 * (p - low) * (high - p)",
    "frontier",
  ),
  Mutant(
    "credit inverted",
    "skills/credit.py",
    "return right, int(outcome.wrong > 0)",
    "return int(outcome.wrong > 0), right",
    "credit bank",
  ),
  Mutant(
    "the solver plays its first weights",
    "loop.py",
    "weights, solving_gap = rollout.weights(\n"
    "    tools.engine, world.solver, state.solver.params\n  )",
    "weights, solving_gap = rollout.weights(\n"
    '    tools.engine, world.solver, world.references["solver"]\n  )',
    "loop",
  ),
  Mutant(
    "the challenger plays the solver's weights",
    "loop.py",
    "world.tools.engine, world.challenger, state.challenger.params",
    "world.tools.engine, world.challenger, state.solver.params",
    "loop",
  ),
  Mutant(
    "the challenger learns the solver's lessons",
    "loop.py",
    '{"challenger": edge.proposals, "solver": edge.attempts}',
    '{"challenger": edge.attempts, "solver": edge.attempts}',
    "loop",
  ),
  Mutant(
    "skills that were shown get no credit",
    "loop.py",
    "bank, credited = skill_bank.credit(\n    bank,\n    shown,",
    "bank, credited = skill_bank.credit(\n    bank,\n    {},",
    "loop",
  ),
  Mutant(
    "no skill reaches the prompt",
    "stages/selfplay.py",
    'prompts.solver(task.text, blocks.get(task.id, ""))',
    'prompts.solver(task.text, "")',
    "selfplay",
  ),
  Mutant(
    "the reference moves with the policy",
    "loop.py",
    "world.references[role],\n      lessons[role],",
    "policies[role].params,\n      lessons[role],",
    "loop",
  ),
)


# Of one value or one comparison, where all looks right.
SUBTLE = (
  Mutant(
    "hops do not reach the baseline",
    "stages/frontier.py",
    "[p.seed.hops for p, _ in kept]",
    "[1 for _ in kept]",
    "frontier",
  ),
  Mutant(
    "the challenger's rewards are not permuted",
    "stages/frontier.py",
    "challenger_rewards = dealt(np.array([r for _, r in kept], float))",
    "challenger_rewards = np.array([r for _, r in kept], float)",
    "frontier",
  ),
  Mutant(
    "the pool is emptied an iteration early",
    "stages/validity.py",
    "(iteration - 1) % empty_every == 0",
    "iteration % empty_every == 0",
    "validity",
  ),
  Mutant(
    "replays count as posed just now",
    "stages/validity.py",
    'dataclasses.replace(q, origin="replay") if q.origin != "fixed" else q',
    "q",
    "validity",
  ),
  Mutant(
    "the distiller does not see what failed to help",
    "stages/distillation.py",
    "shown = tuple(known[id] for id in ids if id in known)",
    "shown = ()",
    "distillation",
  ),
  Mutant(
    "a skill at the threshold is turned away",
    "skills/bank.py",
    "np.float32(score) > np.float32(threshold)",
    "np.float32(score) >= np.float32(threshold)",
    "bank",
  ),
  Mutant(
    "evaluation has the turns of training",
    "evaluation.py",
    "config.solver.episode_tokens, config.eval.turns",
    "config.solver.episode_tokens, config.solver.turns",
    "evaluation loop",
  ),
  Mutant(
    "the last turn may search",
    "environment.py",
    "pause.turn - pause.malformed + 1 >= pause.turns",
    "pause.turn - pause.malformed + 1 > pause.turns",
    "environment",
  ),
  Mutant(
    "the prompt always asks for two searches",
    "stages/selfplay.py",
    "prompts.challenger(seed, searches[seed.hops])",
    "prompts.challenger(seed, 2)",
    "selfplay",
  ),
  Mutant(
    "a lost episode is replayed once",
    "stages/selfplay.py",
    "for _ in range(REPLAYS):",
    "for _ in range(1):",
    "selfplay",
  ),
  Mutant(
    "minibatches are not in order",
    "learner/packing.py",
    "question * updates // len(index)",
    "question % updates",
    "packing",
  ),
  Mutant(
    "titles are no leak",
    "judge/leaks.py",
    '    ("title", titles),\n',
    "",
    "leaks",
  ),
)

# Of imitation and of the world that it is tried in, chosen from the code alone.
IMITATED = (
  Mutant(
    "a resume begins the schedule anew",
    "sft.py",
    "supervised.rate(\n          step,",
    "supervised.rate(\n          step - start,",
    "sft",
  ),
  Mutant(
    "held-out episodes are learned",
    "sft.py",
    "[e for i, e in enumerate(found) if i not in held]",
    "list(found)",
    "sft",
  ),
  Mutant(
    "other own tokens are the same episodes",
    "sft.py",
    "episode.ids.tobytes() + episode.mask.tobytes()",
    "episode.ids.tobytes()",
    "sft",
  ),
  Mutant(
    "imitation weighs tokens by their episode",
    "learner/supervised.py",
    '_LOSS = "dapo"',
    '_LOSS = "grpo"',
    "supervised",
  ),
  Mutant(
    "a chat's turn runs to the last end",
    "data/episodes.py",
    "min(sizes, default=len(own))",
    "max(sizes, default=len(own))",
    "episodes",
  ),
  Mutant(
    "namesakes may share the sign that tells them apart",
    "data/microworld.py",
    "rng.choice(SIGNS[law[type]], NAMESAKES, replace=False)",
    "rng.choice(SIGNS[law[type]], NAMESAKES)",
    "microworld",
  ),
  Mutant(
    "what is tested is trained on",
    "data/microworld.py",
    "_questions(own.things, count, TRAINING, own, rng)",
    "_questions(other.things, count, TRAINING, other, rng)",
    "microworld",
  ),
  Mutant(
    "the script knows what it should read",
    "data/warm_start.py",
    "read = _read(world, found, thing, chosen)",
    "read = thing",
    "warm_start",
  ),
  Mutant(
    "the warm start plays another world's rules",
    "data/warm_start.py",
    "microworld.build(seed, 240",
    "microworld.build(seed + 1, 240",
    "warm_start",
  ),
  Mutant(
    "evidence stands first",
    "data/warm_start.py",
    "order = rng.permutation(len(passages))",
    "order = range(len(passages))",
    "warm_start",
  ),
  Mutant(
    "the null of what retires is that of what is active",
    "plots.py",
    "draws = getattr(null, name)",
    "draws = null.active",
    "plots",
  ),
  Mutant(
    "a clue that no right page has",
    "judge/offline.py",
    "words = [w for w in words if w in right_pages]",
    "words = [w for w in words if w in right_pages | wrong_pages]",
    "offline",
  ),
)

EVERY = BLIND + KNOWN + SUBTLE + IMITATED


def apply(mutant: Mutant, text: str) -> str:
  """Returns the text of a file with the patch.

  Raises:
    ValueError: what it replaces does not stand there exactly once.
  """
  count = text.count(mutant.old)
  if count != 1:
    raise ValueError(
      f"{mutant.name!r}: {mutant.file} holds {mutant.old!r} {count} times, not "
      "once. The code has changed: write the patch anew."
    )
  return text.replace(mutant.old, mutant.new)


def chosen(only: str) -> list[Mutant]:
  """Returns the mutants of a list of names, or all.

  Raises:
    ValueError: a name is unknown.
  """
  every = {mutant.name: mutant for mutant in EVERY}
  names = only.split(",") if only else list(every)
  unknown = sorted(set(names) - set(every))
  if unknown:
    raise ValueError(f"No mutant {unknown[0]!r}; --list shows all.")
  return [every[name] for name in names]


def run(mutant: Mutant, tree: pathlib.Path, widen: bool) -> str:
  """Returns the test that notices, "timeout", or "" where none does.

  Args:
    mutant: to apply.
    tree: a copy, as it should be; it is so again afterwards.
    widen: try all fast tests where the mutant's own do not notice.

  Raises:
    ValueError: the test fails without the mutant, too.
  """
  path = tree / "sesa_jax" / mutant.file
  text = path.read_text()
  path.write_text(apply(mutant, text))
  files = [f"tests/test_{name}.py" for name in mutant.tests.split()]
  try:
    noticed = failure(tree, files)
    if widen and not noticed:
      noticed = failure(tree, ["tests"])
  finally:
    path.write_text(text)
  if noticed not in ("", "timeout") and failure(tree, [noticed]):
    raise ValueError(f"{noticed} fails without {mutant.name!r}, too.")
  return noticed


def failure(tree: pathlib.Path, tests: Sequence[str]) -> str:
  """Runs tests of a tree up to the first that fails, and returns its name."""
  command = f"{sys.executable} -m pytest -x -q --tb=no -p no:cacheprovider"
  environment = os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
  try:
    done = subprocess.run(
      [*command.split(), "-m", "not slow and not compiles", *tests],
      cwd=tree,
      env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
      capture_output=True,
      text=True,
      timeout=SECONDS,
    )
  except subprocess.TimeoutExpired:
    return "timeout"
  if not done.returncode:
    return ""
  # The id of a test may hold spaces.
  said = r"^(?:FAILED|ERROR) (\S+?\[.*?\]|\S+)(?: - .*)?$"
  found = re.search(said, done.stdout, re.MULTILINE)
  if not found:
    raise ValueError(f"pytest ended without a result: {done.stdout[-2000:]}")
  return found[1]


def main() -> int:
  """Runs the mutants; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--list", action="store_true", help="names alone")
  parser.add_argument("--only", default="", help="names, divided by commas")
  parser.add_argument(
    "--widen", action="store_true", help="all fast tests for a survivor"
  )
  flags = parser.parse_args()
  survivors = 0
  with tempfile.TemporaryDirectory() as folder:
    tree = pathlib.Path(folder) / "tree"
    if not flags.list:
      shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
    for mutant in chosen(flags.only):
      if flags.list:
        print(f"{mutant.name:<48} {mutant.file}")
        continue
      began = time.monotonic()
      noticed = run(mutant, tree, flags.widen)
      survivors += not noticed
      seconds = time.monotonic() - began
      said = noticed.removeprefix("tests/") or "SURVIVED"
      print(f"{mutant.name:<48} {seconds:5.0f} s  {said}", flush=True)
  return int(survivors > 0)


if __name__ == "__main__":
  sys.exit(main())
