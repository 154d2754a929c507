"""SESA on Llama-3.1-8B, a base model without a chat template.

    python -m sesa_jax.main --config=configs/llama3_1_8b.py --workdir=W

Shows the paper's setting on meta-llama/Llama-3.1-8B, whose `native` template is
the raw text of `search_r1`. What it costs on a machine,
`--mode=plan --target=v5e:4x4` (or another target) says beforehand. The
published mean over seven sets, by a judge's verdicts, is 36.7 before training
(derived), 46.3 for SSP (derived) and 47.5 with the bank. Only with the same
search and the same judge can one expect to come near.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(variant: str = "sesa") -> ConfigDict:
  """Returns the locked config."""
  config = common.get_config()
  config.name = "llama3_1_8b"
  config.policy.path = "assets:llama3-1-8b"
  config.machines = common.paper_machines(
    rollout_tensor=4, offload=True, pages=dict(v5e=2000, v6e=3400)
  )
  return common.finish(config, variant)
