"""SESA on Qwen2.5-7B-Instruct.

    python -m sesa_jax.main --config=configs/qwen2_5_7b_instruct.py --workdir=W

Shows the paper's setting on Qwen/Qwen2.5-7B-Instruct. What it costs on a
machine, `--mode=plan --target=v5e:4x4` (or another target) says beforehand. The
published mean over seven sets, by a judge's verdicts, is 41.5 before training
(SSP's own), 49.5 for SSP and 51.0 with the bank. Only with the same search and
the same judge can one expect to come near. An outsider's base row lies 12
points lower: measure yours first.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(variant: str = "sesa") -> ConfigDict:
  """Returns the locked config."""
  config = common.get_config()
  config.name = "qwen2_5_7b_instruct"
  config.policy.path = "assets:qwen2-5-7b-instruct"
  config.machines = common.paper_machines(
    rollout_tensor=4, offload=True, pages=dict(v5e=4900)
  )
  return common.finish(config, variant)
