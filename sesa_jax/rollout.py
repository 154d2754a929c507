"""A policy's weights on their way into a rollout, checked when they are there.

A copy that went wrong trains happily: its samples look like text, and only the
importance weights say that another policy drew them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from sesa_jax import distributed, types

# Mean |engine - learner| in nats that numerics explain. Other weights are off
# by a nat or so; two kernels in bfloat16 by a few hundredths.
GAP_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}


def weights(engine: Any, learner: Any, params: Any) -> tuple[Any, float]:
  """Casts a policy's masters for the engine and compares both.

  The engine plays a fixed prompt on every data shard, and the learner scores
  the ids that it sampled: the programs are those of a run.

  Args:
    engine: `engine.Engine`.
    learner: `learner.Learner`, of the policy.
    params: its masters.

  Returns:
    The rollout weights and the mean |engine - learner| of the logprobs.

  Raises:
    types.Stopped: they differ by more than numerics explain.
  """
  copy = engine.load(params)
  episodes = distributed.gather(engine.probe(copy))  # of every host's copy
  gap, _ = gaps(episodes, learner.score(params, episodes, temperature=1.0))
  limit = GAP_LIMITS[jnp.dtype(learner.compute_dtype).name]
  if not gap <= limit:  # NaN is no small gap
    raise types.Stopped(
      f"After the cast of a policy's weights for the rollout, engine and "
      f"learner differ by {gap:.3g} nats a token on a fixed prompt; at "
      f"{learner.compute_dtype} at most {limit:g} is expected. Run "
      "--mode=selftest on this machine; the same command resumes."
    )
  return copy, gap


def gaps(
  episodes: Sequence[types.Episode], scores: Sequence[np.ndarray]
) -> tuple[float, float]:
  """Returns mean and maximum of |engine - learner| over the sampled ids.

  Args:
    episodes: with the engine's logprobs.
    scores: the learner's, [T] for each episode.
  """
  found = [
    np.abs(episode.logprobs - score)[episode.mask]
    for episode, score in zip(episodes, scores, strict=True)
  ]
  every = np.concatenate(found) if found else np.zeros(0)
  return (float(every.mean()), float(every.max())) if every.size else (0.0, 0.0)
