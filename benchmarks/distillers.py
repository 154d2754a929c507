"""What becomes of 60 failures, by who writes their skills.

    python -m benchmarks.distillers --distillers=offline,solver
    python -m benchmarks.distillers --distillers=chat \
      --config=configs/qwen3_4b.py --config.judge.base_url=http://HOST/v1

Each record of benchmarks/failures.jsonl, written by us about invented people,
places and works, is a case of its own, with no skills shown. What is written
passes the leak guard and then admission to a bank of the 15 seeds, in the order
of the file. Encoder, threshold, policy and judge are the config's.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table
from absl import app, flags
from ml_collections import config_flags

from sesa_jax import config as config_lib
from sesa_jax import loop, tools
from sesa_jax.language import ENGLISH
from sesa_jax.search import engines
from sesa_jax.skills import bank as skill_bank
from sesa_jax.stages import distillation, priming
from sesa_jax.types import Case, DistillFailure, Encoder, FailureRecord, Skill

FILE = Path(__file__).with_name("failures.jsonl")
# A case is longer than an episode of the demo.
CASE_TOKENS, SKILL_TOKENS = 1536, 256
OUTCOMES = ("admitted", "leaked", "duplicate", "malformed", "lost")

Write = Callable[[Sequence[Case]], list[Skill | DistillFailure]]


def read() -> list[FailureRecord]:
  """Returns the 60 records."""
  lines = FILE.read_text("utf-8").splitlines()
  return [distillation.from_json(json.loads(line)) for line in lines]


def measure(
  write: Write,
  records: Sequence[FailureRecord],
  encoder: Encoder,
  threshold: float,
) -> dict[str, float]:
  """Writes a skill from each record and counts what becomes of it.

  Args:
    write: of a distiller.
    records: a case each.
    encoder: of the bank.
    threshold: of the encoder.

  Returns:
    The share of each of OUTCOMES, which sum to 1, and seconds a record.
  """
  bank = skill_bank.create(800, encoder.dim)
  bank, _ = priming.prime(bank, "seeds15", encoder)
  cases = [Case((record,), ()) for record in records]
  began = time.perf_counter()
  written = write(cases)
  seconds = time.perf_counter() - began
  _, _, report = distillation.land(
    bank,
    tuple(records),
    cases,
    written,
    origin="chat",
    encoder=encoder,
    language=ENGLISH,
    iteration=1,
    threshold=threshold,
  )
  counts = Counter(
    _outcome(row["outcome"], row["reason"])
    for row in report.rows
    if "outcome" in row
  )
  counts["lost"] = int(report.metrics["distillation/outages"])
  counts["malformed"] -= counts["lost"]
  found = {name: counts[name] / len(records) for name in OUTCOMES}
  return found | {"seconds": seconds / len(records)}


def _outcome(outcome: str, reason: str) -> str:
  if outcome == "rejected":
    return "leaked" if reason.startswith("leak_") else "duplicate"
  return "malformed" if outcome == "failed" else outcome


def writer(name: str, config: Any) -> Write:
  """Returns what a distiller of that name writes under a config."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.distillation.distiller = name
    config.verifier.answerer = "solver"  # no evidence is checked
    if name == "solver":
      config.verifier.max_tokens = max(config.verifier.max_tokens, CASE_TOKENS)
      config.distillation.tokens = SKILL_TOKENS
  if name != "solver":
    tools.check_judge(config)
    return tools.distiller(config, tools.judge(config)).distill_all
  world = tools.assemble(config, tools.Texts(engines.nothing(), (), (), {}))
  return lambda cases: loop.write_skills(
    cases, world.references["solver"], world, config, 0
  )


def main(_: Sequence[str]) -> None:
  """Prints a row a distiller."""
  config = flags.FLAGS.config
  encoder = tools.load_encoder(config.encoder)
  records = read()[: flags.FLAGS.records]
  table = rich.table.Table(
    title=f"{len(records)} failures, {config.encoder.path} at "
    f"{config.encoder.threshold}",
    box=rich.box.SIMPLE_HEAD,
  )
  for column in ("distiller", *OUTCOMES, "s a record"):
    table.add_column(column)
  for name in flags.FLAGS.distillers:
    found = measure(
      writer(name, config), records, encoder, config.encoder.threshold
    )
    shares = (f"{found[outcome]:.3f}" for outcome in OUTCOMES)
    table.add_row(name, *shares, f"{found['seconds']:.2f}")
  rich.console.Console().print(table)


if __name__ == "__main__":
  config_flags.DEFINE_config_file(
    "config", "configs/smollm2_135m.py", "Encoder, policy and judge."
  )
  flags.DEFINE_list(
    "distillers", ["offline"], f"Some of {', '.join(config_lib.DISTILLERS)}."
  )
  flags.DEFINE_integer("records", 60, "The first so many.")
  app.run(main)
