"""The paper's ablations on Qwen3-4B, and two halves of one of them.

    python -m sesa_jax.main --config=configs/ablations.py:no_gate --workdir=W

Shows what each part of the method is worth: one switch a variant, all else as
in `qwen3_4b.py`; docs/presets.md says which. Each costs what that one does.
Published means over seven sets, by a judge's verdicts: 56.2 in full, 54.7
without priming, 54.0 without frontier shaping, 53.5 without distillation. The
differences are of one to three points, near one sigma of one run: a claim
needs several seeds. The other variants are ours, the last one a control.
"""

from ml_collections import ConfigDict

from configs import common, qwen3_4b

VARIANTS = (
  "sesa",
  "no_priming",
  "no_distillation",
  "no_frontier",
  "no_bell",
  "no_gate",
  "placebo",
  "permuted_rewards",
)


def get_config(variant: str = "sesa") -> ConfigDict:
  """Returns the locked config."""
  config = qwen3_4b.get_config().copy_and_resolve_references().unlock()
  config.name = "ablations"
  return common.finish(config, variant, VARIANTS)


def sweep() -> tuple[str, ...]:
  """Returns a --config of each run, the full method first."""
  return tuple(f"configs/ablations.py:{name}" for name in VARIANTS)
