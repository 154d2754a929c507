"""What SESA is compared with, on Qwen3-4B: other methods by the same code.

    python -m sesa_jax.main --config=configs/baselines.py:ssp_code --workdir=W

Shows how far other ways of training the same backbone come, with the same
search, judge and sizes; docs/presets.md says item by item what each does.
`search_r1` and `fixed_questions` train on questions with known answers and need
a file of them: `--config.pool.fixed.train.path=FILE`. The published mean of SSP
over seven sets is 53.9, by a judge's verdicts; the others have none on this
backbone.
"""

from ml_collections import ConfigDict

from configs import common, qwen3_4b

VARIANTS = (
  "sesa",
  "ssp_paper",
  "ssp_code",
  "search_r1",
  "fixed_questions",
  "fixed_challenger",
  "shared_weights",
)


def get_config(variant: str = "sesa") -> ConfigDict:
  """Returns the locked config."""
  config = qwen3_4b.get_config().copy_and_resolve_references().unlock()
  config.name = "baselines"
  return common.finish(config, variant, VARIANTS)


def sweep() -> tuple[str, ...]:
  """Returns a --config of each run, the method itself first."""
  return tuple(f"configs/baselines.py:{name}" for name in VARIANTS)
