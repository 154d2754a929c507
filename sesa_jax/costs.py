"""What a policy costs: parameters, FLOPs and bytes, counted by hand.

A compiler's count misses what runs inside kernels, and counts a loop's body
once. Here every matmul is counted as 2 M N K, whatever the program does with
it; norms, activations and softmax, under two parts in a hundred, are not.
A token's attention costs as much as it sees, so sums over tokens come with
`context`, the sum over them of the tokens that each sees, itself included.
"""

from __future__ import annotations

import dataclasses

from sesa_jax.policy.backbones import Backbone

# FLOPs of attention's backward pass, in units of its forward: two matmuls
# forward, and backward what the kernel multiplies. XLA keeps the scores; cuDNN
# and blocks compute them again; splash does so twice, for queries and for keys.
ATTENTION_BACKWARD = {"xla": 2.0, "cudnn": 2.5, "blocks": 2.5, "splash": 3.5}
MASTER_BYTES = 4  # float32: weights, gradient, Adam's moments if not narrower


def layer_parameters(backbone: Backbone) -> int:
  """Returns the weights of one layer, norms and biases included."""
  kv = backbone.kv_heads * backbone.head_dim
  q = backbone.heads * backbone.head_dim
  norms = 2 * backbone.dim + 2 * backbone.head_dim * backbone.qk_norm
  return layer_kernels(backbone) + norms + (q + 2 * kv) * backbone.qkv_bias


def layer_kernels(backbone: Backbone) -> int:
  """Returns the weights of one layer that are multiplied with a token."""
  mixed = 2 * (backbone.heads + backbone.kv_heads) * backbone.head_dim
  return backbone.dim * (mixed + 3 * backbone.ffn)


def table_parameters(backbone: Backbone) -> int:
  """Returns the weights of one embedding, or head: V D, without padding."""
  return backbone.vocab_size * backbone.dim


def parameters(backbone: Backbone) -> int:
  """Returns all weights, as published: a tied head counts once."""
  tables = 1 if backbone.tied else 2
  return (
    tables * table_parameters(backbone)
    + backbone.layers * layer_parameters(backbone)
    + backbone.dim
  )


def context_of(start: int, stop: int) -> int:
  """Returns what the tokens at places start, ..., stop - 1 see together.

  sum_{i = start}^{stop - 1} (i + 1)
  """
  return (stop * (stop + 1) - start * (start + 1)) // 2


@dataclasses.dataclass(frozen=True)
class Flops:
  """Multiplications and additions, by what they are spent on."""

  layers: float  # projections and feed-forward
  attention: float
  head: float

  @property
  def total(self) -> float:
    """All of them."""
    return self.layers + self.attention + self.head

  def scaled(self, layers: float, attention: float, head: float) -> Flops:
    """Returns each part times a factor of its own."""
    return Flops(
      self.layers * layers, self.attention * attention, self.head * head
    )

  def __add__(self, other: Flops) -> Flops:
    """Adds part by part."""
    return Flops(
      self.layers + other.layers,
      self.attention + other.attention,
      self.head + other.head,
    )


def forward(
  backbone: Backbone, tokens: float, context: float, scored: float
) -> Flops:
  """Counts one forward pass.

    layers = 2 L (2 D (N + K) H + 3 D F) tokens
    attention = 4 L N H context
    head = 2 D V scored

  Args:
    backbone: the architecture.
    tokens: that pass the layers.
    context: sum over these tokens of the tokens that each sees.
    scored: tokens that pass the head.
  """
  width = backbone.heads * backbone.head_dim
  return Flops(
    2.0 * backbone.layers * layer_kernels(backbone) * tokens,
    4.0 * backbone.layers * width * context,
    2.0 * table_parameters(backbone) * scored,
  )


def gradient(
  backbone: Backbone,
  tokens: float,
  context: float,
  scored: float,
  *,
  remat: bool,
  attention: str,
) -> Flops:
  """Counts forward and backward passes of an update.

  Backward is twice the forward, one matmul for the inputs and one for the
  weights, and attention's own factor. `remat` computes the layers' forward a
  second time, but for the last matmul, whose output no gradient needs; the
  head's always is, chunk by chunk.

  Args:
    backbone: the architecture.
    tokens: in the rows, padding included.
    context: as of `forward`.
    scored: as of `forward`: the sampled ones.
    remat: full recomputation of each layer.
    attention: one of `ATTENTION_BACKWARD`.
  """
  last = backbone.dim * backbone.ffn / layer_kernels(backbone)
  again = 1.0 if remat else 0.0
  return forward(backbone, tokens, context, scored).scaled(
    layers=1 + again * (1 - last) + 2,
    attention=1 + again + ATTENTION_BACKWARD[attention],
    head=1 + 1 + 2,
  )


def apply_bytes(backbone: Backbone, moment_bytes: int = MASTER_BYTES) -> float:
  """Returns what Adam reads and writes: weights and moments, the gradient."""
  # The gradient is read twice: for its norm, and for the step.
  each = (2 + 2) * MASTER_BYTES + 2 * 2 * moment_bytes
  return each * float(parameters(backbone))


def kv_bytes(backbone: Backbone, itemsize: int = 2) -> int:
  """Returns the bytes of one token in the cache: 2 L K H itemsize."""
  heads = backbone.kv_heads * backbone.head_dim
  return 2 * backbone.layers * heads * itemsize


def step_weight_bytes(backbone: Backbone, itemsize: int = 2) -> float:
  """Returns the weights that one decode step reads: layers, norm, head."""
  # Of the embedding, only the rows of the tokens.
  layers = backbone.layers * layer_parameters(backbone)
  return itemsize * (layers + backbone.dim + table_parameters(backbone))


def decode_bytes(
  backbone: Backbone, rows: float, context: float, itemsize: int = 2
) -> float:
  """Returns what one decode step moves: weights, cache read, cache written.

    step_weight_bytes + kv_bytes (context + rows)

  Args:
    backbone: the architecture.
    rows: sequences, one new token each.
    context: sum over them of the tokens that each new one sees.
    itemsize: of weights and cache.
  """
  moved = kv_bytes(backbone, itemsize) * (context + rows)
  return step_weight_bytes(backbone, itemsize) + moved


def seconds(flops: float, moved: float, peak: float, bandwidth: float) -> float:
  """Returns the roofline: no machine that reaches its data sheet is faster.

    max(flops / peak, bytes / bandwidth)

  Source: Williams, Waterman and Patterson 2009, "Roofline".
  """
  return max(flops / peak, moved / bandwidth)
