"""From a config to the things that a run acts with.

`check` looks at the config alone, `read` at text, `assemble` at weights: in
this order, so that bad input is found before anything expensive starts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import math
import operator
import os
import re
from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from flax import traverse_util
from jax.sharding import Mesh

from sesa_jax import distributed, environment, prompts, types
from sesa_jax.data import benchmarks, seeds
from sesa_jax.engine import decode
from sesa_jax.engine import engine as engine_lib
from sesa_jax.judge import chat, ledger, offline, verdicts
from sesa_jax.judge import distiller as distiller_lib
from sesa_jax.language import LANGUAGES, question_key
from sesa_jax.learner import grpo, packing
from sesa_jax.learner import learner as learner_lib
from sesa_jax.policy import attention, model, sharding, tokenizer, weights
from sesa_jax.retrieval import encoder, index
from sesa_jax.search import engines
from sesa_jax.skills import bank as skill_bank
from sesa_jax.stages import distillation, frontier, priming, validity

ASSETS = "assets:"  # marks a path inside the assets folder
ENCODER_HASH, HASH_DIM = "hash", 64
ROLES = ("challenger", "solver")

# What this version has; a config that asks for more is refused at the start.
ANSWERERS = ("judge", "solver")
DISTILLERS = ("chat", "solver", "offline")
SEED_SOURCES = ("titles", "jsonl", "list")
BANKS = ("none", "final", "placebo", "scrambled")
ARMS = ("skills", "placebo", "scrambled")
DTYPES = ("float32", "bfloat16")
ATTENTIONS = ("auto", *attention.KINDS)
OLD_LOGPROBS = ("start", "turn")
CACHES = ("paged", "contiguous")
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


def locate(path: str) -> str:
  """Returns a path of a config as one of this machine.

  `assets:NAME/...` lies in the folder SESA_JAX_ASSETS, by default
  ~/.cache/sesa_jax.

  Raises:
    ValueError: there is no such asset.
  """
  if not path.startswith(ASSETS):
    return path
  root = os.environ.get("SESA_JAX_ASSETS") or "~/.cache/sesa_jax"
  found = Path(root).expanduser() / path.removeprefix(ASSETS)
  if not found.exists():
    raise ValueError(
      f"{path} is not in the assets folder {root}. Fetch it with "
      "`python third_party/fetch.py --set=demo` (--set=paper for the paper's "
      "backbones and seeds), or set SESA_JAX_ASSETS."
    )
  return str(found)


# --- the config ------------------------------------------------------------


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
  check_values(config)
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
  if len(priming.read(config.bank.prime)) > config.bank.capacity:
    raise ValueError(
      f"bank.prime = {config.bank.prime!r} holds more skills than "
      f"bank.capacity = {config.bank.capacity}."
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
  skill_bank.check_fields(config.bank.fields)
  validity.check_refill(config.pool.refill)
  for name in ROLES:
    role = config[name]
    one_of(f"{name}.loss", role.loss, grpo.LOSSES)
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


def check_distillation(config: Any) -> None:
  """Refuses values by which no skill could be written; a part of `check`.

  Raises:
    ValueError: a choice is unknown, or a number is out of range.
  """
  one_of, settings = grpo.one_of, config.distillation
  one_of("distillation.distiller", settings.distiller, DISTILLERS)
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


def check_judge(config: Any) -> None:
  """Refuses a config whose run would ask a model that it cannot.

  For the modes that would: `check` is for all.

  Raises:
    ValueError: no endpoint, no key, or a bad value of `judge`.
  """
  asked = _asks_judge(config)
  if asked and not config.judge.base_url:
    raise ValueError(
      f"{asked[0]} asks a model, but judge.base_url names none. Set it with "
      "judge.model and judge.key_env, or choose another."
    )
  judge(config)


def _asks_judge(config: Any) -> list[str]:
  """Names the fields by which a run asks the judge's model; verdicts aside."""
  settings = config.distillation
  distils = settings.admit and config.frontier.gate != "off"
  found = []
  if config.selfplay and config.verifier.answerer == "judge":
    found.append("verifier.answerer = 'judge'")
  if settings.distiller == "chat" and distils and not config.bank.frozen:
    found.append("distillation.distiller = 'chat'")
  return found


def judge(config: Any, workdir: str | Path = "") -> verdicts.Judge | None:
  """Returns the model that `config.judge` names, if it is asked for anything.

  Args:
    config: an experiment.
    workdir: where answers, failures and what was spent are kept; "" keeps
      nothing. The lead's alone: no other process calls.

  Raises:
    ValueError: no key in the environment, or a bad value.
  """
  settings = config.judge
  if not settings.base_url or not (settings.verdicts or _asks_judge(config)):
    return None
  here = Path(workdir) if workdir and distributed.is_lead() else None
  price = None
  if settings.prompt_price is not None:
    price = ledger.Price(
      settings.prompt_price,
      settings.completion_price or 0.0,
      settings.cached_prompt_price,
    )
  client = chat.Chat(
    settings.base_url,
    settings.model,
    key_env=settings.key_env,
    temperature=settings.temperature,
    extra=settings.extra.to_dict(),
    concurrency=settings.concurrency,
    deadline=settings.deadline,
    try_seconds=settings.try_seconds,
    tries=settings.tries,
    ledger=ledger.Ledger(
      price,
      max_tokens=settings.max_tokens,
      max_cost=settings.max_cost,
      path=here / "judge_spent.json" if here else "",
    ),
    cache=(settings.cache or here / "judge_cache") if here else "",
    log=here / "judge_failures.jsonl" if here else "",
  )
  return verdicts.Judge(client, settings.verdict_tokens, settings.answer_tokens)


def distiller(
  config: Any, judge: verdicts.Judge | None
) -> types.Distiller | None:
  """Returns what writes skills; None where the policy itself does."""
  if config.distillation.distiller == "offline":
    return offline.OfflineDistiller(language(config))
  if config.distillation.distiller == "chat" and judge is not None:
    return distiller_lib.ChatDistiller(judge.chat, config.distillation.tokens)
  return None


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


# Least and greatest value of every number, both allowed. None: no bound.
_ROLE = {
  "temperature": (1e-3, 100),  # training samples; evaluation is greedy
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
  "iterations": (1, None),
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


# --- text ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Texts:
  """Corpus, seeds and questions of a run."""

  library: engines.Search  # what is searched, its corpus and its ledger
  seeds: tuple[types.Seed, ...]
  fixed: tuple[types.Question, ...]  # that the replay pool starts with
  sets: Mapping[str, tuple[types.Question, ...]]  # for evaluation


def search(config: Any, workdir: str = "") -> engines.Search:
  """Opens what a config searches.

  Args:
    config: an experiment.
    workdir: of the run, where what its searches cost is kept; "" keeps nothing.

  Raises:
    ValueError: a value, a file, an index or a key is missing or wrong.
    types.Stopped: no search server answers.
  """
  # Each process asks for its own episodes, and has its share of the budget.
  count, own = distributed.count(), distributed.index()
  searches, cost = config.budget.searches, config.budget.cost
  name = f"search_spent{f'.{own}' if own else ''}.json"
  return engines.open_search(
    *_search_values(config),
    seed=config.seed,
    budget=dict(
      searches=None if searches is None else searches // count,
      cost=None if cost is None else cost / count,
    ),
    spent=Path(workdir) / name if workdir else "",
  )


def build_index(config: Any) -> None:
  """Builds the index that `search.index` names, of `corpus`.

  Raises:
    ValueError: a value or a file is missing or wrong, or the folder exists.
  """
  engines.build(*_search_values(config))


def _search_values(config: Any) -> tuple:
  def encoder():
    spec = config.encoder
    name = [_digest_encoder(spec), spec.query_prefix, spec.passage_prefix]
    return load_encoder(spec), _digest_of(name)

  spec = config.search.to_dict()
  spec["index"] = locate(spec["index"])
  return spec, [locate(path) for path in config.corpus], encoder


def _digest_encoder(spec: Any) -> str:
  return spec.path if spec.path == ENCODER_HASH else _digest(locate(spec.path))


def read(config: Any, workdir: str = "") -> Texts:
  """Reads what a run searches, asks for and is tested on.

  Nothing of an evaluation set reaches the pool: such questions are left out,
  compared by normalised text.

  Raises:
    ValueError: a file is missing or malformed, a list is empty, or a set has
      fewer questions than asked for.
    types.Stopped: no search server answers.
  """
  _check_needs_passages(config)
  library = search(config, workdir)
  engine = library.engine
  found = _seeds(config, library.passages) if config.selfplay else ()
  sets = {
    name: _questions(
      name, spec, engine, config.seed, frozenset(), language(config)
    )
    for name, spec in sorted(config.eval.sets.items())
  }
  tested = tested_texts(sets)
  fixed = tuple(
    itertools.chain.from_iterable(
      _questions(name, spec, engine, config.seed, tested, language(config))
      for name, spec in sorted(config.pool.fixed.items())
    )
  )
  if not config.selfplay and len(fixed) < config.questions:
    raise ValueError(
      f"selfplay = False plays the questions of pool.fixed: an iteration takes "
      f"questions = {config.questions}, but there are {len(fixed)}."
    )
  _warn_of_tested(found, sets, language(config))
  return Texts(library, found, fixed, sets)


def _check_needs_passages(config: Any) -> None:
  """Refuses what a run would have to read a server's corpus for."""
  if config.search.engine in engines.LOCAL:
    return
  sets = {**config.eval.sets, **config.pool.fixed}
  asked = [name for name, spec in sets.items() if spec.answerable]
  if asked:
    raise ValueError(
      f"{asked[0]}: answerable asks for a search a question, which is for "
      f"engines on this machine ({', '.join(engines.LOCAL)}), not "
      f"{config.search.engine!r}. Set answerable to False."
    )
  titles = config.selfplay and config.seeds.source == "titles"
  if titles and not config.corpus:
    raise ValueError(
      "seeds.source = 'titles' takes titles of the corpus, and corpus is "
      "empty. Name its files, or a file of seeds."
    )


def _seeds(config, passages) -> tuple[types.Seed, ...]:
  source, hops = config.seeds.source, tuple(config.seeds.hops)
  if source == "titles":
    found = seeds.from_titles(passages, hops)
  elif source == "list":
    found = seeds.from_list(locate(config.seeds.path), hops)
  else:
    found = seeds.from_jsonl(locate(config.seeds.path), hops)
  if len(found) < config.questions:
    raise ValueError(
      f"questions = {config.questions}, but there are only {len(found)} seeds."
    )
  return found


def _warn_of_tested(found, sets, speech) -> None:
  """Reports seeds whose answer is that of an evaluation question."""
  shared = seeds.tested(found, itertools.chain(*sets.values()), speech)
  if shared:
    logging.warning(
      "%d of %d seeds ask for the answer of an evaluation question, such as "
      "%s: %r. The questions themselves are never trained on.",
      len(shared),
      len(found),
      shared[0].id,
      shared[0].targets[0],
    )


def _questions(name, spec, search, seed, without, speech) -> tuple:
  """Draws a set's questions, none of them in `without` or twice."""
  if not spec.path:
    raise ValueError(
      f"The question set {name!r} names no file: set its path "
      f"(--config.pool.fixed.{name}.path=FILE)."
    )
  if spec.size < 0:
    raise ValueError(f"{name}: size = {spec.size}; 0 takes all questions.")
  questions = benchmarks.load_questions(locate(spec.path), source=name)
  if spec.answerable:
    source = benchmarks.answerable(
      questions, search, seed=seed, language=speech
    )
  else:
    order = np.random.default_rng(seed).permutation(len(questions))
    source = (questions[i] for i in order)
  kept: dict[str, types.Question] = {}
  for question in source:
    if spec.size and len(kept) == spec.size:
      break
    text = question_key(question.text)
    if text not in without:
      kept.setdefault(text, question)
  if not kept or len(kept) < spec.size:
    kind = " that the corpus answers" if spec.answerable else ""
    raise ValueError(
      f"{name}: {spec.size} questions asked for, {len(kept)}{kind} in "
      f"{spec.path}. Lower its size."
    )
  return tuple(kept.values())


# --- weights ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class World:
  """What is fixed for a run."""

  texts: Texts
  tools: types.Tools
  challenger: learner_lib.Learner
  solver: learner_lib.Learner
  references: Mapping[str, Any]  # by role: the weights that it starts from
  shared: bool  # one policy plays both roles
  hashes: Mapping[str, str]  # for the manifest


def load_words(config: Any) -> Any:
  """Loads the tokenizer; refuses one that the policy cannot be asked with.

  Raises:
    ValueError: there is no tokenizer, it has ids that the weights have no rows
      for, or its template does not render a prompt.
  """
  path = locate(config.policy.path)
  words = tokenizer.load(config.policy.source, path)
  rows = weights.check(config.policy.source, path).vocab_size
  highest = max(words.get_vocab().values(), default=-1)
  if highest >= rows:
    raise ValueError(
      f"The tokenizer of policy.path = {config.policy.path!r} has ids up to "
      f"{highest}, but the weights have rows for {rows} ids (vocab_size). Put "
      "the tokenizer beside them that they were trained with."
    )
  prompts.check_template(words, config.policy.template, config.policy.example)
  return words


def assemble(
  config: Any, texts: Texts, workdir: str | Path | None = None
) -> World:
  """Loads weights and puts everything together.

  Args:
    config: an experiment that `check` accepts.
    texts: of `read`.
    workdir: of the run, for what its judge keeps; "" keeps nothing, and with
      None there is neither judge nor distiller.

  Raises:
    ValueError: weights, tokenizer or encoder cannot be loaded, or a question
      that was read is too long for an episode.
  """
  embedder = load_encoder(config.encoder)  # small: before weights
  words = load_words(config)
  mesh = sharding.mesh(*mesh_sizes(config))
  paths = starts(config)
  loaded = {
    start: weights.load(
      config.policy.source,
      locate(start),
      jax.random.key(config.seed),
      mesh=mesh,
    )
    for start in sorted(set(paths.values()))
  }
  backbone, _ = loaded[paths["solver"]]
  graphdef = model.build(backbone)
  engine = engine_lib.Engine(
    graphdef,
    backbone,
    words,
    tokenizer.token_bytes(words),
    tokenizer.end_ids(words),
    mesh=rollout_mesh(config, mesh),
    steps_per_dispatch=config.engine.steps_per_dispatch,
    deterministic=config.engine.deterministic,
    seed=config.seed,
    **engine_sizes(config),
  )
  tools = equip(config, words, engine, texts.library.engine, embedder)
  _check_lengths(config, texts, tools.render)
  if workdir is not None:  # last: it makes files
    model_judge = judge(config, workdir)
    tools = dataclasses.replace(
      tools, judge=model_judge, distiller=distiller(config, model_judge)
    )
  challenger, solver = (
    learner(config, config[name], graphdef, mesh) for name in ROLES
  )
  frozen = {
    start: jax.device_put(params, solver.programs.reference)
    for start, (_, params) in loaded.items()
  }
  hashes = {
    **prompts.digest(words, config.policy.template, rules_of(config).NOTES),
    **_assets(config),
    "corpus": texts.library.digest,
    "index": _digest_of([texts.library.digest, texts.library.identity]),
    "weights": _digest(locate(config.policy.path)),
    **{
      f"weights/{role}": _digest(locate(config[role].path))
      for role in ROLES
      if config[role].path
    },
    "encoder": _digest(locate(config.encoder.path)),
    "questions": _digest_of([texts.seeds, texts.fixed, dict(texts.sets)]),
    "judge": _digest_of([verdicts.digest(), distiller_lib.digest()]),
  }
  references = {role: frozen[paths[role]] for role in ROLES}
  return World(
    texts, tools, challenger, solver, references, config.policy.shared, hashes
  )


def rules_of(config: Any) -> type[environment.SearchQA]:
  """Returns the class that says what turns may hold."""
  return named("environment.kind", config.environment.kind, ENVIRONMENTS)


def equip(
  config: Any,
  words: Any,
  engine: Any,
  library: types.SearchEngine,
  embedder: types.Encoder,
) -> types.Tools:
  """Puts together what stages act with, but for judge and distiller.

  Args:
    config: an experiment.
    words: the tokenizer.
    engine: that plays.
    library: that is searched.
    embedder: of questions and skills.
  """
  # One a slot: every episode that waits has its query on the way.
  executor = ThreadPoolExecutor(config.engine.slots, "search")
  rules = config.environment.to_dict()
  del rules["kind"]
  kind = rules_of(config)
  speech = language(config)

  def render(prompt: prompts.Prompt) -> tuple[int, ...]:
    prompt = prompts.with_note(prompt, kind.NOTES)
    return prompts.render(
      words, prompt, config.policy.template, config.policy.example
    )

  return types.Tools(
    engine=engine,
    environments={
      role: kind(role, library, words, speech, executor=executor, **changed)
      for role, changed in (
        ("challenger", rules),
        ("solver", rules),
        # The evidence check is one greedy turn: nothing is corrected.
        ("evidence", rules | {"max_malformed": 0}),
      )
    }
    | {"text": environment.FreeText(words)},
    search=library,
    encoder=embedder,
    distiller=None,
    tokenizer=words,
    language=speech,
    render=render,
    on_episode=lambda episode: None,
  )


def load_encoder(spec: Any) -> types.Encoder:
  """Loads what `config.encoder` names.

  Raises:
    ValueError: there is no such folder, or it holds no encoder.
  """
  if spec.path == ENCODER_HASH:
    return encoder.HashEncoder(HASH_DIM)
  return encoder.load(
    locate(spec.path),
    query_prefix=spec.query_prefix,
    passage_prefix=spec.passage_prefix,
  )


# Of `config.learner`, what is no argument of `Learner`.
_OF_THE_LOOP = ("std_epsilon", "order", "old_logprobs")
# Fields of a role that its learner takes as they are.
_LEARNED = (
  "learning_rate",
  "warmup_updates",
  "minibatch_questions",
  "loss",
  "loss_scale",
  "clip_low",
  "clip_high",
  "kl_coefficient",
  "entropy_coefficient",
  "importance_cap",
)


def learner(
  config: Any, role: Any, graphdef: model.Decoder, mesh: Mesh
) -> learner_lib.Learner:
  """Returns the learner of one role, `config.challenger` or `config.solver`.

  No array is made: the mesh may be one of devices that are not here.

  Raises:
    ValueError: `policy.attention` cannot run there.
  """
  kind = attention.resolve(
    config.policy.attention,
    mesh.devices.flat[0].platform,
    graphdef.backbone.head_dim,
    config.policy.compute_dtype,
  )
  corrected = role.turns + config.environment.max_malformed
  return learner_lib.Learner(
    graphdef,
    mesh,
    **{name: role[name] for name in _LEARNED},
    most_tokens=min(role.episode_tokens, corrected * role.turn_tokens),
    compute_dtype=config.policy.compute_dtype,
    attention=kind,
    remat=config.policy.remat,
    **{k: v for k, v in config.learner.items() if k not in _OF_THE_LOOP},
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


def fits_solver(config: Any, render: Any, question: str) -> bool:
  """Says whether a question leaves the solver room for skills and a turn."""
  skills = config.bank.block_tokens if config.bank.top else 0
  # With a heading, so that the worked episode is the one with skills.
  prompt = prompts.solver(question, prompts.HEADING if skills else "")
  room = config.solver.episode_tokens - config.solver.turn_tokens
  return len(render(prompt)) + skills <= room


def set_texts(config: Any) -> frozenset[str]:
  """Returns the normalised texts of all questions in the files of `eval.sets`.

  Raises:
    ValueError: a file is missing or malformed.
  """
  return tested_texts(
    {
      name: benchmarks.load_questions(locate(spec.path), source=name)
      for name, spec in config.eval.sets.items()
    }
  )


def tested_texts(sets: Mapping[str, Any]) -> frozenset[str]:
  """Returns the normalised texts of all evaluation questions."""
  return frozenset(
    question_key(question.text)
    for questions in sets.values()
    for question in questions
  )


def _check_lengths(config: Any, texts: Texts, render: Any) -> None:
  """Refuses questions and seeds whose prompt leaves no room for a turn."""
  for question in itertools.chain(texts.fixed, *texts.sets.values()):
    if not fits_solver(config, render, question.text):
      raise ValueError(
        f"Question {question.id} is too long ({len(question.text)} characters):"
        f" beside its prompt, solver.episode_tokens = "
        f"{config.solver.episode_tokens} has no room for "
        f"solver.turn_tokens = {config.solver.turn_tokens} and "
        f"bank.block_tokens = {config.bank.block_tokens}. Raise the first."
      )
  room = config.challenger.episode_tokens - config.challenger.turn_tokens
  longest = sorted(texts.seeds, key=lambda s: -len(s.targets[0]))[:16]
  for seed in longest:
    searches = validity.searches_wanted(seed, config.challenger.min_searches)
    size = len(render(prompts.challenger(seed, searches)))
    if size > room:
      raise ValueError(
        f"The prompt of seed {seed.id} has {size} tokens; beside "
        f"challenger.turn_tokens, challenger.episode_tokens = "
        f"{config.challenger.episode_tokens} leaves {room}. Raise it."
      )


def _assets(config: Any) -> dict[str, str]:
  """The pins of the assets that a config names, as they were fetched."""
  named = set(re.findall(rf"{ASSETS}([\w.-]+)", config.to_json()))
  if not named:
    return {}
  lock = Path(locate(ASSETS)) / "assets.lock.json"
  if not lock.is_file():
    return {}
  fetched = json.loads(lock.read_text("utf-8"))
  return {
    f"assets/{name}": str(fetched[name]["pin"])
    for name in sorted(named & fetched.keys())
  }


def _digest(path: str) -> str:
  """SHA-256 of a file, or of the names and sizes of a folder's files."""
  if not path or not Path(path).exists():
    return "none"
  if Path(path).is_dir():
    files = sorted(p for p in Path(path).rglob("*") if p.is_file())
    return _digest_of([(p.name, p.stat().st_size) for p in files])
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(value: Any) -> str:
  return hashlib.sha256(repr(value).encode()).hexdigest()
