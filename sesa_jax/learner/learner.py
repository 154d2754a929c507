"""The update: lessons in, better weights out.

Three programs, compiled once for each length of row and shared by learners
that differ in rates only: `score` (logprobs of old weights and of the
reference), `accumulate` (adds a micro-batch's gradient) and `apply` (divides
once, clips, steps). State is donated and stays where `policy.sharding` puts it.
Where episodes are imitated `imitate` stands in the place of `accumulate`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sesa_jax import distributed, types
from sesa_jax.learner import grpo, logprobs, packing, supervised
from sesa_jax.policy import attention, model, sharding

MAX_SKIPPED = 3  # updates in a row


class NonFiniteUpdate(FloatingPointError):
  """Updates in a row had a loss or a gradient that is not a number."""


class OptState(NamedTuple):
  """Moments, and what must survive a restart beside them."""

  adam: Any  # or Muon's, see `supervised.OPTIMIZERS`
  skipped: Any  # int32 [], updates skipped in a row


class Rates(NamedTuple):
  """Numbers that may change without a compilation."""

  temperature: float
  loss_scale: float
  clip_low: float
  clip_high: float
  kl_coefficient: float
  entropy_coefficient: float
  importance_cap: float
  learning_rate: float
  warmup_updates: float


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What a compiled program depends on. Equal recipes share programs."""

  graphdef: model.Decoder
  mesh: Mesh
  ratio: str
  entropy_bonus: bool
  compute_dtype: str
  attention: str
  remat: bool
  chunk_tokens: int
  offload: bool
  adam_b1: float
  adam_b2: float
  adam_eps: float
  moments: str
  weight_decay: float
  gradient_clip: float
  optimizer: str


class Programs(NamedTuple):
  """Jitted functions, and where a policy and a batch live."""

  start: Callable  # params -> Policy
  score: Callable  # params, batch, temperature -> logprobs [B, T]
  zeros: Callable  # params -> gradient, Sums
  accumulate: Callable
  imitate: Callable
  apply: Callable
  policy: types.Policy  # of shardings, between updates
  working: types.Policy  # of shardings, in `apply`
  reference: Any  # of shardings, of the frozen weights between updates
  rows: NamedSharding


@functools.lru_cache(maxsize=8)
def programs(recipe: Recipe) -> Programs:
  """Returns the programs of a recipe. Compilation waits for the first call."""
  tx = optax.chain(
    supervised.OPTIMIZERS[recipe.optimizer](
      recipe.adam_b1, recipe.adam_b2, recipe.adam_eps, recipe.moments
    ),
    optax.add_decayed_weights(recipe.weight_decay, mask=decayed),
  )
  abstract = model.abstract_params(recipe.graphdef.backbone)

  def start(weights):
    # Copied: the policy is donated to its updates, the weights may be the
    # reference, or another policy's, too.
    return types.Policy(
      jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), weights),
      OptState(
        narrowed(tx.init(weights), recipe.moments), jnp.zeros((), jnp.int32)
      ),
      jnp.zeros((), jnp.int32),
    )

  # Moments end in the paths of their weights, so one table places both.
  working = sharding.shardings(recipe.mesh, jax.eval_shape(start, abstract))
  policy, params = working, working.params
  reference = _on_host(params) if recipe.offload else params
  if recipe.offload:
    adam = _on_host(working.opt_state.adam)
    policy = working._replace(opt_state=working.opt_state._replace(adam=adam))
  everywhere = NamedSharding(recipe.mesh, PartitionSpec())
  rows = NamedSharding(recipe.mesh, PartitionSpec("fsdp", None))

  first = recipe.mesh.devices.flat[0]
  several_on_cpu = recipe.mesh.size > 1 and first.platform == "cpu"

  def forward(weights, batch, temperature):
    hidden = model.hidden(
      recipe.graphdef,
      weights,
      batch.ids,
      batch.positions,
      batch.segments,
      compute_dtype=jnp.dtype(recipe.compute_dtype),
      remat=recipe.remat,
      attention=attention.training(recipe.attention, recipe.mesh),
    )
    return logprobs.token_logprobs(
      _projection(recipe, weights),
      hidden,
      batch.ids,
      batch.mask,
      temperature=temperature,
      chunk_tokens=recipe.chunk_tokens,
      entropy_gradient=recipe.entropy_bonus,
      skip_chunks=not several_on_cpu,
    )

  def score(weights, batch, temperature):
    return forward(weights, batch, temperature)[0]

  def zeros(weights):
    return jax.tree.map(jnp.zeros_like, weights), grpo.zero_sums()

  def accumulate(gradient, sums, weights, batch, old, reference, single, rates):
    def loss(weights):
      new, entropy = forward(weights, batch, rates.temperature)
      found = grpo.policy_loss(
        new,
        jnp.where(single, jax.lax.stop_gradient(new), old),
        batch.engine,
        reference,
        entropy,
        batch.advantages,
        batch.weights,
        batch.shares,
        batch.mask,
        batch.segments,
        ratio=recipe.ratio,
        clip_low=rates.clip_low,
        clip_high=rates.clip_high,
        kl_coefficient=rates.kl_coefficient,
        entropy_coefficient=rates.entropy_coefficient,
        importance_cap=rates.importance_cap,
      )
      return found.loss, found

    new, found = jax.grad(loss, has_aux=True)(weights)
    gradient = jax.tree.map(jnp.add, gradient, new)
    return gradient, grpo.add_sums(sums, found)

  def imitate(gradient, sums, weights, batch):
    def loss(weights):
      found = supervised.next_token_loss(
        forward(weights, batch, 1.0)[0], batch.weights, batch.shares
      )
      return found.loss, found

    new, found = jax.grad(loss, has_aux=True)(weights)
    gradient = jax.tree.map(jnp.add, gradient, new)
    return gradient, grpo.add_sums(sums, found)

  def apply(state, gradient, sums, rates):
    divisor = jnp.where(sums.weight > 0, sums.weight, 1.0) / rates.loss_scale
    norm = optax.tree.norm(gradient) / divisor
    finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
    # The first update is the first step of the warm-up, not one of rate 0.
    warm = (state.updates + 1) / jnp.maximum(rates.warmup_updates, 1)
    rate = rates.learning_rate * jnp.minimum(warm, 1.0)
    # Divided and clipped in one go: a tree of its own for each costs memory.
    scale = jnp.minimum(1.0, recipe.gradient_clip / norm) / divisor
    gradient = jax.tree.map(lambda leaf: leaf * scale, gradient)
    change, adam = tx.update(
      gradient, widened(state.opt_state.adam), state.params
    )
    moved = types.Policy(
      jax.tree.map(lambda p, u: p - rate * u, state.params, change),
      OptState(narrowed(adam, recipe.moments), jnp.zeros((), jnp.int32)),
      state.updates + 1,
    )
    kept = state._replace(
      opt_state=state.opt_state._replace(skipped=state.opt_state.skipped + 1)
    )
    state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), moved, kept)
    return state, (finite, norm, rate)

  return Programs(
    start=jax.jit(start, out_shardings=working),
    score=jax.jit(score, out_shardings=rows),
    zeros=jax.jit(zeros, out_shardings=(params, everywhere)),
    accumulate=jax.jit(
      accumulate, out_shardings=(params, everywhere), donate_argnums=(0, 1)
    ),
    imitate=jax.jit(
      imitate, out_shardings=(params, everywhere), donate_argnums=(0, 1)
    ),
    apply=jax.jit(apply, out_shardings=(working, everywhere), donate_argnums=0),
    policy=policy,
    working=working,
    reference=reference,
    rows=rows,
  )


def _projection(recipe: Recipe, weights: model.Params) -> Callable:
  """Returns `model.logits` with the head's rows cut over all devices.

  Every device then scores all tokens of a chunk against its share of the ids.
  Left to itself the compiler gathers each chunk's logits, to add up a head's
  gradient that is cut along the other axis: 128 times 0.6 GiB for 16 rows of
  8,192 tokens and 152k ids.
  """
  table = "embed" if recipe.graphdef.backbone.tied else "head"
  rows = weights[table]["embedding"].shape[0]
  if rows % recipe.mesh.size:
    return functools.partial(model.logits, recipe.graphdef, weights)

  def place(x, *axes):
    where = NamedSharding(recipe.mesh, PartitionSpec(*axes))
    return jax.lax.with_sharding_constraint(x, where)

  devices = recipe.mesh.axis_names
  cut = weights[table]["embedding"].astype(recipe.compute_dtype)
  cut = {table: {"embedding": place(cut, devices, None)}}

  def project(hidden):
    scores = model.logits(recipe.graphdef, cut, place(hidden, None, None, None))
    return place(scores, None, None, devices)

  return project


def _on_host(places: Any) -> Any:
  """The same shardings in the host's memory; scalars stay."""

  def moved(place: NamedSharding) -> NamedSharding:
    return place.with_memory_kind("pinned_host") if len(place.spec) else place

  return jax.tree.map(moved, places)


def move(policy: types.Policy, where: types.Policy) -> types.Policy:
  """Moves the moments between memories; what is moved is donated."""

  def moved(leaf: jax.Array, place: NamedSharding) -> jax.Array:
    if leaf.sharding.memory_kind == place.memory_kind:
      return leaf
    there = jax.device_put(leaf, place)
    leaf.delete()  # jax donates nothing to another kind of memory
    return there

  adam = jax.tree.map(moved, policy.opt_state.adam, where.opt_state.adam)
  return policy._replace(opt_state=policy.opt_state._replace(adam=adam))


def widened(adam: Any) -> Any:
  """Returns the optimizer's state as optax steps it: nu in float32."""

  def wide(scale):
    nu = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), scale.nu)
    return scale._replace(nu=nu)

  return _of_adam(wide, adam)


def _of_adam(change: Callable, state: Any) -> Any:
  """Changes Adam's part of an optimizer's state, wherever it lies."""

  def is_adam(part):
    return isinstance(part, optax.ScaleByAdamState)

  return jax.tree.map(
    lambda part: change(part) if is_adam(part) else part, state, is_leaf=is_adam
  )


def narrowed(adam: Any, dtype: str) -> Any:
  """Rounds nu for storage; optax has rounded mu, to the nearest.

  nu changes by a thousandth a step, less than half of bfloat16's last place:
  rounded to the nearest it would never fall again. So it goes up or down by
  chance, right on average: random bits are added below the place of the cut.
  """
  if dtype == "float32":
    return adam

  def rounded(leaf, key):
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    bits += jax.random.bits(key, leaf.shape, jnp.uint16)
    bits &= jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)

  def narrow(scale):
    leaves, structure = jax.tree.flatten(scale.nu)
    keys = jax.random.split(jax.random.key(scale.count), len(leaves))
    return scale._replace(nu=structure.unflatten(map(rounded, leaves, keys)))

  return _of_adam(narrow, adam)


def decayed(params: model.Params) -> model.Params:
  """Returns, for each leaf, whether weight decay pulls it: no norm, no bias."""

  def pulled(path, _):
    name = jax.tree_util.keystr(path)
    return "norm" not in name and "bias" not in name

  return jax.tree_util.tree_map_with_path(pulled, params)


@dataclasses.dataclass(frozen=True)
class Prepared:
  """Lessons in rows, and the logprobs that their updates compare with."""

  parts: list[list[packing.Batch]]  # of each update
  scored: list[list[tuple[Any, Any]]]  # of each batch: old and reference
  single: bool  # old logprobs are those of the update itself
  temperature: float


@dataclasses.dataclass(frozen=True)
class Learner:
  """Updates one policy. Learners that differ in rates only share programs.

  Args:
    graphdef: of `model.build`.
    mesh: with axes "fsdp" and "tensor".
    learning_rate: after the warm-up.
    warmup_updates: the k-th update has k / warmup_updates of the rate.
    minibatch_questions: questions an update, at most.
    clip_low: of the ratio, below 1.
    clip_high: of the ratio, above 1.
    kl_coefficient: 0 leaves the reference's forward pass out.
    loss: one of `grpo.LOSSES`.
    loss_scale: of the gradient, before it is clipped.
    entropy_coefficient: of a bonus on entropy; 0 is none.
    most_tokens: that an episode may sample; divides the loss `dr_grpo`.
    importance_cap: of the weight against the engine's logprobs.
    adam_b1: decay of the first moment.
    adam_b2: decay of the second moment.
    adam_eps: of Adam's divisor.
    moments: dtype in which Adam's moments are kept.
    weight_decay: decoupled, times the rate; not on norms and biases.
    gradient_clip: global norm.
    microbatch_rows: rows whose activations exist at once, over all devices.
    row_multiple: rows are padded to one of few multiples of this.
    chunk_tokens: tokens whose logits exist at once.
    compute_dtype: of activations; weights are float32.
    attention: one of `policy.attention.KINDS`.
    offload: Adam's moments wait in the host's memory for their step, and the
      reference for its turn to score.
    remat: recompute layers in the backward pass.
    optimizer: one of `supervised.OPTIMIZERS`.

  Raises:
    ValueError: a choice is unknown, or rows do not divide over the mesh.
  """

  graphdef: model.Decoder
  mesh: Mesh
  _: dataclasses.KW_ONLY
  learning_rate: float
  warmup_updates: int
  minibatch_questions: int
  clip_low: float
  clip_high: float
  kl_coefficient: float
  loss: str = "grpo"
  loss_scale: float = 1.0
  entropy_coefficient: float = 0.0
  most_tokens: int = 4096
  importance_cap: float = 2.0
  adam_b1: float = 0.9
  adam_b2: float = 0.999
  adam_eps: float = 1e-8
  moments: str = "float32"
  weight_decay: float = 0.01
  gradient_clip: float = 1.0
  microbatch_rows: int = 8
  row_multiple: int = 512
  chunk_tokens: int = 1024
  compute_dtype: str = "bfloat16"
  attention: str = "xla"
  remat: bool = True
  offload: bool = False
  optimizer: str = "adamw"

  def __post_init__(self) -> None:
    """Refuses what no update could use."""
    grpo.one_of("loss", self.loss, grpo.LOSSES)
    grpo.one_of("optimizer", self.optimizer, supervised.OPTIMIZERS)
    packing.check_rows(self.microbatch_rows, self.mesh.shape["fsdp"])

  @property
  def ratio(self) -> str:
    """What the loss takes a ratio of."""
    return grpo.LOSSES[self.loss].ratio

  @property
  def entropy_bonus(self) -> bool:
    """Whether entropy needs a gradient."""
    return self.entropy_coefficient != 0

  @property
  def programs(self) -> Programs:
    """Its jitted functions, and the shardings of its policy."""
    names = (field.name for field in dataclasses.fields(Recipe))
    return programs(Recipe(**{name: getattr(self, name) for name in names}))

  def init(self, params: model.Params) -> types.Policy:
    """Returns a policy that starts from a copy of these weights."""
    placed = jax.device_put(params, self.programs.policy.params)
    return move(self.programs.start(placed), self.programs.policy)

  def abstract(self) -> types.Policy:
    """Returns shapes and shardings of a policy, for restoring one."""
    run = self.programs
    weights = model.abstract_params(self.graphdef.backbone)
    return jax.tree.map(
      lambda leaf, place: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=place
      ),
      jax.eval_shape(run.start, weights),
      run.policy,
    )

  def arguments(self, length: int) -> dict[str, tuple[Any, ...]]:
    """The arguments of `programs` for rows of a length, as placed shapes.

    So that they can be lowered and compiled where no such device is.
    """
    run, mesh = self.programs, self.mesh
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(shapes: Any, places: Any) -> Any:
      return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(
          leaf.shape, leaf.dtype, sharding=place
        ),
        shapes,
        places,
      )

    policy = self.abstract()
    working = placed(policy, run.working)
    rows = jax.eval_shape(lambda: packing.empty(self.microbatch_rows, length))
    batch = placed(rows, jax.tree.map(lambda _: run.rows, rows))
    sums = jax.eval_shape(grpo.zero_sums)
    sums = placed(sums, jax.tree.map(lambda _: everywhere, sums))
    scores, rates = batch.engine, Rates(*(1.0 for _ in Rates._fields))
    weights = policy.params
    return dict(
      start=(weights,),
      score=(weights, batch, 1.0),
      zeros=(weights,),
      accumulate=(weights, sums, weights, batch, scores, scores, False, rates),
      apply=(working, weights, sums, rates),
    )

  def update(
    self,
    policy: types.Policy,
    reference: model.Params | None,
    lessons: Sequence[types.Lesson],
    *,
    temperature: float,
    on_batch: Callable[[int, int], None] | None = None,
  ) -> tuple[types.Policy, dict[str, float]]:
    """Learns from the lessons of one iteration, one update a minibatch.

    Args:
      policy: donated; use only what is returned.
      reference: frozen weights; None where kl_coefficient is 0.
      lessons: the episodes of one question share their request id. All of
        them, on every process, as `distributed.gather` joins each one's own.
      temperature: that they were sampled at, above 0.
      on_batch: told the episodes and sampled tokens of each micro-batch when
        its gradient is there.

    Returns:
      The policy, and metrics, as `learn`.

    Raises:
      NonFiniteUpdate: the third skipped update in a row, over calls too.
    """
    prepared = self.prepare(
      policy.params, reference, lessons, temperature=temperature
    )
    return self.learn(policy, prepared, on_batch=on_batch)

  def prepare(
    self,
    params: model.Params,
    reference: model.Params | None,
    lessons: Sequence[types.Lesson],
    *,
    temperature: float,
    first: bool = True,
  ) -> Prepared:
    """Packs lessons and scores them, before any weight moves.

    Args:
      params: weights whose logprobs are the old ones, those that played.
      reference: see `update`.
      lessons: see `update`.
      temperature: see `update`.
      first: no other update comes between these weights and `learn`. Then a
        single update's old logprobs are its new ones, and the pass is spared.
    """
    parts = [
      self._pack(part)
      for part in packing.minibatches(lessons, self.minibatch_questions)
    ]
    single = first and len(parts) < 2
    if self.kl_coefficient:
      reference = jax.device_put(reference, self.programs.working.params)
    scored = [
      [
        self._scores(params, reference, batch, single, temperature)
        for batch in part
      ]
      for part in parts
    ]
    return Prepared(parts, scored, single, temperature)

  def learn(
    self,
    policy: types.Policy,
    prepared: Prepared,
    *,
    on_batch: Callable[[int, int], None] | None = None,
  ) -> tuple[types.Policy, dict[str, float]]:
    """Steps once for each minibatch of prepared lessons.

    Args:
      policy: donated; use only what is returned.
      prepared: of `prepare`.
      on_batch: see `update`.

    Returns:
      The policy, and metrics: sums over all minibatches, divided once. Those
      that were skipped count in `skipped` only. `updates` counts this call's.

    Raises:
      NonFiniteUpdate: the third skipped update in a row, over calls too.
    """
    run, parts, single = self.programs, prepared.parts, prepared.single
    rates = Rates(
      prepared.temperature,
      *(getattr(self, name) for name in Rates._fields if name != "temperature"),
    )
    total, norms, rate, skipped = grpo.zero_sums(), [], 0.0, 0
    for part, scores in zip(parts, prepared.scored, strict=True):
      gradient, sums = run.zeros(policy.params)
      for batch, (old, base) in zip(part, scores, strict=True):
        gradient, sums = run.accumulate(
          gradient,
          sums,
          policy.params,
          distributed.place(batch, run.rows),
          old,
          base,
          single,
          rates,
        )
        if on_batch is not None:  # the display waits for the device
          jax.block_until_ready(sums)
          # Episodes are numbered from 1 in each row.
          episodes = int(np.sum(np.max(batch.segments, axis=1)))
          on_batch(episodes, int(np.sum(batch.mask)))
      policy, outcome = self._apply(policy, gradient, sums, rates)
      del gradient  # as large as the weights
      sums, (finite, norm, rate) = jax.device_get((sums, outcome))
      if finite:
        total = jax.tree.map(np.asarray, grpo.add_sums(total, sums))
        norms.append(float(norm))
      else:
        skipped += 1
        self._skip(policy, float(sums.loss), float(norm))
    metrics = _metrics(total, with_kl=self.kl_coefficient != 0)
    metrics |= {
      "updates": len(norms),
      "skipped": skipped,
      "lr": float(rate),
      "padding_fraction": packing.padding_fraction(sum(parts, [])),
    }
    if norms:
      metrics["grad_norm"] = float(np.mean(norms))
    return policy, metrics

  def imitate(
    self,
    policy: types.Policy,
    batches: Sequence[packing.Batch],
    rate: float,
  ) -> tuple[types.Policy, tuple[grpo.Sums, Any]]:
    """Steps once towards the own tokens of batches, whoever wrote them.

    Nothing is read back, so that steps may follow each other without a wait;
    one that is not finite leaves the policy as it was, and is counted in its
    `opt_state.skipped`.

    Args:
      policy: donated; use only what is returned.
      batches: micro-batches of this step.
      rate: learning rate of it; those of the learner do not count.

    Returns:
      The policy; and on the device the sums of `supervised.next_token_loss`
      with (finite, norm of the gradient, rate).
    """
    run = self.programs
    gradient, sums = run.zeros(policy.params)
    for batch in batches:
      gradient, sums = run.imitate(
        gradient, sums, policy.params, distributed.place(batch, run.rows)
      )
    rates = Rates(**dict.fromkeys(Rates._fields, 1.0))
    rates = rates._replace(learning_rate=rate, warmup_updates=0.0)
    policy, outcome = self._apply(policy, gradient, sums, rates)
    return policy, (sums, outcome)

  def _apply(self, policy, gradient, sums, rates):
    run = self.programs
    policy = move(policy, run.working)
    policy, outcome = run.apply(policy, gradient, sums, rates)
    return move(policy, run.policy), outcome

  def score(
    self,
    params: model.Params,
    episodes: Sequence[types.Episode],
    *,
    temperature: float,
  ) -> list[np.ndarray]:
    """Returns the logprobs of each episode's ids, float32 [T] each.

    They are those of the update's forward pass; 0 where an id was not sampled.
    Every process gives the same episodes, and gets all scores.
    """
    lessons = [(i, types.Lesson(e, 0.0)) for i, e in enumerate(episodes)]
    found = [np.zeros(len(episode.ids), np.float32) for episode in episodes]
    for batch in self._pack(lessons):
      placed = distributed.place(batch, self.programs.rows)
      scored = distributed.whole(
        self.programs.score(params, placed, temperature)
      )
      for number in np.unique(batch.groups[batch.groups >= 0]):
        own = batch.groups == number
        found[number] = np.where(batch.mask, scored, 0.0)[own]
    return found

  def _pack(self, lessons: Sequence[tuple[int, types.Lesson]]):
    return packing.pack(
      lessons,
      rows=self.microbatch_rows,
      row_multiple=self.row_multiple,
      loss=self.loss,
      most_tokens=self.most_tokens,
      # cuDNN's attention knows lengths, no segments.
      packed=self.attention != "cudnn",
    )

  def _scores(self, params, reference, batch, single, temperature):
    """Returns old and reference logprobs; zeros where none are needed."""
    run = self.programs
    placed = distributed.place(batch, run.rows)
    zeros = distributed.place(np.zeros(batch.ids.shape, np.float32), run.rows)
    old = zeros if single else run.score(params, placed, temperature)
    if self.kl_coefficient == 0:
      return old, zeros
    return old, run.score(reference, placed, temperature)

  def _skip(self, policy, loss, norm) -> None:
    """Warns of a skipped update, and stops the run at too many."""
    in_a_row = int(policy.opt_state.skipped)
    what = (
      f"loss {loss:g}, gradient norm {norm:g}, after {int(policy.updates)} "
      f"updates at a learning rate of {self.learning_rate:g}"
    )
    if in_a_row >= MAX_SKIPPED:
      raise NonFiniteUpdate(
        f"{in_a_row} updates in a row had a non-finite loss or gradient "
        f"({what}). None was applied: the weights are those before them. Try a "
        "lower learning rate, or a compute dtype of float32."
      )
    logging.warning("Update skipped: %s.", what)


def _metrics(total: grpo.Sums, with_kl: bool) -> dict[str, float]:
  """Divides the sums, once. Without a token there is nothing to report."""
  metrics = {"tokens": float(total.tokens)}
  if not total.tokens:
    return metrics
  means = {
    "kl/mean": total.kl,
    "entropy/mean": total.entropy,
    "clip_fraction": total.clipped,
    "ratio/mean": total.ratio,
    "importance/mean": total.importance,
    "importance/capped": total.capped,
    "logprob_gap/mean": total.gap,
  }
  if not with_kl:
    del means["kl/mean"]
  metrics |= {n: float(x / total.tokens) for n, x in means.items()}
  metrics["loss"] = float(total.loss / total.weight)
  metrics["logprob_gap/max"] = float(total.gap_max)
  return metrics
