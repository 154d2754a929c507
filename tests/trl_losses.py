"""Writes tests/trl_losses.json: what TRL makes of some numbers.

    python -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0
    trl/bin/python tests/trl_losses.py

TRL's own method computes the losses; a stand-in for its trainer gives it the
logprobs that are to be.
"""

import collections
import json
import random
import types
from pathlib import Path

import torch
import trl

PATH = Path(__file__).with_suffix(".json")
CASES = {  # ours: (TRL's loss, what its ratio is of)
  "grpo": ("grpo", "token"),
  "dapo": ("dapo", "token"),
  "dr_grpo": ("dr_grpo", "token"),
  "gspo": ("grpo", "sequence"),
}
SETTINGS = dict(clip_low=0.2, clip_high=0.285, kl_coefficient=0.05)
MOST_TOKENS, CAP = 11, 2.0
# Sampled ids and those of observations, then padding.
MASKS = [[1, 1, 0, 0, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0, 0]]
MASKS += [[1, 1, 1, 0, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]]
LENGTHS = [8, 1, 6, 5]


def numbers():
  rng = random.Random(2)

  def draw(spread):
    return [[rng.gauss(0, spread) for _ in row] for row in MASKS]

  new = [[x - 2 for x in row] for row in draw(0.5)]

  def near(spread):
    return [
      [x + d for x, d in zip(*rows, strict=True)]
      for rows in zip(new, draw(spread), strict=True)
    ]

  old = near(0.6)
  return dict(
    new=new,
    old=old,
    engine=near(0.4),
    reference=near(0.6),
    advantages=[rng.gauss(0, 1) for _ in MASKS],
    mask=MASKS,
  )


def trl_loss(values, loss_type, level):
  new = torch.tensor(values["new"], dtype=torch.float64, requires_grad=True)
  old, engine, reference = (
    torch.tensor(values[name], dtype=torch.float64)
    for name in ("old", "engine", "reference")
  )
  mask = torch.tensor(MASKS)
  ids = torch.zeros(mask.shape, dtype=torch.long)
  read = torch.tensor([[i < n for i in range(mask.shape[1])] for n in LENGTHS])
  trainer = types.SimpleNamespace(
    aux_loss_enabled=False,
    top_entropy_quantile=1.0,
    off_policy_mask_threshold=None,
    importance_sampling_level=level,
    loss_type=loss_type,
    beta=SETTINGS["kl_coefficient"],
    epsilon_low=SETTINGS["clip_low"],
    epsilon_high=SETTINGS["clip_high"],
    use_vllm=True,
    vllm_importance_sampling_correction=True,
    max_completion_length=MOST_TOKENS,
    current_gradient_accumulation_steps=1,
    _entropy_bonus_enabled=False,
    _metrics={"train": collections.defaultdict(list)},
    model=types.SimpleNamespace(training=True),
    args=types.SimpleNamespace(
      delta=None, use_bias_correction_kl=False, steps_per_generation=1
    ),
    accelerator=types.SimpleNamespace(
      num_processes=1,
      reduce=lambda x, reduction: x,
      gather=lambda x: x,
    ),
    _get_per_token_logps_and_entropies=lambda *a, **k: (
      new,
      torch.zeros_like(new),
      None,
    ),
  )
  loss = trl.GRPOTrainer._compute_loss(
    trainer,
    trainer.model,
    dict(
      prompt_ids=ids[:, :0],
      prompt_mask=ids[:, :0],
      completion_ids=ids,
      completion_mask=read.long(),
      tool_mask=mask,
      advantages=torch.tensor(values["advantages"], dtype=torch.float64),
      old_per_token_logps=old,
      ref_per_token_logps=reference,
      importance_sampling_ratio=torch.exp(old - engine).clamp(max=CAP),
      num_items_in_batch=mask.sum(),
    ),
  )
  loss.backward()
  return dict(loss=loss.item(), gradient=new.grad.tolist())


def main():
  values = numbers()
  losses = {name: trl_loss(values, *case) for name, case in CASES.items()}
  PATH.write_text(
    json.dumps(
      dict(
        trl=trl.__version__,
        settings=SETTINGS | dict(importance_cap=CAP),
        most_tokens=MOST_TOKENS,
        values=values,
        losses=losses,
      )
    )
    + "\n"
  )


if __name__ == "__main__":
  main()
