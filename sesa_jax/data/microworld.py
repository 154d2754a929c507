"""A small invented world to learn search in: articles, questions, skills.

Things of twelve types (a mill, a ferry, ...) stand in towns and were made by
people, who were born in towns, work for firms and won prizes. Eight things
share each name. An article of a thing tells three of its signs (colour, wood,
...), and a question about it the same three: one in which namesakes differ, and
two that they have in common. Which one differs is the *rule* of the type, drawn
with the seed of the world. So

* the name with the sign of the rule finds the right one,
* the name alone, or with another sign, finds the same one of eight every time.

All signs with their values would find it, too, but a query may not be so long;
the values without the signs mostly fit. Names of towns, firms and prizes say
what they are of (Port BaDi), so that it can be told what to ask for an answer.

Nothing in a question says which of its signs is the one; over all questions
about a type it is the one that all of them tell. Types are split into
`taught` ones, whose rule stands in the seed skills and is played in the warm
start, and `held_out` ones, whose rule does in neither.

Sources: everything is invented here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sesa_jax.types import Passage, Skill

# A name is two syllables, each with its capital: one id each.
SYLLABLES = tuple(c + v for c in "BDFGJKLMNPRSTVZ" for v in "aeiou")
TYPES = tuple(
  """mill ferry bridge tower chapel tavern opera statue garden market castle
  clock""".split()
)
SIGNS = {
  "colour": "red blue green white black grey pink brown".split(),
  "wood": "oak pine elm ash birch cedar maple willow".split(),
  "metal": "iron tin zinc brass silver copper nickel bronze".split(),
  "beast": "fox bear wolf hare deer owl swan goat".split(),
  "fruit": "plum pear fig lime apple grape melon cherry".split(),
}
NAMESAKES = 8  # things of one name
QUERY = 22  # characters of a query: room for a name and one sign, not for two

# Relations of a question, by hops: how it is asked about {thing}.
ASKED = {
  1: {
    "maker": ("Who made {thing}?", "Who is the maker of {thing}?"),
    "place": (
      "In which town is {thing} kept?",
      "Which town is home to {thing}?",
    ),
  },
  2: {
    "born": (
      "In which town was the maker of {thing} born?",
      "Which town bore the maker of {thing}?",
    ),
    "firm": (
      "Which firm employs the maker of {thing}?",
      "For which firm does the maker of {thing} work?",
    ),
    "prize": (
      "Which prize did the maker of {thing} win?",
      "Which prize went to the maker of {thing}?",
    ),
  },
  3: {
    "seat": (
      "In which town is the firm that employs the maker of {thing}?",
      "Which town holds the firm of the maker of {thing}?",
    ),
  },
}
# What tells names of towns, firms and prizes from those of people and things.
KINDS = {"town": "Port", "firm": "House", "prize": "Medal"}
_THING = (
  "{a} {type} of {signs}. {name} was made by {maker} and is kept in {place}.",
  "This {type} has {signs}. {name}, made by {maker}, is kept in {place}.",
  "{a} {type} with {signs}. {name} was made by {maker}. It is kept in {place}.",
)
_PERSON = (
  "Born in {born}, works for {firm} and won {prize}.",
  "Works for {firm}, won {prize} and was born in {born}.",
  "Won {prize}, was born in {born} and works for {firm}.",
)
_TOWN = (
  "A town between river and hill, which had the older name {old}.",
  "The older name of this town between river and hill was {old}.",
)
_FIRM = (
  "A firm with many people, which has its seat in {seat}.",
  "The seat of this firm with many people is in {seat}.",
)
_PRIZE = (
  "A prize that goes to one of many people each year.",
  "Each year this prize goes to one of many people.",
)

# What no file of a distiller or a judge may hold; a test reads this.
WORDS = frozenset(
  (
    *TYPES,
    *SIGNS,
    *(value for values in SIGNS.values() for value in values),
    *"made maker kept home town bore born employs firm prize won seat".split(),
    *(word.lower() for word in KINDS.values()),
  )
)


def article(name: str) -> str:
  """Returns "a" or "an", as stands before a name of a type."""
  return "an" if name[0] in "aeiou" else "a"


@dataclass(frozen=True)
class Thing:
  """What questions begin with."""

  name: str
  type: str
  signs: dict[str, str]  # all five; namesakes differ in one
  told: tuple[str, ...]  # of `signs`, in the order of its article
  maker: str
  place: str


@dataclass(frozen=True)
class Person:
  """Who made things."""

  name: str
  born: str
  firm: str
  prize: str


@dataclass(frozen=True)
class World:
  """Entities, and an article of each. Names are unique but for things."""

  rules: dict[str, str]  # type -> the sign in which namesakes differ
  taught: tuple[str, ...]  # types whose rule is in seed skills and warm start
  things: tuple[Thing, ...]  # namesakes stand together
  people: dict[str, Person]
  towns: dict[str, str]  # name -> its older one
  firms: dict[str, str]  # name -> the town of its seat
  prizes: tuple[str, ...]
  passages: tuple[Passage, ...]
  about: dict[str, Thing | Person]  # by the id of its passage

  def answer(self, thing: Thing, relation: str) -> tuple[str, ...]:
    """Returns what a relation of `ASKED` leads to, with aliases."""
    person = self.people[thing.maker]
    found = {
      "maker": thing.maker,
      "place": thing.place,
      "born": person.born,
      "firm": person.firm,
      "prize": person.prize,
      "seat": self.firms[person.firm],
    }[relation]
    return (found, self.towns[found]) if found in self.towns else (found,)


def rules(seed: int) -> dict[str, str]:
  """Draws the rule of each type, signs as evenly as can be."""
  rng = np.random.default_rng([seed, 1])
  signs = [sign for _ in range(-(-len(TYPES) // len(SIGNS))) for sign in SIGNS]
  order = rng.permutation(len(TYPES))
  return {type: signs[i] for type, i in zip(TYPES, order, strict=True)}


def split(seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Draws the types that are taught and those that are held out."""
  order = np.random.default_rng([seed, 2]).permutation(len(TYPES))
  half = len(TYPES) // 2
  taught, held_out = order[:half], order[half:]
  return tuple(TYPES[i] for i in taught), tuple(TYPES[i] for i in held_out)


def names(seed: int) -> Iterator[str]:
  """Yields names in an order of the seed, none of them part of a word."""
  words = " ".join(vocabulary_words()).lower()
  pairs = [a + b for a in SYLLABLES for b in SYLLABLES]
  for i in np.random.default_rng([seed, 3]).permutation(len(pairs)):
    if pairs[i].lower() not in words:
      yield pairs[i]


def build(
  seed: int, groups: int, fresh: Iterator[str], rng: np.random.Generator
) -> World:
  """Draws a world.

  Args:
    seed: of the rules.
    groups: names of things.
    fresh: names that nothing has yet.
    rng: draws the rest.
  """
  law = rules(seed)

  def take(count, kind=""):
    before = f"{KINDS[kind]} " if kind else ""
    return [f"{before}{next(fresh)}" for _ in range(count)]

  def pick(items):
    return items[rng.integers(len(items))]

  third = groups // 3
  towns = dict(zip(take(third, "town"), take(third, "town"), strict=True))
  places = list(towns)
  firms = {name: pick(places) for name in take(third, "firm")}
  prizes = take(third, "prize")
  people = {
    name: Person(name, pick(places), pick(list(firms)), pick(prizes))
    for name in take(groups * 2)
  }
  things = []
  for number, name in enumerate(take(groups)):
    type = TYPES[number % len(TYPES)]
    makers = rng.choice(list(people), NAMESAKES, replace=False)
    shared = {sign: pick(values) for sign, values in SIGNS.items()}
    differ = rng.choice(SIGNS[law[type]], NAMESAKES, replace=False)
    others = rng.permutation([s for s in SIGNS if s != law[type]])
    told = (law[type], *others[:2])
    for i in range(NAMESAKES):
      things.append(
        Thing(
          name,
          type,
          shared | {law[type]: str(differ[i])},
          tuple(str(s) for s in rng.permutation(told)),
          str(makers[i]),
          pick(places),
        )
      )
  world = World(
    law,
    split(seed)[0],
    tuple(things),
    people,
    towns,
    firms,
    tuple(prizes),
    (),
    {},
  )
  found = _articles(world, pick, rng)
  order = rng.permutation(len(found))
  passages = {
    f"{found[i][1]}-{number}": found[i] for number, i in enumerate(order)
  }
  return dataclasses.replace(
    world,
    passages=tuple(Passage(id, *rest) for id, (_, *rest) in passages.items()),
    about={id: about for id, (about, *_) in passages.items() if about},
  )


def _articles(world: World, pick, rng) -> list[tuple]:
  """Returns what an article is about, its title and its text."""
  found = [
    (
      thing,
      thing.name,
      pick(_THING).format(
        a=article(thing.type).capitalize(),
        name=thing.name,
        type=thing.type,
        signs=listed([(s, thing.signs[s]) for s in thing.told]),
        maker=thing.maker,
        place=thing.place,
      ),
    )
    for thing in world.things
  ]
  for person in world.people.values():
    # A town is called by its older name now and then.
    town = person.born if rng.random() < 0.8 else world.towns[person.born]
    fields = dataclasses.asdict(person) | {"born": town}
    found.append((person, person.name, pick(_PERSON).format(**fields)))
  for name, old in world.towns.items():
    found.append((None, name, pick(_TOWN).format(name=name, old=old)))
  for name, seat in world.firms.items():
    found.append((None, name, pick(_FIRM).format(name=name, seat=seat)))
  return [
    *found,
    *((None, name, pick(_PRIZE).format(name=name)) for name in world.prizes),
  ]


def listed(signs: Sequence[tuple[str, str]]) -> str:
  """Writes signs in a row: "colour red, wood oak and beast fox"."""
  *first, last = (f"{sign} {value}" for sign, value in signs)
  return f"{', '.join(first)} and {last}" if first else last


def asked_signs(thing: Thing, rng: np.random.Generator):
  """Returns the signs that a question tells, in a random order."""
  return [(str(s), thing.signs[s]) for s in rng.permutation(thing.told)]


def ask(thing: Thing, relation: str, signs, rng: np.random.Generator) -> str:
  """Writes a question."""
  ways = next(of[relation] for of in ASKED.values() if relation in of)
  what = f"the {thing.type} {thing.name} with {listed(signs)}"
  return ways[rng.integers(len(ways))].format(thing=what)


# --- skills ----------------------------------------------------------------


def skill(type: str, sign: str, number: int = 0) -> Skill:
  """Writes the rule of a type as a skill."""
  return Skill(
    id=f"seed-{number:03d}",
    category=f"same name: {type}",
    description=f"Many things share the name of {article(type)} {type}.",
    trigger=f"The question is about {article(type)} {type}.",
    evidence=f"The right {type} has the same {sign}.",
    avoidance=f"Other signs of {article(type)} {type}.",
    templates=(f"{{name}} {sign}",),
    origin="seed",
  )


# --- the tokenizer ---------------------------------------------------------

# Words that prompts, observations and skills are written in, whoever writes
# them; what is not here is spelt in bytes.
PLAIN = tuple(
  """
a about above after again all along also among an and another answer answers any
appears are as ask asked asking asks at avoid away back before behind below
beside best between both but by can candidate candidates change check chosen
clue come comes compare condition confirm contains copy cue cut date detail
differ different direct does done due each earlier either else empty entity even
event every exact fact few find finds first fits follow for form found from full
further game gives go good guess had has have he her here hides his history
holds hop how if in inside instead into is it its itself item kind know lands
last lead leads learn least leave less lesson line list lists little long look
looking looks made many mark match matches may mean meant mention mentioned miss
more most much must name named names near need needs never new next no nor not
note nothing number of off old older on once one only or order other others our
out over own page pages part parts person phrase pick place plain point query
question questions rare rarest rather read reading real relation repeat repeated
repeats result results right role rule said same say says search second see seen
sentence set several shared she short should show shows side sign silent similar
single so some someone something speaks spelt state states step steps still stop
story subject such sure take taken taking tell tells text than that the their
them then there these they thing things think this those three through time
title titles to together too topic trap true trust try turn two under unless
until up upon use used useful value very was way well were what when where which
while who whole whom whose why with without word words work works write writes
writing wrong year yes yet you your
alike alone anew anything believe being case choice cover covers described do
doing during extreme failure far fault give given giving goes help high large
like longer lower measure memory mind month none noun numbers ones passage
passages put reason record river rules search searches sees share shortest skill
skills span stand synonym target telling told topic types unbroken will would
Accepting An Answering Believe Check Copying From Giving Its It Keeping Names
Read Results Say Several Stopping Taking Those What Words Writing
""".split()
)
_LINE_STARTS = (
  "Answer Hops Question Lessons When Search Look Avoid No That Write"
)
_MARKS = ". , ; : ? ! ( ) { } \" ' - / + = _ [ ] & % *".split()
_TAGS = "think search answer question information".split()
_DOCS = 24  # passages of a prompt that have a number of one id
_SPLIT = (
  r"\n\n<information>|</information>\n\n|</?[a-z]+>|Doc \d+\(Title:"
  r"| ?[A-Z][a-z]*| ?[a-z]+| ?\d|\n+| ?[^\sA-Za-z0-9]|\s"
)


def vocabulary_words() -> tuple[str, ...]:
  """Returns the words that are one id, sorted."""
  texts = [way for of in ASKED.values() for ways in of.values() for way in ways]
  texts += [
    *_THING,
    *_PERSON,
    *_TOWN,
    *_FIRM,
    *_PRIZE,
    " ".join(PLAIN),
    " ".join(KINDS.values()),
    _LINE_STARTS,
  ]
  found = set(WORDS)
  for text in texts:
    words = "".join(c if c.isalpha() or c == "{" else " " for c in text)
    found.update(w for w in words.split() if w.isalpha())
  return tuple(sorted(found))


def tokenizer() -> PreTrainedTokenizerFast:
  """Builds the world's byte-level BPE tokenizer, of at most 1,024 ids.

  A word of `vocabulary_words`, a syllable of a name, a tag and a mark are one
  id each, with and without a space before; everything else is its bytes.
  """
  words = vocabulary_words()
  tokens = ["<|endoftext|>", "<|pad|>"]
  tokens += sorted(pre_tokenizers.ByteLevel.alphabet())
  pieces = [*SYLLABLES, *(f" {s}" for s in SYLLABLES)]
  pieces += [f"<{end}{tag}>" for tag in _TAGS for end in ("", "/")]
  pieces += ["\n\n<information>", "</information>\n\n", "\n\n"]
  pieces += [f"Doc {i}(Title:" for i in range(1, _DOCS + 1)]
  pieces += [f" {word}" for word in words]
  # Words that open a line, or follow a brace.
  pieces += _LINE_STARTS.split() + "name entity title".split()
  pieces += [*TYPES, *SIGNS]  # what opens a bracket
  pieces += [f" {mark}" for mark in ("{", "(", '"')]
  pieces += [f" {digit}" for digit in range(10)]
  level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  for piece in pieces:
    ((token, _),) = level.pre_tokenize_str(piece)
    tokens.append(token)
  vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
  assert len(vocab) <= 1024, len(vocab)
  # Whole pieces are looked up before any merge, and there are no others.
  made = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
  made.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), level]
  )
  made.decoder = decoders.ByteLevel()
  return PreTrainedTokenizerFast(
    tokenizer_object=made,
    eos_token="<|endoftext|>",
    pad_token="<|pad|>",
    model_max_length=1024,
    clean_up_tokenization_spaces=False,
  )


# --- files -----------------------------------------------------------------

GROUPS, HELD_OUT_GROUPS = 240, 120  # names of things: to train on, to ask about
QUESTIONS = 125  # of an evaluation set
TRAINING = 400  # of one or of two hops, for runs without a challenger
SETS = tuple(
  f"{kind}_{hops}" for kind in ("taught", "held_out") for hops in (1, 2)
)
# Qwen3's architecture at a size that a CPU trains.
ARCHITECTURE = {
  "architectures": ["Qwen3ForCausalLM"],
  "model_type": "qwen3",
  "vocab_size": 1024,
  "hidden_size": 128,
  "intermediate_size": 384,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 4,
  "head_dim": 32,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10_000.0,
  "tie_word_embeddings": True,
  "max_position_embeddings": 288,
}


def write(folder: Path, seed: int, hops: Sequence[int] = (1, 2)) -> None:
  """Writes a world: what is searched, asked for, taught and tested.

  The corpus holds two parts that share no entity. The seeds of the challenger
  are answers of one, and `train_1` and `train_2` ask about it, for runs without
  a challenger; the evaluation sets ask about the other. `skills.jsonl` has the
  rules of the taught types, `right.jsonl` all of them, `blank` is a policy's
  folder without weights.

  Args:
    folder: exists.
    seed: of the world.
    hops: of the seeds.
  """
  rng = np.random.default_rng([seed, 0])
  fresh = names(seed)
  own, other = (build(seed, n, fresh, rng) for n in (GROUPS, HELD_OUT_GROUPS))
  passages = {
    f"{part}-{p.id}": p
    for part, world in enumerate((own, other))
    for p in world.passages
  }
  _write(
    folder / "corpus.jsonl",
    (dict(id=i, title=p.title, text=p.text) for i, p in passages.items()),
  )
  _write(folder / "seeds.jsonl", _seeds(own, hops, rng))
  for name in SETS:
    rows = _questions(_of(name, other), int(name[-1]), QUESTIONS, other, rng)
    _write(folder / f"{name}.jsonl", rows)
  law = rules(seed)
  for name, types in (("skills", own.taught), ("right", TYPES)):
    skills = (skill(type, law[type], i) for i, type in enumerate(types))
    _write(folder / f"{name}.jsonl", map(dataclasses.asdict, skills))
  for count in (1, 2):
    rows = _questions(own.things, count, TRAINING, own, rng)
    _write(folder / f"train_{count}.jsonl", rows)
  blank = folder / "blank"
  tokenizer().save_pretrained(blank)
  text = json.dumps(ARCHITECTURE, indent=2)
  (blank / "config.json").write_text(text, "utf-8")
  found = dict(seed=seed, rules=law, taught=own.taught)
  (folder / "world.json").write_text(json.dumps(found, indent=2), "utf-8")


def _write(path: Path, rows) -> None:
  with path.open("w", encoding="utf-8") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)


def _seeds(world: World, hops: Sequence[int], rng) -> list[dict]:
  """An answer that leads to a thing, each once a hop count."""
  found = {
    (count, world.answer(thing, relation))
    for thing in world.things
    for count in hops
    for relation in ASKED[count]
  }
  ordered = sorted(found)
  return [
    dict(ground_truth=list(targets), search_turns=count)
    for count, targets in (ordered[i] for i in rng.permutation(len(ordered)))
  ]


def _of(name: str, world: World) -> list[Thing]:
  """The things that a set of `SETS` asks about."""
  taught = name.startswith("taught")
  return [t for t in world.things if (t.type in world.taught) == taught]


def _questions(
  things: Sequence[Thing], hops: int, count: int, world: World, rng
) -> Iterator[dict]:
  relations = list(ASKED[hops])
  for number, i in enumerate(rng.permutation(len(things))[:count]):
    thing = things[i]
    relation = relations[number % len(relations)]
    signs = asked_signs(thing, rng)
    yield dict(
      question=ask(thing, relation, signs, rng),
      golden_answers=world.answer(thing, relation),
      metadata=dict(type=thing.type, relation=relation),
    )
