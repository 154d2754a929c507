"""SESA on Qwen2.5-7B, a base model.

    python -m sesa_jax.main --config=configs/qwen2_5_7b.py --workdir=W

Shows the paper's setting on Qwen/Qwen2.5-7B. What it costs on a machine,
`--mode=plan --target=v5e:4x4` (or another target) says beforehand. The
published mean over seven sets, by a judge's verdicts, is 22.3 before training
and 48.7 for SSP (both SSP's own) and 50.8 with the bank (derived). Only with
the same search and the same judge can one expect to come near.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(variant: str = "sesa") -> ConfigDict:
  """Returns the locked config."""
  config = common.get_config()
  config.name = "qwen2_5_7b"
  config.policy.path = "assets:qwen2-5-7b"
  config.machines = common.paper_machines(
    rollout_tensor=4, offload=True, pages=dict(v5e=4900)
  )
  return common.finish(config, variant)
