"""SESA on Qwen3-0.6B, for the smallest budgets.

    python -m sesa_jax.main --config=configs/qwen3_0_6b.py --workdir=W

Shows the paper's setting on Qwen/Qwen3-0.6B. What it costs on a machine,
`--mode=plan --target=v5e:4x4` (or another target) says beforehand. Expect no
published number to compare with: the paper has no backbone so small.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(variant: str = "sesa") -> ConfigDict:
  """Returns the locked config."""
  config = common.get_config()
  config.name = "qwen3_0_6b"
  config.policy.path = "assets:qwen3-0-6b"
  config.machines = common.paper_machines()
  return common.finish(config, variant)
