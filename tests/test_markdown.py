from __future__ import annotations

import dataclasses

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sesa_jax.skills import markdown, record
from sesa_jax.types import Skill

SKILL = Skill(
  id="skill-00012",
  category="dates",
  description="Check which event a date belongs to.",
  trigger="There are several.",
  evidence="The date in the sentence\nthat tells the event.",
  avoidance="# of pages: guessing",
  templates=("{event} date", "when did {event} end"),
  origin="chat",
  source_question="When did it end?",
  source_seed="s1",
  created_at=20,
)
TEXT = """\
---
name: "skill-00012"
description: "Check which event a date belongs to. When: There are several."
metadata:
  id: "skill-00012"
  category: "dates"
  origin: "chat"
  source_question: "When did it end?"
  source_seed: "s1"
  created_at: "20"
---

Check which event a date belongs to.

## When to use

There are several.

## What to look for

The date in the sentence
that tells the event.

## What to avoid

\\# of pages: guessing

## Query templates

- {event} date
- when did {event} end
"""


def test_the_text_of_a_skill():
  assert markdown.text_of(SKILL, "skill-00012") == TEXT


# What opens a section, a list, a scalar or a comment, ends a line, or is lost
# at the ends of one; and any other text.
HARD = st.text(
  alphabet="#-*\\ \n\t\r\x85\u2028`:'\"{}&|>%@!?é🙂\x00\ufeff", max_size=12
)
ANY = HARD | st.text(max_size=30) | st.sampled_from(["---", "\n\n## x", "null"])
SOME = ANY.filter(str.strip)


@settings(max_examples=300)
@given(
  id=SOME,
  category=ANY,
  description=SOME,
  trigger=SOME,
  evidence=ANY,
  avoidance=ANY,
  templates=st.lists(ANY, max_size=3).map(tuple),
  origin=st.sampled_from(record.ORIGINS),
  source_question=ANY,
  source_seed=ANY,
  created_at=st.integers(0, 1000),
)
def test_the_round_trip_is_exact(**fields):
  skill = Skill(**fields)
  row = markdown.parse(markdown.text_of(skill, "name"), "here")
  assert record.skill_of(row) == skill
  assert (row["state"], row["retrieved"]) == ("active", 0)


@settings(max_examples=50)
@given(st.lists(SOME, min_size=1, max_size=5, unique=True))
def test_names_follow_the_convention(ids):
  skills = [dataclasses.replace(SKILL, id=id) for id in ids]
  names = markdown.names(skills)
  assert len(set(names)) == len(names)
  for name in names:
    assert 1 <= len(name) <= 64
    assert name == name.strip("-")
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert "--" not in name


def test_names_that_fall_together():
  skills = [
    dataclasses.replace(SKILL, id=id) for id in ("A b", "a-B", "é", "x" * 99)
  ]
  assert markdown.names(skills) == ["a-b", "a-b-2", "skill", "x" * 56]


def test_yaml_reads_the_front_matter_and_its_description_is_short():
  long = dataclasses.replace(SKILL, trigger="when " * 400)
  text = markdown.text_of(long, "n")
  front = yaml.safe_load(text.split("---\n")[1])
  assert front["name"] == "n"
  assert len(front["description"]) == 1024
  assert front["description"].startswith(SKILL.description + " When: when ")
  assert front["metadata"]["category"] == "dates"
  assert record.skill_of(markdown.parse(text, "here")) == long


def test_folders_there_and_back(tmp_path):
  skills = [SKILL, dataclasses.replace(SKILL, id="Seed 1", templates=())]
  markdown.write(skills, tmp_path / "out")
  files = sorted((tmp_path / "out").rglob("*.md"))
  assert [path.relative_to(tmp_path).as_posix() for path in files] == [
    "out/seed-1/SKILL.md",
    "out/skill-00012/SKILL.md",
  ]
  assert files[1].read_text("utf-8") == TEXT
  rows = markdown.read(tmp_path / "out")
  assert [record.skill_of(row) for row in rows] == [skills[1], SKILL]
  with pytest.raises(ValueError, match="out exists and is not an empty folder"):
    markdown.write(skills, tmp_path / "out")


FOREIGN = """\
---
name: pdf-dates
description: >
  Finds dates
  in files.
license: MIT
---
# Dates in files

## Overview

Not ours.

## When to use
A file is asked about.


## Query templates

Try these:
* {file} date
- {file}
  created
"""


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_what_others_wrote(ends):
  row = markdown.parse(FOREIGN.replace("\n", ends), "here")
  assert record.skill_of(row) == Skill(
    id="pdf-dates",
    category="",
    description="Finds dates in files.\n",
    trigger="A file is asked about.",
    evidence="",
    avoidance="",
    templates=("{file} date", "{file}\ncreated\n".strip()),
    origin="authored",
  )


@pytest.mark.parametrize(
  ("old", "new", "says"),
  [
    ("---\nname", "--\nname", "opens with front matter"),
    ("name: pdf-dates\n", "", "holds at least a name"),
    ("name: pdf-dates", "name: 3", "holds at least a name"),
    ("license: MIT", "license: [", "front matter is not YAML"),
    ("## When to use", "## When", "no section '## When to use'"),
    ("A file is asked about.", "", "key 'trigger': empty"),
    ("license: MIT", "metadata: [1]", "metadata are no mapping"),
    ("license: MIT", "metadata: {created_at: x}", "created_at 'x'"),
    ("license: MIT", "metadata: {origin: web}", "key 'origin': 'web'"),
  ],
)
def test_malformed_files_are_named(tmp_path, old, new, says):
  (tmp_path / "a").mkdir()
  assert old in FOREIGN
  (tmp_path / "a" / "SKILL.md").write_text(FOREIGN.replace(old, new, 1))
  with pytest.raises(ValueError, match=rf"SKILL\.md.*{says}"):
    markdown.read(tmp_path)


def test_bad_folders(tmp_path):
  with pytest.raises(ValueError, match=r"holds no folder with a SKILL\.md"):
    markdown.read(tmp_path)
  for name in "ab":
    (tmp_path / name).mkdir()
    (tmp_path / name / "SKILL.md").write_text(TEXT)
  with pytest.raises(ValueError, match=r"b.SKILL\.md: a second .*skill-00012"):
    markdown.read(tmp_path)
  (tmp_path / "b" / "SKILL.md").write_bytes(b"---\nname: \xff")
  with pytest.raises(ValueError, match=r"b.SKILL\.md is not UTF-8"):
    markdown.read(tmp_path)
