"""Stories, requests and chats from a seed.

A subject ("a red kite", "a brave little mouse") chooses among the plots that suit it; the seed decides all the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random

from .lexicon import ANIMALS, BOYS, GIRLS, PEOPLE, PETS, SCENERY, THINGS, TRAITS, adjectives_for
from .rescues import RESCUES, VEHICLES
from .tale import Being, Tale, make_hero
from .template import article

PLOTS_FOLDER = Path(__file__).parent / "plots"
END_OF_TEXT, USER, ASSISTANT, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"

ODD = frozenset(
    [
        "lost",
        "broken",
        "torn",
        "forgotten",
        "magic",
        "enchanted",
        "strange",
        "mysterious",
        "secret",
        "borrowed",
        "wet",
        "muddy",
        "empty",
        "dusty",
        "rusty",
    ]
)
"""Adjectives that are half a plot already: a plot takes such a thing only where it says so."""


@dataclass(frozen=True)
class Plot:
    """A template with the rules for what it suits."""

    name: str
    kind: str
    text: str
    rules: dict[str, frozenset[str]] = field(default_factory=dict)

    def rule(self, name: str) -> frozenset[str]:
        return self.rules.get(name, frozenset())


@dataclass(frozen=True)
class Subject:
    """What a story is about. `text` is how a request says it."""

    kind: str
    noun: str
    adjectives: tuple[str, ...] = ()
    name: str = ""
    other: str = ""
    free: bool = False
    hero: Subject | None = None

    @property
    def key(self) -> str:
        return " ".join((*self.adjectives, self.noun))

    @property
    def text(self) -> str:
        if self.kind in ("theme", "pair", "idea"):
            return self.noun
        if self.hero is not None:
            return _with_hero(self.hero, self.key)
        phrase = f"{article(self.key)} {self.key}"
        return f"{phrase} {self.other} {self.name}" if self.name else phrase


def _with_hero(hero: Subject, thing: str) -> str:
    """ "a fox and a red lantern", "Lily and her red kite": the same hero and thing always get the same words."""
    if hero.name and not hero.other:
        return f"{hero.name} and {'her' if hero.noun == 'girl' else 'his'} {thing}"
    return f"{hero.text} and {article(thing)} {thing}"


def _words(rule: str, words: str) -> list[str]:
    return [part.strip() for part in words.split(";")] if rule == "ask" else words.split()


@lru_cache(maxsize=1)
def all_plots() -> dict[str, list[Plot]]:
    """The plots of every file, by kind; the file's name is the kind."""
    plots: dict[str, list[Plot]] = {}
    for path in sorted(PLOTS_FOLDER.glob("*.txt")):
        kind = path.stem.split("_")[0].rstrip("s")
        for block in re.split(r"(?m)^== ", path.read_text(encoding="utf-8"))[1:]:
            header, _, text = block.partition("\n")
            name, *rules = [cell.strip() for cell in header.split("|")]
            parsed = {
                key.strip(): frozenset(_words(key.strip(), words))
                for key, _, words in (rule.partition(":") for rule in rules)
            }
            plots.setdefault(kind, []).append(Plot(name, kind, text.strip(), parsed))
    return plots


# -- which subjects there are ------------------------------------------------------------------------------------------

_NOT_FOR_PEOPLE = frozenset(
    ["white", "grey", "brown", "black", "spotted", "blue", "purple", "green", "pink", "golden", "fluffy", "magic"]
)
_FURRY = frozenset(
    [
        "mouse",
        "rabbit",
        "squirrel",
        "fox",
        "cat",
        "kitten",
        "dog",
        "puppy",
        "lamb",
        "sheep",
        "pony",
        "foal",
        "calf",
        "bear",
        "hamster",
        "wolf",
        "duckling",
        "chick",
        "owl",
        "koala",
        "panda",
    ]
)
_SIZES = ("little", "young", "old", "tiny", "small", "big")


def traits_for(noun: str) -> list[str]:
    """The traits that make sense for a hero: no fluffy frogs, no purple bakers."""
    words = [word for word in TRAITS if not (word == "fluffy" and noun not in _FURRY)]
    if noun in ("girl", "boy") or noun in PEOPLE:
        words = [word for word in words if word not in _NOT_FOR_PEOPLE]
    if noun in PEOPLE:
        words = [word for word in words if word not in ("tiny", "little", "small", "lost")]
    if noun in ("girl", "boy"):
        words = [word for word in words if word not in ("old", "wise", "big")]
    if noun in ("duckling", "chick", "kitten", "puppy", "piglet", "lamb", "foal", "calf"):
        words = [word for word in words if word not in ("old", "big", "wise", "strong")]
    if noun in ("giant", "elephant", "whale", "bear", "hippo", "cow"):
        words = [word for word in words if word not in ("tiny", "small")]
    return words


@lru_cache(maxsize=1)
def _names() -> dict[str, list[str]]:
    return {"thing": list(THINGS), "animal": list(ANIMALS), "person": list(PEOPLE), "scenery": list(SCENERY)}


def random_subject(rng: Random) -> Subject:
    """A subject as somebody might ask for it."""
    draw = rng.random()
    names = _names()
    if draw < 0.08:
        return _hero_and_thing(rng)
    if draw < 0.11:
        idea = rng.choice(sorted(IDEAS))
        return Subject("idea", idea, (rng.choice(IDEAS[idea]),))
    if draw < 0.42:
        noun = rng.choice(names["thing"])
        return Subject("thing", noun, _thing_adjectives(noun, rng))
    if draw < 0.74:
        group = rng.random()
        noun = (
            rng.choice(["girl", "boy"])
            if group < 0.16
            else rng.choice(names["person"])
            if group < 0.26
            else rng.choice(names["animal"])
        )
        if rng.random() < 0.16:
            name = rng.choice(
                GIRLS if noun == "girl" else BOYS if noun == "boy" else GIRLS + BOYS if noun in PEOPLE else PETS
            )
            return Subject("being", noun, _traits(noun, rng), name, rng.choice(("called", "named")))
        return Subject("being", noun, _traits(noun, rng))
    if draw < 0.86:
        noun = rng.choice(names["scenery"])
        thing, adjectives = SCENERY[noun]
        return Subject(next(iter(thing.tags)), noun, (rng.choice(adjectives),) if rng.random() < 0.85 else ())
    if draw < 0.89:
        child = rng.choice(("girl", "boy"))
        name = rng.choice(GIRLS if child == "girl" else BOYS) if rng.random() < 0.6 else ""
        pet = rng.choice(
            (
                "dog",
                "cat",
                "puppy",
                "kitten",
                "pony",
                "rabbit",
                "hamster",
                "tortoise",
                "donkey",
                "guinea pig",
                "parrot",
                "duck",
            )
        )
        said = f"a {child}" + (f" {rng.choice(('called', 'named'))} {name}" if name else "")
        return Subject("pair", f"{said} and {'her' if child == 'girl' else 'his'} {pet}", (child, pet), name)
    if draw < 0.93:
        first, second = rng.sample([noun for noun in names["animal"] if ANIMALS[noun].world == "land"], 2)
        return Subject("pair", f"{article(first)} {first} and {article(second)} {second}", (first, second))
    plot = rng.choice(all_plots()["theme"])
    return Subject("theme", rng.choice(sorted(plot.rule("ask"))), (plot.name,))


IDEAS = {
    "courage": ("afraid-of-dark", "small-saves", "shy-song"),
    "being brave": ("afraid-of-dark", "small-saves"),
    "someone who is afraid of the dark": ("afraid-of-dark",),
    "friendship": ("lonely-new", "storm-home", "because"),
    "making friends": ("lonely-new", "short-hill"),
    "sharing": ("greedy", "short-guest"),
    "being greedy": ("greedy",),
    "kindness": ("sick-nurse", "short-guest", "grumpy"),
    "helping others": ("sick-nurse", "storm-home", "small-saves"),
    "telling the truth": ("naughty-trick",),
    "a trick": ("naughty-trick",),
    "never giving up": ("practise-skill",),
    "learning something new": ("practise-skill",),
    "patience": ("impatient",),
    "being patient": ("impatient",),
    "getting lost": ("lost-way",),
    "finding the way home": ("lost-way",),
    "a surprise": ("surprise",),
    "a surprise party": ("surprise",),
    "a race": ("race",),
    "the moon": ("moon",),
    "someone who wants the moon": ("moon",),
    "the stars": ("short-star-count",),
    "an echo": ("short-echo",),
    "being lazy": ("lazy",),
    "winter": ("lazy",),
    "a song": ("shy-song", "short-noise"),
    "being sad": ("because",),
    "being lonely": ("lonely-new",),
    "a grumpy neighbour": ("grumpy",),
    "being small": ("small-saves",),
    "a house in a storm": ("storm-home",),
    "working together": ("storm-home",),
}
"""What a request may name that is no thing and no hero, and the plots that are about it."""


def _hero_and_thing(rng: Random) -> Subject:
    """A hero and a thing together."""
    noun = rng.choice(_names()["thing"])
    adjectives = _thing_adjectives(noun, rng)
    draw = rng.random()
    if draw < 0.6:
        girl = rng.random() < 0.5
        name = rng.choice(GIRLS if girl else BOYS)
        other = "" if draw < 0.3 else rng.choice(("called", "named"))
        return Subject("thing", noun, adjectives, hero=Subject("being", "girl" if girl else "boy", (), name, other))
    animal = rng.choice([n for n, a in ANIMALS.items() if a.world == "land"])
    return Subject(
        "thing", noun, adjectives, hero=Subject("being", animal, _traits(animal, rng)[:1] if draw < 0.8 else ())
    )


def _thing_adjectives(noun: str, rng: Random) -> tuple[str, ...]:
    words = [word for word in adjectives_for(THINGS[noun]) if _thing_plots(noun, (word,))]
    draw = rng.random()
    if draw < 0.10:
        return ()
    plain = ("little", "small", "big", "old", "shiny", "beautiful", "new")
    colours = [
        word
        for word in words
        if word in ("red", "blue", "green", "yellow", "purple", "pink", "white", "black", "brown", "silver", "golden")
    ]
    if draw < 0.22:
        return (rng.choice([word for word in plain if word in words]), rng.choice(colours))
    if draw < 0.45:
        return (rng.choice(colours),)
    return (rng.choice(words),)


def _traits(noun: str, rng: Random) -> tuple[str, ...]:
    words = traits_for(noun)
    draw = rng.random()
    if draw < 0.10:
        return ()
    if draw < 0.30:
        sizes = [word for word in ("little", "young", "old") if word in words]
        rest = [word for word in words if word not in _SIZES]
        return (rng.choice(rest), rng.choice(sizes))
    return (rng.choice(words),)


# -- which plots suit a subject ----------------------------------------------------------------------------------------


def _suits_thing(plot: Plot, noun: str, adjectives: tuple[str, ...]) -> bool:
    tags = THINGS[noun].tags | ({"rescue"} if noun in RESCUES else frozenset())
    nouns, only, also = plot.rule("nouns"), plot.rule("only"), plot.rule("also")
    if nouns and noun not in nouns:
        return False
    needs = plot.rule("needs")
    if any((word[1:] in tags) if word[0] == "-" else (word not in tags) for word in needs):
        return False
    if only and "*" not in only and not any(word in only for word in adjectives):
        return False
    return all(word not in ODD or word in also or word in only or "*" in also for word in adjectives)


def _suits_being(plot: Plot, hero: Being) -> bool:
    heroes, worlds, nouns = plot.rule("heroes"), plot.rule("worlds"), plot.rule("nouns")
    if heroes and hero.kind not in heroes:
        return False
    if nouns and hero.noun not in nouns:
        return False
    if worlds and hero.world not in worlds:
        return False
    return not any(word in plot.rule("not") for word in (*hero.adjectives, hero.noun))


@lru_cache(maxsize=20000)
def _thing_plots(noun: str, adjectives: tuple[str, ...]) -> list[Plot]:
    found = [plot for plot in all_plots()["thing"] if _suits_thing(plot, noun, adjectives)]
    special = [plot for plot in found if plot.rule("nouns")]
    return found + special * 3


def _some_hero(plot: Plot, rng: Random) -> Being:
    """A hero for a plot that is about something else."""
    kinds = sorted(plot.rule("heroes") or {"child", "animal"})
    kind = rng.choice(kinds)
    if kind == "person":
        noun = rng.choice(_names()["person"])
    elif kind == "child":
        noun = rng.choice(["girl", "boy"])
    else:
        noun = rng.choice([n for n, a in ANIMALS.items() if a.world == "land" and a.size > 0])
    draw = rng.random()
    adjectives: tuple[str, ...] = ()
    if draw < 0.5:
        calm = (
            "little",
            "young",
            "small",
            "cheerful",
            "friendly",
            "curious",
            "dreamy",
            "quiet",
            "gentle",
            "busy",
            "hopeful",
            "clever",
            "polite",
            "kind",
        )
        adjectives = (rng.choice([word for word in calm if word in traits_for(noun)]),)
    return make_hero(noun, adjectives, rng)


def story(seed: int | str, subject: Subject | None = None) -> str:
    """One story, the same for the same seed and subject."""
    rng = Random(f"story {seed}")
    return write_story(subject or random_subject(rng), rng)


def write_story(subject: Subject, rng: Random) -> str:
    """A story about a subject; a plot is drawn again when a story comes out too long or too short."""
    for _ in range(8):
        text = _write(subject, rng)
        if 80 <= len(text.split()) <= 330:
            return text
    return text


_WEATHER = {
    "snowflake": "snowy",
    "snowman": "snowy",
    "raindrop": "rainy",
    "rainbow": "rainy",
    "wind": "windy",
    "sledge": "snowy frosty",
}


def _weather(plot: Plot, noun: str) -> str:
    return _WEATHER.get(noun) or " ".join(sorted(plot.rule("weather")))


def _write(subject: Subject, rng: Random) -> str:
    if subject.kind == "thing":
        plots = _thing_plots(subject.noun, subject.adjectives)
        hero = None
        if subject.hero is not None:
            kind = "child" if subject.hero.noun in ("girl", "boy") else "animal"
            plots = [plot for plot in plots if not plot.rule("heroes") or kind in plot.rule("heroes")]
            hero = make_hero(subject.hero.noun, subject.hero.adjectives, rng, subject.hero.name)
            hero.asked_for = kind == "animal"
        plot = rng.choice(plots)
        tale = Tale(
            rng,
            hero or _some_hero(plot, rng),
            THINGS[subject.noun],
            subject.adjectives,
            weather=_weather(plot, subject.noun),
        )
        if "rescue" in plot.rule("needs"):
            trouble, rescue, mark = RESCUES[subject.noun]
            tale.kept["t_mark"] = mark
            tale.kept["trouble"], tale.kept["rescue"] = tale.say(trouble), tale.say(rescue)
        return tale.tell(plot.text)
    if subject.kind == "being":
        hero = make_hero(subject.noun, subject.adjectives, rng, subject.name)
        hero.asked_for = not subject.free
        return _being_tale(hero, None, rng)
    if subject.kind == "idea":
        return _idea_tale(subject.adjectives[0], rng)
    if subject.kind == "pair":
        first, second = subject.adjectives
        hero = make_hero(first, (), rng, subject.name)
        hero.asked_for = True
        friend = make_hero(
            second,
            (),
            rng,
        )
        return _being_tale(hero, friend, rng)
    if subject.kind == "theme":
        plot = next(p for p in all_plots()["theme"] if p.name == subject.adjectives[0])
        return Tale(rng, _some_hero(plot, rng), weather=" ".join(sorted(plot.rule("weather")))).tell(plot.text)
    thing = SCENERY[subject.noun][0]
    plots = [p for p in all_plots()[subject.kind] if not p.rule("nouns") or subject.noun in p.rule("nouns")]
    plots = [
        p for p in plots if not any(word in p.rule("not") for word in (*subject.adjectives, subject.noun))
    ] or plots
    plot = rng.choice(plots)
    tale = Tale(rng, _some_hero(plot, rng), thing, subject.adjectives, weather=_weather(plot, subject.noun))
    if subject.noun in VEHICLES:
        for slot, words in zip(("v.home", "v.work", "v.sound"), VEHICLES[subject.noun], strict=True):
            tale.kept[slot] = tale.say(words)
    return tale.tell(plot.text)


def _idea_tale(plot_name: str, rng: Random) -> str:
    plot = next(plot for plot in all_plots()["being"] if plot.name == plot_name)
    while True:
        hero = _some_hero(plot, rng)
        if _suits_being(plot, hero):
            return Tale(rng, hero, weather=_weather(plot, "")).tell(plot.text)


def _being_tale(hero: Being, friend: Being | None, rng: Random) -> str:
    plots = [plot for plot in all_plots()["being"] if _suits_being(plot, hero)]
    if friend is not None:
        plots = [plot for plot in plots if "<saidf>" in plot.text and not plot.rule("alone")]
    best = [plot for plot in plots if any(word in plot.rule("best") for word in (*hero.adjectives, hero.noun))]
    plot = rng.choice(best if best and rng.random() < 0.7 else plots)
    if friend is not None:
        friend.name = friend.name if friend.name != hero.name else ""
        friend.name = friend.name or rng.choice(
            [name for name in ("Bramble", "Pepper", "Clover", "Juniper", "Rowan", "Tansy") if name != hero.name]
        )
        if hero.kind == "child":
            bonds = ["{h.his} # ~", "{h.his} # ~", "{h.his} clever # ~", "{h.his} faithful # ~"]
        else:
            bonds = ["{h.his} friend ~ the #", "~ the #", "{h.his} best friend ~ the #", "a # called ~"]
        bond = rng.choice(bonds)
        friend.intro, friend.ref = bond.replace("~", friend.name).replace("#", friend.noun), friend.name
    return Tale(rng, hero, None, (), friend, weather=" ".join(sorted(plot.rule("weather")))).tell(plot.text)


def numbered(first: int, count: int) -> Iterator[str]:
    """Stories of consecutive seeds."""
    return (story(seed) for seed in range(first, first + count))
