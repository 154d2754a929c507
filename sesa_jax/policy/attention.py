"""Attention of the training forward."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int


def train_attention(
  q: Float[Array, "B T N H"],
  k: Float[Array, "B T K H"],
  v: Float[Array, "B T K H"],
  segments: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
  """Attends to earlier tokens of the same segment.

    out_i = sum_j softmax_j(q_i . k_j / sqrt(H)) v_j,
    over j <= i with segments_j = segments_i

  Query head n reads key-value head n // (N / K). The softmax is float32.
  Order is that of the row, so positions need not be known here.
  """
  same = segments[:, None, :, None] == segments[:, None, None, :]
  return jax.nn.dot_product_attention(
    q, k, v, mask=same, is_causal=True, implementation="xla"
  )
