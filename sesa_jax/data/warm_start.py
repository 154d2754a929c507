"""Scripted play of the microworld: what a policy imitates before it learns.

The script knows the protocol and copies what it reads; it does not know which
sign tells namesakes apart. Without a skill for the type it searches with any of
the signs told, or with the name alone, and answers from what that finds, right
or wrong. With one it mostly follows it. It never searches with the whole
question. The challenger searches from the answer to a thing, and tells its
signs, and now and then asks for something else. The evidence check names the
maker first, then the answer. Names, and values of signs, are drawn anew in each
episode: nothing about them is learned by heart.

Nothing of the distiller is known here, and nothing of this to the distiller.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sesa_jax import environment, prompts
from sesa_jax.data import microworld
from sesa_jax.data.microworld import SIGNS, SYLLABLES, Person, Thing, World
from sesa_jax.types import Passage, SearchEngine, Seed, Skill

TOP = 1  # passages a search
Block = Callable[[Sequence[Skill]], str]  # renders skills for a prompt

# Words of the articles that tell a relation of `microworld.ASKED`.
_FINDS = {
  "maker": "made kept",
  "place": "made kept",
  "born": "born",
  "firm": "works",
  "prize": "won",
}

# Shares of plays.
_ROLES = {"solver": 0.3, "challenger": 0.2, "evidence": 0.5}
_HOPS = {1: 0.45, 2: 0.55}
_SHOWN = {"none": 0.35, "followed": 0.35, "useless": 0.2, "placebo": 0.1}
_NAME_ALONE = 0.2  # of first queries that follow no skill
_MISSPELT = 0.04  # of first queries: nothing is found, and it is tried again
_STRAY = 0.1  # of plays with a skill, that do not follow it
_SLIP = 0.05  # of posed questions that leave out what tells namesakes apart
_ASTRAY = 0.15  # of posed questions that ask for something else than the target


@dataclass(frozen=True)
class Play:
  """An episode: a prompt, and turns of what is written and what comes back."""

  id: str
  prompt: str
  turns: tuple[tuple[str, str], ...]  # the last observation is ""
  passages: tuple[Passage, ...] = ()  # that its searches found
  question: str = ""
  targets: tuple[str, ...] = ()
  # The answer as passages say it, "" to a question astray; and the maker.
  told: tuple[str, str] = ("", "")

  def row(self) -> dict:
    """Returns it as a line of JSON, for `--mode=sft`."""
    segments = [{"text": self.prompt, "own": False}]
    for written, observed in self.turns:
      segments.append({"text": written, "own": True})
      if observed:
        segments.append({"text": observed, "own": False})
    return {"id": self.id, "segments": segments}


class _Turns:
  """Writes the turns of an episode."""

  def __init__(self, search: SearchEngine):
    self._search = search
    self.turns: list[tuple[str, str]] = []
    self.passages: list[Passage] = []

  def search(self, query: str) -> tuple[Passage, ...]:
    """Searches, and keeps what that looks like."""
    ((*found,),) = self._search.search([query], TOP)
    text = prompts.passages_text(found) if found else environment.NOTHING
    shown = f"{environment.OPEN}{text}{environment.CLOSE}"
    self.turns.append((f"<search> {query}</search>", shown))
    self.passages += found
    return tuple(found)

  def end(self, action: str, text: str, thought: str = "") -> tuple:
    """Writes the last turn; returns all."""
    before = f"<think> {thought}</think>" if thought else ""
    self.turns.append((f"{before}<{action}> {text}</{action}>", ""))
    return tuple(self.turns)


# --- the solver ------------------------------------------------------------


def solve(
  world: World,
  search: SearchEngine,
  thing: Thing,
  relation: str,
  shown: str,
  block: Block,
  rng: np.random.Generator,
) -> Play | None:
  """Plays a question about a thing; None where the script is at a loss.

  Args:
    world: of the thing.
    search: over its passages.
    thing: asked about.
    relation: of `microworld.ASKED`.
    shown: kind of the skills in the prompt, of `_SHOWN`.
    block: renders skills.
    rng: draws what the script leaves open.
  """
  rule = world.rules[thing.type]
  signs = microworld.asked_signs(thing, rng)
  question = microworld.ask(thing, relation, signs, rng)
  followed = rule
  if thing.type not in world.taught:
    followed = signs[rng.integers(3)][0]  # any: the rule is not taught
  skills = _skills(thing.type, followed, shown, rng)
  turns = _Turns(search)
  if rng.random() < _MISSPELT:
    turns.search(_misspelt(world, thing.name, rng))
  chosen = signs[rng.integers(3)] if rng.random() > _NAME_ALONE else ()
  if shown == "followed" and rng.random() > _STRAY:
    chosen = (followed, thing.signs[followed])
  found = turns.search(" ".join((thing.name, *chosen)))
  read = _read(world, found, thing, chosen)
  if read is None:
    return None
  if relation in ("maker", "place"):
    given = getattr(read, relation)
  else:
    person = _person(world, turns.search(read.maker), read.maker)
    if person is None:
      return None
    given = _told(turns.passages, person, relation, world)
    if relation == "seat":
      if person.firm not in [p.title for p in turns.search(person.firm)]:
        return None
      given = world.firms[person.firm]
  prompt = prompts.bare(prompts.solver(question, block(skills)))
  hops = next(h for h, of in microworld.ASKED.items() if relation in of)
  return Play(
    f"solver/{hops}/{shown}/{thing.type}",
    prompt,
    turns.end("answer", given),
    tuple(turns.passages),
    question,
    world.answer(thing, relation),
  )


def _read(world, found, thing, chosen) -> Thing | None:
  """The first of that name with what was searched for, else the first."""
  things = [a for p in found if isinstance(a := world.about.get(p.id), Thing)]
  named = [t for t in things if t.name == thing.name]
  fits = [t for t in named if chosen and chosen[0] in t.told]
  fits = [t for t in fits if t.signs[chosen[0]] == chosen[1]]
  return next(iter(fits or named), None)


def _person(world, found, name) -> Person | None:
  people = [world.about.get(p.id) for p in found]
  return next((p for p in people if p and p.name == name), None)


def _told(passages, person, relation, world) -> str:
  """What the person's article says, which may be a town's older name."""
  given = getattr(person, "firm" if relation == "seat" else relation)
  text = next(p.text for p in passages if world.about.get(p.id) is person)
  return given if given in text else world.towns[given]


def _misspelt(world: World, name: str, rng) -> str:
  """A name that nothing has."""
  known = {passage.title for passage in world.passages} | {name}
  known |= set(world.towns.values())
  while (other := _drawn(SYLLABLES, rng) + _drawn(SYLLABLES, rng)) in known:
    pass
  return other


def _drawn(items, rng):
  return items[rng.integers(len(items))]


# --- skills in a prompt ----------------------------------------------------


def _skills(type: str, sign: str, shown: str, rng) -> list[Skill]:
  """One or two skills; of them one, or none, is about the type."""
  if shown == "none":
    return []
  others = [t for t in microworld.TYPES if t != type]
  skills = []
  if shown == "followed":
    skills.append(_skill(type, sign, rng))
  while len(skills) < (1 if rng.random() < 0.4 else 2):
    about = "" if shown == "placebo" else str(_drawn(others, rng))
    skills.append(_skill(about, str(_drawn(list(SIGNS), rng)), rng))
  return [skills[i] for i in rng.permutation(len(skills))]


def _skill(type: str, sign: str, rng) -> Skill:
  """A skill in any words; without a type it is about nothing."""
  plain = microworld.PLAIN

  def some(least, most):
    return " ".join(
      _drawn(plain, rng) for _ in range(rng.integers(least, most + 1))
    )

  about = type or some(1, 1)
  triggers = [
    f"The question is about {microworld.article(about)} {about}.",
    f"{some(1, 3)} ({sign}, {about}) {some(2, 6)}.",
    f"{some(2, 5)} {about} {some(1, 4)}.",
  ]
  if type:
    triggers.append(f"{some(1, 3)} ({about}, {some(1, 1)}) {some(2, 6)}.")
  searches = (
    f"{{name}} {sign}",
    f"{{name}} {sign}",
    f"{{entity}} {sign} {about}",
    f"{{entity}} {sign}",
    f"{{entity}} {about} {sign}",
  )
  return Skill(
    "", "", "", _drawn(triggers, rng), "", "", (_drawn(searches, rng),), "seed"
  )


# --- the challenger --------------------------------------------------------


def pose(
  world: World,
  search: SearchEngine,
  target: str,
  relation: str,
  rng: np.random.Generator,
) -> Play | None:
  """Plays the search for a question; None where the script is at a loss.

  Args:
    world: of the target.
    search: over its passages.
    target: the answer to ask for.
    relation: by which it is an answer, one of `microworld.ASKED`.
    rng: draws what the script leaves open.
  """
  hops = next(h for h, of in microworld.ASKED.items() if relation in of)
  turns = _Turns(search)
  found = turns.search(f"{target} {_FINDS[relation]}")
  if hops == 2:
    people = [
      a for p in found if isinstance(a := world.about.get(p.id), Person)
    ]
    person = next((p for p in people if getattr(p, relation) == target), None)
    if person is None:
      return None
    found = turns.search(f"{person.name} {_FINDS['maker']}")
    key, value = "maker", person.name
    told = _told(turns.passages, person, relation, world)
  else:
    key, value, told = relation, target, target
  things = [a for p in found if isinstance(a := world.about.get(p.id), Thing)]
  thing = next((t for t in things if getattr(t, key) == value), None)
  if thing is None:
    return None
  signs = microworld.asked_signs(thing, rng)
  if rng.random() < _SLIP:
    signs = [s for s in signs if s[0] != world.rules[thing.type]]
  if rng.random() < _ASTRAY:
    others = [r for r in microworld.ASKED[hops] if r != relation]
    relation, told = _drawn(others, rng), ""
  question = microworld.ask(thing, relation, signs, rng)
  targets = (target,)
  if target in world.towns:
    targets = (target, world.towns[target])
  seed = Seed("", targets, hops)
  prompt = prompts.bare(prompts.challenger(seed, hops))
  return Play(
    f"challenger/{hops}/{thing.type}",
    prompt,
    turns.end("question", question),
    tuple(turns.passages),
    question,
    targets,
    (told, thing.maker),
  )


def evidence(
  world: World, posed: Play, others: Sequence[Play], room: int, count, rng
) -> Play:
  """Answers a posed question from its own passages, among those of others."""
  own = {p.id: p for p in posed.passages}
  lent = {p.id: p for play in others for p in play.passages if p.id not in own}
  rest = list(lent.values())

  def shown(n):
    passages = [*own.values(), *rest[:n]]
    order = rng.permutation(len(passages))
    return prompts.evidence(posed.question, [passages[i] for i in order])

  kept = len(rest)
  while kept and count(prompts.bare(shown(kept))) > room:
    kept -= 1
  turns = _Turns(None).end("answer", *posed.told)
  name = posed.id.replace("challenger", "evidence")
  prompt = prompts.bare(shown(kept))
  return Play(name, prompt, turns, (), posed.question, posed.targets)


# --- all of it -------------------------------------------------------------


def plays(
  seed: int,
  count: int,
  *,
  index: Callable[[Sequence[Passage]], SearchEngine],
  block: Block,
  tokens: Callable[[str], int],
  hops: Sequence[int] = (1, 2),
  room: int = 224,
  worlds: int = 12,
) -> Iterator[tuple[World, Play]]:
  """Yields plays of all roles, names as they are in worlds of their own.

  Args:
    seed: of the world that is trained for: its rules, and none of its entities.
    count: of plays.
    index: makes a search engine.
    block: renders skills for a prompt.
    tokens: counts the tokens of a text.
    hops: of the questions.
    room: tokens of an evidence prompt.
    worlds: that the plays are spread over.
  """
  shares = {h: _HOPS.get(h, _HOPS[2]) for h in hops}
  for number in range(worlds):
    rng = np.random.default_rng([seed, 4, number])
    fresh = microworld.names(int(rng.integers(2**31)))
    world = microworld.build(seed, 240, fresh, rng)
    search = index(world.passages)
    lenders: list[Play] = []  # of passages
    left = len(range(number, count, worlds))
    while left:
      role, h = _weighed(_ROLES, rng), _weighed(shares, rng)
      relation = _drawn(list(microworld.ASKED[h]), rng)
      if role == "solver":
        thing = _drawn(world.things, rng)
        shown = _weighed(_SHOWN, rng)
        play = solve(world, search, thing, relation, shown, block, rng)
      else:
        if h == 3:  # nobody poses those
          continue
        play = pose(world, search, _target(world, relation, rng), relation, rng)
        if play and role == "evidence":
          if not play.told[0]:
            continue
          lenders = [*lenders[-15:], play]
          others = [p for p in lenders if p.targets != play.targets]
          lent = [_drawn(others, rng)] if others and rng.random() < 0.5 else []
          play = evidence(world, play, lent, room, tokens, rng)
      if play:
        left -= 1
        yield world, play


def _weighed(shares, rng):
  weights = np.array(list(shares.values()))
  return list(shares)[rng.choice(len(weights), p=weights / weights.sum())]


def _target(world: World, relation: str, rng) -> str:
  return _drawn(
    {
      "maker": list(world.people),
      "place": list(world.towns),
      "born": list(world.towns),
      "firm": list(world.firms),
      "prize": world.prizes,
    }[relation],
    rng,
  )


_NAME = re.compile(r"\b([A-Z][a-z])([A-Z][a-z])\b")
_VALUE = re.compile(
  rf"\b({'|'.join(v for values in SIGNS.values() for v in values)})\b"
)


def redrawn(rows: dict, rng: np.random.Generator) -> dict:
  """Draws an episode's names and values anew, the same all through it."""
  first, second = (
    dict(zip(SYLLABLES, rng.permutation(SYLLABLES), strict=True))
    for _ in range(2)
  )
  values = {}
  for of in SIGNS.values():
    values |= dict(zip(of, rng.permutation(of), strict=True))

  def change(text):
    text = _NAME.sub(lambda m: f"{first[m[1]]}{second[m[2]]}", text)
    return _VALUE.sub(lambda m: values[m[1]], text)

  segments = [s | {"text": change(s["text"])} for s in rows["segments"]]
  return rows | {"segments": segments}


def write(path: Path, seed: int, count: int, **ways) -> None:
  """Writes the episodes of the warm start; see `plays`."""
  rng = np.random.default_rng([seed, 5])
  rows = [redrawn(play.row(), rng) for _, play in plays(seed, count, **ways)]
  with path.open("w", encoding="utf-8") as file:
    for place, i in enumerate(rng.permutation(len(rows))):
      row = rows[i] | {"id": f"{place}/{rows[i]['id']}"}
      file.write(json.dumps(row) + "\n")
