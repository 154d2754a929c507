"""What the engine runs on the devices: prefill, page copies, the decode loop.

Every program is one `shard_map`, manual over the whole mesh (data, tensor). A
data shard has slots, pages and tables of its own, and decodes at its own pace:
nothing crosses "data". Over "tensor", heads, ffn and vocabulary are cut.

Letters: D data shards; of one of them R rows, P pages of S tokens, page 0
trash, W pages of the longest episode, T tokens of a prefill batch. What the
host sends and gets has an axis D; a pool holds the pages of all shards, D P.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from sesa_jax.engine import attention, pages, sampling
from sesa_jax.policy import model, sharding

# Why a row stopped decoding. RUNNING must be 0.
RUNNING, STOP, EOS, TURN_TOKENS, EPISODE_TOKENS = range(5)
REASONS = ("running", "stop", "eos", "turn_tokens", "episode_tokens")

_DATA = PartitionSpec("data")


@dataclasses.dataclass(frozen=True)
class Layout:
  """All that the compiled programs depend on; equal ones share programs."""

  graphdef: model.Decoder  # of `cut_vocabulary`
  mesh: Mesh  # of `sharding.rollout_mesh`
  kind: str  # of `attention.KINDS`
  dtype: Any  # of weights and pages
  rows: tuple[
    int, ...
  ]  # R of the decode loop, ascending; the last is all slots
  pages: int  # P
  page_size: int  # S
  width: int  # W
  prefill_tokens: tuple[int, ...]  # T, ascending
  prefill_rows: int  # R of a prefill batch
  steps: int  # ids that one call of the decode loop adds to a row at most
  ends: int  # ids that end a turn
  widths: tuple[int, ...] = ()  # narrower tables for the decode loop, ascending

  @property
  def attention(self) -> attention.Kind:
    """How pages are laid out and attended to."""
    return attention.KINDS[self.kind]

  @property
  def data(self) -> int:
    """D."""
    return self.mesh.shape["data"]

  @property
  def axis(self) -> str | None:
    """The mesh axis that cuts the model, if it is cut."""
    return "tensor" if self.mesh.shape["tensor"] > 1 else None

  @property
  def contiguous(self) -> bool:
    """Whether a slot has pages of its own, in order, and shares none."""
    return self.kind == "cudnn_contiguous"

  @property
  def slots(self) -> int:
    """Episodes that one data shard plays at a time."""
    return self.rows[-1]


class Batch(NamedTuple):
  """A flat, ragged prefill batch: row r has the tokens cu[r]:cu[r + 1]."""

  ids: Int[Array, "D T"]
  positions: Int[Array, "D T"]
  pages: Int[Array, "D T"]  # where keys and values go; trash for padding
  offsets: Int[Array, "D T"]
  kv_lens: Int[Array, "D R"]  # with this batch's tokens, which are the last
  tables: Int[Array, "D R W"]
  cu: Int[Array, "D R+1"]
  rows: Int[Array, " D"]  # that are real, the first ones


class Rows(NamedTuple):
  """What decoding reads and changes of every row."""

  token: Int[Array, "D R"]  # the last id, not yet in the pool
  position: Int[Array, "D R"]  # where that id goes
  stop_state: Int[Array, "D R"]  # of the stop automaton
  reason: Int[Array, "D R"]  # RUNNING or why it stopped
  turn_left: Int[Array, "D R"]  # ids that this turn may still sample
  episode_left: Int[Array, "D R"]  # ids that the episode may still hold
  key: UInt32[Array, "D R 2"]  # of (seed, iteration, question, attempt)
  temperature: Float[Array, "D R"]
  top_p: Float[Array, "D R"]
  top_k: Int[Array, "D R"]


class Decoded(NamedTuple):
  """What a call of the decode loop brings to the host."""

  ids: Int[Array, "D R steps"]
  logprobs: Float[Array, "D R steps"]
  counts: Int[Array, "D R"]  # ids that were sampled
  reason: Int[Array, "D R"]
  stop_state: Int[Array, "D R"]
  steps: Int[Array, " D"]  # that the loop took


class Programs(NamedTuple):
  """Jitted programs of a layout; pools are donated."""

  pool: Callable[[], Any]  # -> zeros, a list with one tree a layer
  prefill: Callable[..., Any]  # weights, pool, Batch -> pool
  copy: Callable[..., Any]  # pool, source [D, R], target [D, R] -> pool
  # weights, pool, Rows, tables [D, R, W], stop table, end ids, leave
  #   -> pool, Decoded
  decode: Callable[..., Any]
  decode_cut: Callable[..., Any]  # the same, with top_p and top_k


def cut_vocabulary(graphdef: model.Decoder, tensor: int) -> model.Decoder:
  """The same decoder, with tables that `tensor` devices can share.

  Each gets whole blocks of sampling.
  """
  backbone = graphdef.backbone
  multiple = math.lcm(backbone.vocab_multiple, sampling.BLOCK * tensor)
  backbone = dataclasses.replace(backbone, vocab_multiple=multiple)
  return dataclasses.replace(graphdef, backbone=backbone)


def cast(params: Any, graphdef: model.Decoder, dtype: Any) -> Any:
  """Turns masters into rollout weights: cast, unstacked, vocabulary padded."""
  rows = graphdef.backbone.table_rows
  weights = model.unstack(params, dtype)
  for name in {"embed", "head"} & set(weights):
    table = weights[name]["embedding"]
    missing = rows - table.shape[0]
    weights[name] = dict(embedding=jnp.pad(table, ((0, missing), (0, 0))))
  return weights


def weight_shapes(layout: Layout) -> Any:
  """Shapes and shardings of the rollout weights."""
  shapes = jax.eval_shape(
    functools.partial(cast, graphdef=layout.graphdef, dtype=layout.dtype),
    model.abstract_params(layout.graphdef.backbone),
  )
  return _placed(shapes, sharding.shardings(layout.mesh, shapes))


def arguments(
  layout: Layout, *, tokens: int | None = None, rows: int | None = None
) -> dict[str, tuple[Any, ...]]:
  """The arguments of each of `Programs`, as shapes with shardings.

  So that programs can be lowered for a mesh of devices that are not here.

  Args:
    layout: of the programs.
    tokens: T; the largest by default.
    rows: R of the decode loop; the largest by default.
  """
  tokens, rows = tokens or layout.prefill_tokens[-1], rows or layout.slots
  here = NamedSharding(layout.mesh, _DATA)
  everywhere = NamedSharding(layout.mesh, PartitionSpec())

  def shape(*sizes: int, dtype: Any = jnp.int32, where: Any = here) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

  D, W, many = layout.data, layout.width, layout.prefill_rows
  batch = Batch(
    *(shape(D, tokens) for _ in range(4)),
    kv_lens=shape(D, many),
    tables=shape(D, many, W),
    cu=shape(D, many + 1),
    rows=shape(D),
  )
  state = Rows(*(shape(D, rows) for _ in Rows._fields))._replace(
    key=shape(D, rows, 2, dtype=jnp.uint32),
    temperature=shape(D, rows, dtype=jnp.float32),
    top_p=shape(D, rows, dtype=jnp.float32),
  )
  weights = weight_shapes(layout)
  pool = jax.eval_shape(programs(layout).pool)
  pool = _placed(pool, _pool_shardings(layout))
  vocabulary = layout.graphdef.backbone.vocab_size
  decoding = (
    weights,
    pool,
    state,
    shape(D, rows, W),
    shape(32, vocabulary, dtype=jnp.int16, where=everywhere),
    shape(layout.ends, where=everywhere),
    shape(where=everywhere),
  )
  pairs = shape(D, layout.slots)
  return dict(
    pool=(),
    prefill=(weights, pool, batch),
    copy=(pool, pairs, pairs),
    decode=decoding,
    decode_cut=decoding,
  )


def _placed(shapes: Any, shardings: Any) -> Any:
  return jax.tree.map(
    lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
    shapes,
    shardings,
  )


def _pool_specs(layout: Layout) -> list[Any]:
  """Of a pool whose first axis holds the pages of all data shards, D P.

  With an axis for D, of length 1 on a device, XLA's CPU compiler would copy a
  pool of one key-value head before and after each program.
  """
  layer = jax.tree.map(
    lambda spec: PartitionSpec(spec[0], *spec[2:]),
    layout.attention.pool_spec,
    is_leaf=lambda x: isinstance(x, PartitionSpec),
  )
  return [layer] * layout.graphdef.backbone.layers


def _pool_shardings(layout: Layout) -> Any:
  return _shardings(layout, _pool_specs(layout))


def _shardings(layout: Layout, specs: Any) -> Any:
  return jax.tree.map(
    lambda spec: NamedSharding(layout.mesh, spec),
    specs,
    is_leaf=lambda x: isinstance(x, PartitionSpec),
  )


@functools.lru_cache(maxsize=16)
def programs(layout: Layout) -> Programs:
  """Returns the programs of a layout. Nothing is compiled yet."""
  pool = _pool_specs(layout)
  weights = jax.tree.map(lambda x: x.sharding.spec, weight_shapes(layout))
  batch = Batch(*[_DATA] * len(Batch._fields))
  rows = Rows(*[_DATA] * len(Rows._fields))
  decoded = Decoded(*[_DATA] * len(Decoded._fields))
  same = PartitionSpec()
  looping = ((weights, pool, rows, _DATA, same, same, same), (pool, decoded), 1)
  return Programs(
    pool=_program(layout, _pool, (), pool),
    prefill=_program(layout, _prefill, (weights, pool, batch), pool, 1),
    copy=_program(layout, _copy, (pool, _DATA, _DATA), pool, 0),
    decode=_program(layout, functools.partial(_decode, cut=False), *looping),
    decode_cut=_program(layout, functools.partial(_decode, cut=True), *looping),
  )


def _program(
  layout: Layout,
  function: Callable[..., Any],
  takes: tuple[Any, ...],
  gives: Any,
  donated: int | None = None,
) -> Callable[..., Any]:
  """Jits a function of what one device holds."""
  mapped = jax.shard_map(
    functools.partial(function, layout),
    mesh=layout.mesh,
    in_specs=takes,
    out_specs=gives,
    # Rows that are the same on all of "tensor" come from gathered values,
    # which the check cannot know.
    check_vma=False,
  )
  return jax.jit(
    mapped,
    in_shardings=_shardings(layout, takes),
    out_shardings=_shardings(layout, gives),
    donate_argnums=() if donated is None else donated,
  )


def _own(tree: Any) -> Any:
  """Drops the data axis, which has length 1 on a device."""
  return jax.tree.map(lambda x: x[0], tree)


def _all(tree: Any) -> Any:
  return jax.tree.map(lambda x: x[None], tree)


def _pool(layout: Layout) -> list[Any]:
  backbone = layout.graphdef.backbone
  heads = backbone.kv_heads // layout.mesh.shape["tensor"]
  layer = functools.partial(
    layout.attention.pool,
    layout.pages,
    layout.page_size,
    heads,
    backbone.head_dim,
    layout.dtype,
  )
  return [layer() for _ in range(backbone.layers)]


def _copy(layout: Layout, pool: Any, source: Array, target: Array) -> Any:
  """Copies whole pages: of a prompt's last one, each attempt gets its own."""
  del layout
  source, target = source[0], target[0]
  return jax.tree.map(lambda x: x.at[target].set(x[source]), pool)


def _prefill(layout: Layout, weights: Any, pool: Any, batch: Batch) -> Any:
  """Writes the keys and values of a batch's tokens."""
  batch = _own(batch)
  # A loop, which a shard without any token skips.
  return jax.lax.fori_loop(
    0,
    jnp.minimum(batch.rows, 1),
    lambda _, pool: _write(layout, weights, pool, batch),
    pool,
  )


def _write(layout: Layout, weights: Any, pool: Any, batch: Batch) -> Any:
  kind, new = layout.attention, list(pool)
  real = jnp.arange(batch.ids.shape[0]) < batch.cu[batch.rows]

  def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
    new[layer] = kind.write(pool[layer], k, v, batch.pages, batch.offsets)
    out = kind.attend(
      q,
      new[layer],
      batch.kv_lens,
      batch.tables,
      batch.cu,
      batch.rows,
      decode=False,
    )
    # Whatever padding gives must not make the trash page infinite.
    return jnp.where(real[:, None, None], out, 0)

  # Nobody asks for the result: the compiler drops what only it needs.
  model.decode(
    layout.graphdef, weights, batch.ids, batch.positions, attend, layout.axis
  )
  return new


def _decode(
  layout: Layout,
  weights: Any,
  pool: Any,
  rows: Rows,
  tables: Array,
  stops: Array,
  ends: Array,
  leave: Array,
  *,
  cut: bool,
) -> tuple[Any, Decoded]:
  """Decodes up to `layout.steps` ids in every running row.

  Leaves early when `leave` rows have stopped since it began. A row that does
  not run writes to the trash page and has a length of 1: it costs nothing but
  its place in matmuls.
  """
  rows, tables = _own(rows), tables[0]
  began = rows.reason
  count = rows.token.shape[0]

  def body(carry: Any) -> Any:
    step, pool, rows, out = carry
    running = rows.reason == RUNNING
    pool, hidden = _step(layout, weights, pool, rows, tables)
    drawn, logprob = sampling.sample(
      model.logits(layout.graphdef, weights, hidden, layout.axis),
      rows.key,
      rows.position + 1,
      rows.temperature,
      (rows.top_p, rows.top_k) if cut else None,
      layout.axis,
    )
    after = _advance(rows, drawn, stops, ends)
    rows = jax.tree.map(
      lambda new, old: jnp.where(
        running.reshape(-1, *[1] * (new.ndim - 1)), new, old
      ),
      after,
      rows,
    )
    ids, logprobs, counts = out
    ids = ids.at[:, step].set(drawn)
    logprobs = logprobs.at[:, step].set(logprob)
    return step + 1, pool, rows, (ids, logprobs, counts + running)

  def goes_on(carry: Any) -> Array:
    step, _, rows, _ = carry
    stopped = jnp.sum((rows.reason != RUNNING) & (began == RUNNING))
    running = jnp.any(rows.reason == RUNNING)
    return (step < layout.steps) & running & (stopped < leave)

  out = (
    jnp.zeros((count, layout.steps), jnp.int32),
    jnp.zeros((count, layout.steps), jnp.float32),
    jnp.zeros(count, jnp.int32),
  )
  step, pool, rows, out = jax.lax.while_loop(
    goes_on, body, (jnp.int32(0), pool, rows, out)
  )
  decoded = Decoded(*out, rows.reason, rows.stop_state, step)
  return pool, _all(decoded)


def _step(
  layout: Layout, weights: Any, pool: Any, rows: Rows, tables: Array
) -> tuple[Any, Array]:
  """One forward over the rows' last ids; returns the pool and hidden [R, D]."""
  kind, count = layout.attention, rows.token.shape[0]
  running = rows.reason == RUNNING
  entry = rows.position // layout.page_size
  page = jnp.take_along_axis(tables, entry[:, None], 1)[:, 0]
  page = jnp.where(running, page, pages.TRASH)
  offset = jnp.where(running, rows.position % layout.page_size, 0)
  kv_lens = jnp.where(running, rows.position + 1, 1)
  new = list(pool)

  def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
    new[layer] = kind.write(pool[layer], k, v, page, offset)
    return kind.attend(
      q,
      new[layer],
      kv_lens,
      tables,
      jnp.arange(count + 1, dtype=jnp.int32),
      jnp.int32(count),
      decode=True,
    )

  hidden = model.decode(
    layout.graphdef, weights, rows.token, rows.position, attend, layout.axis
  )
  return new, hidden


def _advance(rows: Rows, drawn: Array, stops: Array, ends: Array) -> Rows:
  """The rows after an id, as if all of them ran."""
  hit = stops.shape[0] - 1
  state = stops[rows.stop_state, drawn].astype(jnp.int32)
  turn_left, episode_left = rows.turn_left - 1, rows.episode_left - 1
  # The last one that holds is the reason.
  reason = jnp.where(episode_left <= 0, EPISODE_TOKENS, RUNNING)
  reason = jnp.where(turn_left <= 0, TURN_TOKENS, reason)
  reason = jnp.where((drawn[:, None] == ends).any(-1), EOS, reason)
  reason = jnp.where(state == hit, STOP, reason)
  return rows._replace(
    token=drawn,
    position=rows.position + 1,
    stop_state=state,
    reason=reason,
    turn_left=turn_left,
    episode_left=episode_left,
  )
