"""What a config may hold, and what follows from its values alone.

`check` refuses, in one line, what no run could finish: before anything loads.
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import traverse_util
from jax.sharding import Mesh

from sesa_jax import distributed, environment, prompts, worlds
from sesa_jax.engine import decode
from sesa_jax.engine import engine as engine_lib
from sesa_jax.language import LANGUAGES
from sesa_jax.learner import grpo, packing, supervised
from sesa_jax.policy import attention, model, sharding, weights
from sesa_jax.retrieval import index
from sesa_jax.search import engines
from sesa_jax.skills import bank as skill_bank
from sesa_jax.stages import distillation, frontier, priming, validity

ASSETS = "assets:"  # marks a path inside the assets folder
ROLES = ("challenger", "solver")

# What this version has; a config that asks for more is refused at the start.
ANSWERERS = ("judge", "solver")
DISTILLERS = ("chat", "solver", "offline")
SEED_SOURCES = ("titles", "jsonl", "list")
BANKS = ("none", "final", "placebo", "scrambled", "other")
ARMS = ("skills", "placebo", "scrambled")
DTYPES = ("float32", "bfloat16")
ATTENTIONS = ("auto", *attention.KINDS)
OLD_LOGPROBS = ("start", "turn")
CACHES = ("paged", "contiguous")
TOO_LONG = ("skip", "refuse")
ENVIRONMENTS = {"search_qa": environment.SearchQA}


def named(field: str, value: str, known: Mapping[str, Any]) -> Any:
  """Returns what a config names: one of the known, or `MODULE:NAME`.

  Raises:
    ValueError: there is no such thing.
  """
  if value in known:
    return known[value]
  module, colon, name = value.partition(":")
  try:
    if colon:
      return getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(f"{field} = {value!r}: {error}.") from error
  raise ValueError(
    f"Unknown {field} {value!r}. Choices: {', '.join(known)}, or MODULE:NAME."
  )


def language(config: Any) -> Any:
  """Returns the language of questions and answers."""
  return named("language", config.language, LANGUAGES)


def rules_of(config: Any) -> type[environment.SearchQA]:
  """Returns the class that says what turns may hold."""
  return named("environment.kind", config.environment.kind, ENVIRONMENTS)


def locate(path: str, exists: bool = True) -> str:
  """Returns a path of a config as one of this machine.

  `assets:NAME/...` lies in the folder SESA_JAX_ASSETS, by default
  ~/.cache/sesa_jax. `microworld:SEED/...` does too, and is made if it is
  missing.

  Args:
    path: of a config.
    exists: False for a folder that is to be made.

  Raises:
    ValueError: there is no such asset.
  """
  root = os.environ.get("SESA_JAX_ASSETS") or "~/.cache/sesa_jax"
  if path.startswith(worlds.PREFIX):
    return str(worlds.locate(path, Path(root).expanduser(), exists))
  if not path.startswith(ASSETS):
    return path
  found = Path(root).expanduser() / path.removeprefix(ASSETS)
  if exists and not found.exists():
    raise ValueError(
      f"{path} is not in the assets folder {root}. Fetch it with "
      "`python third_party/fetch.py --set=demo` (--set=paper for the paper's "
      "backbones and seeds), or set SESA_JAX_ASSETS."
    )
  return str(found)


def for_machine(config: Any, kind: str, keep: Container[str] = ()) -> Any:
  """Gives a config the values that it has for a kind of machine.

  They lie in `config.machines`, by kind, section and field:
  `machines.v5e.mesh.rollout_tensor = 4`.

  Args:
    config: an experiment.
    kind: of `distributed.machine_kind`; without values there nothing changes.
    keep: dotted names of fields to leave, since the command line gave them.

  Returns:
    A locked copy. Its `machines` is empty, so that a run's folder records what
    it runs with, and nothing of machines that it does not run on.

  Raises:
    ValueError: `machines` names a kind or a field that does not exist, be it
      for another machine, or a value for this one is of the wrong type.
  """
  copy = config.copy_and_resolve_references()
  fields = traverse_util.flatten_dict(config.to_dict(), sep=".")
  for machine in config.machines:
    grpo.one_of("machines", machine, distributed.MACHINES)
    values = config.machines[machine].to_dict()
    for name, value in traverse_util.flatten_dict(values, sep=".").items():
      if name not in fields:
        raise ValueError(
          f"machines.{machine}.{name}: the config has no field {name}."
        )
      if machine == kind and name not in keep:
        try:
          copy.update_from_flattened_dict({name: value})
        except TypeError as error:
          raise ValueError(f"machines.{machine}.{name}: {error}") from error
  copy.machines = {}
  return copy.lock()


def mesh_sizes(config: Any, devices: int | None = None) -> tuple[int, int]:
  """Returns the training mesh's (fsdp, tensor); fsdp = 0 takes all devices.

  Args:
    config: an experiment, for its machine.
    devices: how many there are; by default those that are present.

  Raises:
    ValueError: `mesh.tensor` does not divide them.
  """
  fsdp, tensor = config.mesh.fsdp, config.mesh.tensor
  if fsdp:
    return fsdp, tensor
  devices = len(jax.devices()) if devices is None else devices
  if devices % tensor:
    fit = [str(n) for n in range(1, devices + 1) if devices % n == 0]
    raise ValueError(
      f"mesh.tensor = {tensor} does not divide the {devices} devices that "
      f"mesh.fsdp = 0 shares out. Sizes that do: {', '.join(fit)}."
    )
  return devices // tensor, tensor


def check(config: Any) -> None:
  """Refuses a config that no run could finish. Loads nothing.

  Raises:
    ValueError: a choice is unknown or not in this version, a number is out of
      range, a batch does not divide, or devices or files are missing.
  """
  if config.policy.source == "random" and config.sft.episodes:
    raise ValueError(
      "policy.source = 'random' with sft.episodes is the config of a warm "
      "start: run it with --mode=sft. To train from random weights, set "
      "sft.episodes = ''."
    )
  check_values(config)
  _check_sets(config)
  fsdp, tensor = mesh_sizes(config)
  mesh = sharding.mesh(fsdp, tensor)
  if distributed.count() > 1 and mesh.size < len(jax.devices()):
    raise ValueError(
      f"mesh.fsdp = {fsdp} x mesh.tensor = {tensor} leaves some of the "
      f"{len(jax.devices())} devices of {distributed.count()} processes idle, "
      "and every process has to play. Set mesh.fsdp = 0, which takes all."
    )
  packing.check_rows(config.learner.microbatch_rows, fsdp)
  backbone = weights.check(config.policy.source, locate(config.policy.path))
  _check_starts(config, backbone)
  sharding.check(backbone, fsdp=fsdp, tensor=tensor)
  _check_engine(config, backbone, rollout_mesh(config, mesh))
  if len(priming.read(prime(config.bank.prime))) > config.bank.capacity:
    raise ValueError(
      f"bank.prime = {config.bank.prime!r} holds more skills than "
      f"bank.capacity = {config.bank.capacity}."
    )


def prime(source: str) -> str:
  """Returns a value of `bank.prime`, its file of mined skills located."""
  source, colon, path = source.partition(":")
  return f"{source}{colon}{locate(path)}"


def _check_sets(config: Any) -> None:
  """Refuses questions that are in no file."""
  for section, sets in (
    ("eval.sets", config.eval.sets),
    ("pool.fixed", config.pool.fixed),
  ):
    for name, spec in sets.items():
      field = f"{section}.{name}"
      if not spec.path:
        raise ValueError(
          f"{field}.path is empty: name a file of questions "
          f"(--config.{field}.path=FILE)."
        )
      if spec.size < 0:
        raise ValueError(f"{field}.size = {spec.size}; 0 takes all questions.")
  if not config.selfplay and not config.pool.fixed:
    raise ValueError(
      "selfplay = False plays the questions of pool.fixed, which names no set. "
      "Take the preset fixed_questions or search_r1 (--config=FILE:PRESET) and "
      "--config.pool.fixed.train.path=FILE."
    )


def check_values(config: Any) -> None:
  """Refuses values that no machine could run with; a part of `check`.

  Raises:
    ValueError: a choice is unknown, or a number is out of range.
  """
  one_of = grpo.one_of
  one_of("policy.template", config.policy.template, prompts.TEMPLATES)
  one_of("verifier.answerer", config.verifier.answerer, ANSWERERS)
  check_distillation(config)
  one_of("search.engine", config.search.engine, engines.ENGINES)
  one_of("seeds.source", config.seeds.source, SEED_SOURCES)
  one_of("bank.arm", config.bank.arm, ARMS)
  one_of("bank.credit", config.bank.credit, skill_bank.CREDITS)
  if config.bank.credit == "control" and not config.bank.control_attempts:
    raise ValueError(
      "bank.credit = 'control' compares with attempts without skills: set "
      "bank.control_attempts to at least 1."
    )
  index.check(config.bank.index)
  rules_of(config)
  language(config)
  for mode in config.eval.banks:
    one_of("eval.banks", mode, BANKS)
  if len(set(config.eval.banks)) != len(config.eval.banks) or (
    config.eval.sets and not config.eval.banks
  ):
    raise ValueError(
      f"eval.banks = {tuple(config.eval.banks)!r}: name each mode once, and at "
      f"least one. Choices: {', '.join(BANKS)}."
    )
  other = config.eval.other
  if "other" in config.eval.banks and not priming.read(prime(other)):
    raise ValueError(
      "eval.banks names 'other', and eval.other is 'none': name the skills to "
      "fill that bank with, for example eval.other='mined:RUN/skills.jsonl'."
    )
  skill_bank.check_fields(config.bank.fields)
  validity.check_refill(config.pool.refill)
  for name in ROLES:
    role = config[name]
    scaled = role.advantage_std and role.baseline != "none"
    grpo.check_loss(f"{name}.loss", role.loss, scaled)
    grpo.check_baseline(f"{name}.baseline", role.baseline, role.group_size)
  one_of("policy.compute_dtype", config.policy.compute_dtype, DTYPES)
  one_of("learner.moments", config.learner.moments, DTYPES)
  one_of("learner.old_logprobs", config.learner.old_logprobs, OLD_LOGPROBS)
  if sorted(config.learner.order) != sorted(ROLES):
    raise ValueError(
      f"learner.order = {tuple(config.learner.order)!r}: it must name each of "
      f"{', '.join(ROLES)} once."
    )
  one_of("policy.attention", config.policy.attention, ATTENTIONS)
  one_of("engine.cache", config.engine.cache, CACHES)
  one_of("sft.optimizer", config.sft.optimizer, supervised.OPTIMIZERS)
  one_of("sft.too_long", config.sft.too_long, TOO_LONG)
  for arm in config.sft.arms:
    one_of("sft.arms", arm, (*ROLES, "control"))


def check_distillation(config: Any) -> None:
  """Refuses values by which no skill could be written; a part of `check`.

  Raises:
    ValueError: a choice is unknown, or a number is out of range.
  """
  one_of, settings = grpo.one_of, config.distillation
  named("distillation.distiller", settings.distiller, dict.fromkeys(DISTILLERS))
  one_of("distillation.keep", settings.keep, distillation.KEEPS)
  distillation.check_consolidate(settings.consolidate)
  if settings.distiller == "solver" and not settings.wait:
    raise ValueError(
      "distillation.wait = False lets skills be written beside rollouts, which "
      "the solver plays itself: for distillation.distiller = 'solver' it must "
      "be True."
    )
  frontier.check(
    reward=config.frontier.reward,
    invalid=config.challenger.invalid,
    gate=config.frontier.gate,
    low=config.frontier.low,
    high=config.frontier.high,
  )
  _check_ranges(config)


def rollout_mesh(config: Any, mesh: Mesh) -> Mesh:
  """Returns the rollout mesh: this host's devices of the training mesh.

  Raises:
    ValueError: `mesh.rollout_tensor` does not divide them.
  """
  own = [d for d in mesh.devices.flat if distributed.is_own(d)]
  return sharding.rollout_mesh(config.mesh.rollout_tensor, own)


def starts(config: Any) -> dict[str, str]:
  """Returns the path of the weights that each role starts from."""
  return {role: config[role].path or config.policy.path for role in ROLES}


def _check_starts(config: Any, backbone: Any) -> None:
  """Refuses weights that roles cannot start from."""
  for role in ROLES:
    path = config[role].path
    if not path:
      continue
    if config.policy.shared:
      raise ValueError(
        f"{role}.path = {path!r}, but policy.shared: one policy starts from "
        'policy.path. Set the former to "", or the latter to False.'
      )
    if config.policy.source == "random":
      raise ValueError(
        f"{role}.path = {path!r}, but policy.source = 'random' reads none."
      )
    if weights.check(config.policy.source, locate(path)) != backbone:
      raise ValueError(
        f"{role}.path = {path!r} holds another architecture than policy.path "
        f"= {config.policy.path!r}; both play with one engine and tokenizer."
      )


def _check_engine(config: Any, backbone: Any, mesh: Mesh) -> None:
  """Refuses what the engine could not be built with."""
  check_rollout(backbone, mesh.shape["tensor"])
  layout = engine_lib.layout(
    model.build(backbone),
    mesh,
    steps=config.engine.steps_per_dispatch,
    ends=1,
    **engine_sizes(config),
  )
  check_longest(config, layout)


def check_longest(config: Any, layout: decode.Layout) -> None:
  """Refuses a longest episode that could not be played even alone.

  Raises:
    ValueError: the backbone's context or the pages of a data shard are fewer.
  """
  longest, context = slot_tokens(config), layout.graphdef.backbone.context
  if longest > context:
    raise ValueError(
      f"Episodes of up to {longest} tokens do not fit into the backbone's "
      f"context of {context}. Lower episode_tokens or verifier.max_tokens."
    )
  engine_lib.check_pages("The longest episode", longest, layout)


def check_rollout(backbone: Any, tensor: int) -> None:
  """Refuses a `mesh.rollout_tensor` that cannot share a backbone.

  Raises:
    ValueError: see `sharding.check`.
  """
  field = "mesh.rollout_tensor"
  sharding.check(backbone, fsdp=1, tensor=tensor, field=field)


def slot_tokens(config: Any) -> int:
  """The longest episode that any role may play."""
  return max(
    config.challenger.episode_tokens,
    config.solver.episode_tokens,
    config.verifier.max_tokens,
  )


def engine_sizes(config: Any) -> dict[str, Any]:
  """Returns what both `Engine` and its `layout` take from a config."""
  paged = config.engine.cache == "paged"
  return dict(
    slots=config.engine.slots,
    length=slot_tokens(config),
    page_size=config.engine.page_size,
    pages=config.engine.pages,
    prefill_chunk=config.engine.prefill_chunk,
    dtype=config.policy.compute_dtype,
    attention="auto" if paged else "cudnn_contiguous",
  )


# Least and greatest value of every number, both allowed. None: no bound.
_ROLE = {
  "temperature": (1e-3, 100),  # training samples
  "turns": (1, None),
  "turn_tokens": (1, None),
  "episode_tokens": (2, None),
  "learning_rate": (0, 1),
  "warmup_updates": (0, None),
  "minibatch_questions": (1, None),
  "loss_scale": (1e-9, None),
  "clip_low": (0, 1),
  "clip_high": (0, None),
  "kl_coefficient": (0, None),
  "entropy_coefficient": (0, None),
  "importance_cap": (1e-6, None),
  "group_size": (1, None),
}
_RANGES = {
  "seed": (0, 2**32 - 1),
  "iterations": (0, None),
  "questions": (1, None),
  "lost_limit": (0, 1),
  **{f"{role}.{name}": _ROLE[name] for role in ROLES for name in _ROLE},
  "challenger.invalid_penalty": (0, None),
  "challenger.min_searches": (0, None),
  "mesh.fsdp": (0, None),
  "mesh.tensor": (1, None),
  "mesh.rollout_tensor": (1, None),
  "learner.std_epsilon": (0, None),
  "learner.adam_b1": (0, 1 - 1e-9),
  "learner.adam_b2": (0, 1 - 1e-9),
  "learner.adam_eps": (1e-30, None),
  "learner.weight_decay": (0, None),
  "learner.gradient_clip": (1e-9, None),
  "learner.microbatch_rows": (1, None),
  "learner.row_multiple": (1, None),
  "learner.chunk_tokens": (1, None),
  "engine.slots": (1, None),
  "engine.steps_per_dispatch": (1, None),
  "engine.prefill_chunk": (1, None),
  "engine.page_size": (1, None),
  "engine.pages": (0, None),
  "environment.passages_per_search": (1, None),
  "environment.observation_tokens": (1, None),
  "environment.max_malformed": (0, None),
  "environment.max_answer_words": (1, None),
  "environment.max_query_characters": (1, None),
  "frontier.low": (0, 1),
  "frontier.high": (0, 1),
  "frontier.endpoint_penalty": (0, None),
  "frontier.min_right": (0, None),
  "frontier.min_wrong": (0, None),
  "verifier.tokens": (1, None),
  "verifier.max_tokens": (2, None),
  "verifier.noise": (0, None),
  "verifier.probes": (0, None),
  "pool.empty_every": (1, None),
  "bank.capacity": (1, None),
  "bank.top": (0, None),
  "bank.min_score": (-1, 1),
  "bank.block_tokens": (0, None),
  "bank.retire_after": (0, None),
  "bank.control_attempts": (0, None),
  "encoder.threshold": (-1, 1),
  "judge.verdict_tokens": (1, None),
  "judge.answer_tokens": (1, None),
  "judge.temperature": (0, 100),
  "judge.concurrency": (1, None),
  "judge.deadline": (1e-3, 1e6),
  "judge.try_seconds": (1e-3, 1e6),
  "judge.tries": (1, None),
  "judge.max_tokens": (1, None),
  "judge.max_cost": (0, None),
  "judge.prompt_price": (0, None),
  "judge.completion_price": (0, None),
  "judge.cached_prompt_price": (0, None),
  "sft.steps": (0, None),
  "sft.epochs": (1, None),
  "sft.batch_tokens": (2, None),
  "sft.max_tokens": (0, None),
  "sft.learning_rate": (0, 1),
  "sft.warmup_steps": (0, None),
  "sft.decay": (0, 1),
  "sft.validation": (0, 0.9),
  "sft.log_every": (1, None),
  "sft.validate_every": (1, None),
  "sft.checkpoint_every": (1, None),
  "mine.iterations": (1, None),
  "mine.skills": (1, None),
  "distillation.tokens": (1, None),
  "distillation.every": (1, None),
  "distillation.min_pending": (1, None),
  "distillation.max_records": (1, None),
  "distillation.queue_size": (1, None),
  "distillation.passage_tokens": (0, None),
  "search.k1": (0, None),
  "search.b": (0, 1),
  "search.passage_words": (1, None),
  "search.batch": (1, 4096),
  "search.concurrency": (1, 1024),
  "search.deadline": (1e-3, 3600),
  "search.try_seconds": (1e-3, 3600),
  "search.tries": (1, 100),
  "search.patience": (0, None),
  "search.google.per_second": (1e-3, 10_000),
  "search.google.per_day": (0, None),
  "search.google.price": (0, None),
  "search.degrade.drop": (0, 1),
  "search.degrade.distract": (0, 1),
  "search.degrade.shuffle": (0, 1),
  "search.degrade.delay": (0, 3600),
  "budget.searches": (0, None),
  "budget.cost": (0, None),
  "eval.every": (0, None),
  "eval.temperature": (0, 100),
  "eval.episodes": (0, None),
  "eval.turns": (1, None),
  "eval.confidence": (0.01, 0.9999),
  "alarms.entropy_least": (0, None),
  "alarms.entropy_most": (0, None),
  "alarms.malformed": (0, 1),
  "alarms.clip_fraction": (0, 1),
  "alarms.valid_rate": (0, 1),
  "alarms.valid_iterations": (1, None),
  "checkpoint.keep": (1, None),
  "checkpoint.milestone_every": (0, None),
}


def _check_ranges(config: Any) -> None:
  for name, (least, greatest) in _RANGES.items():
    value = functools.reduce(operator.getitem, name.split("."), config)
    if value is None:
      continue
    least = -math.inf if least is None else least
    greatest = math.inf if greatest is None else greatest
    if not least <= value <= greatest:  # NaN is in no range
      raise ValueError(
        f"{name} = {value}: it must be from {least:g} to {greatest:g}."
        if greatest < math.inf
        else f"{name} = {value}: it must be at least {least:g}."
      )
