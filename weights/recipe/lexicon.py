"""The words of the stories: who can be in them, what, where and when.

The tables are text files in `words/`, one entry a line, columns split by `|`, lists by `;`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

WORDS = Path(__file__).parent / "words"


def lines_of(file: str) -> list[str]:
    """The lines of a word list, without comments."""
    return [line for line in (WORDS / file).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


def blocks(file: str, header: str = r"(?m)^== (.+)$") -> dict[str, tuple[str, ...]]:
    """A word list in blocks: name of the block -> its lines."""
    parts = re.split(header, "\n".join(lines_of(file)))
    return {name.strip(): tuple(text.strip().splitlines()) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def _rows(file: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in lines_of(file) if line.strip()]


def _list(cell: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in cell.split(";") if part.strip())


@dataclass(frozen=True)
class Animal:
    """A kind of animal (or fairy-tale creature) that can talk and have a name."""

    noun: str
    world: str
    size: int
    foods: tuple[str, ...]
    went: tuple[str, ...]
    home: str
    look: tuple[str, ...]
    flies: bool
    swims: bool


@dataclass(frozen=True)
class Thing:
    """A thing that can be held; `uses` are (base, past, -ing, rest) with `~` for `it`."""

    noun: str
    tags: frozenset[str]
    looks: tuple[str, ...]
    uses: tuple[tuple[str, str, str, str], ...]


@dataclass(frozen=True)
class Place:
    """Somewhere to be: `spots` are where a thing can lie or someone can sit, `sights` are whole sentences."""

    name: str
    at: str
    to: str
    world: str
    spots: tuple[str, ...]
    sights: tuple[str, ...]


_NAMES = {group: " ".join(names).split() for group, names in blocks("names.txt", "(?m)^(\\w+):$").items()}
GIRLS, BOYS, PETS = _NAMES["girls"], _NAMES["boys"], _NAMES["pets"]
COLOURS = [
    "red",
    "blue",
    "green",
    "yellow",
    "orange",
    "purple",
    "pink",
    "white",
    "black",
    "brown",
    "grey",
    "silver",
    "golden",
]

ANIMALS = {
    row[0]: Animal(
        row[0], row[1], int(row[2]), _list(row[3]), _list(row[4]), row[5], _list(row[6]), "f" in row[7], "s" in row[7]
    )
    for row in _rows("animals.txt")
}
PEOPLE = {row[0]: tuple(row[1:]) for row in _rows("people.txt")}
PLACES = [
    Place(row[0], _list(row[1])[0], _list(row[1])[1], row[2], _list(row[3]), _list(row[4]))
    for row in _rows("places.txt")
]
TRAITS = {row[0]: _list(row[1]) for row in _rows("traits.txt")}


def _thing(row: list[str]) -> Thing:
    uses = tuple(tuple(part.strip() for part in use.split(",")) for use in _list(row[3]))
    assert all(len(use) == 4 for use in uses), row
    return Thing(row[0], frozenset(row[1].split()), _list(row[2]), uses)  # type: ignore[arg-type]


_LOOK_AT = ("look at", "looked at", "looking at", "~")
SCENERY = {
    row[0]: (Thing(row[0], frozenset({row[1]}), _list(row[2]), (_LOOK_AT,)), tuple(row[3].split()))
    for row in _rows("scenery.txt")
}
THINGS = {row[0]: _thing(row) for row in _rows("things.txt")}


def _fits(tags: frozenset[str], rule: str) -> bool:
    words = rule.split()
    if any(word[0] == "-" and word[1:] in tags for word in words):
        return False
    wanted = [word for word in words if word[0] not in "*-"]
    return not wanted or any(word in tags for word in wanted)


THING_ADJECTIVES = {row[0]: (row[1], _list(row[2])) for row in _rows("thing_adjectives.txt")}


def adjectives_for(thing: Thing) -> list[str]:
    """The adjectives that make sense with a thing: no huge pebbles, no torn hammers."""
    return [word for word, (rule, _) in THING_ADJECTIVES.items() if _fits(thing.tags, rule) and word not in thing.noun]
