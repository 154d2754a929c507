"""SESA on Search-R1's 7B model, which has learned to search.

    python -m sesa_jax.main --config=configs/search_r1_7b.py --workdir=W

Shows the paper's setting on the weights, of Qwen2.5's architecture,

    PeterJinGo/SearchR1-nq_hotpotqa_train-qwen2.5-7b-em-ppo-v0.2

What it costs on a machine, `--mode=plan --target=v5e:4x4` (or another target)
says beforehand. The prompts keep the layout that it was trained with; the
paper's are not known. The published mean over seven sets, by a judge's
verdicts, is 53.9 before training, 55.7 for SSP and 57.5 with the bank. Only
with the same search and the same judge can one expect to come near.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(variant: str = "sesa") -> ConfigDict:
  """Returns the locked config."""
  config = common.get_config()
  config.name = "search_r1_7b"
  config.policy.path = "assets:search-r1-7b"
  config.policy.template = "search_r1"
  config.machines = common.paper_machines(
    rollout_tensor=4, offload=True, pages=dict(v5e=4900)
  )
  return common.finish(config, variant)
