"""One story in the making: who is in it, where it happens, what has been said already.

The first mention of a friend or a grown-up introduces them ("her friend Tom"); later ones do not ("Tom").
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random

from .lexicon import (
    ANIMALS,
    BOYS,
    COLOURS,
    GIRLS,
    PEOPLE,
    PETS,
    PLACES,
    THING_ADJECTIVES,
    THINGS,
    TRAITS,
    Animal,
    Place,
    Thing,
)
from .phrases import PHRASES, WEATHERS
from .template import Node, TemplateError, parse, render, tidy

_FEMALE = {"hen", "cow", "witch", "mermaid", "queen", "princess", "girl", "goose", "fairy", "ladybird"}
_MALE = {"king", "prince", "wizard", "boy", "fisherman", "postman"}
_PRONOUNS = {
    "f": {"he": "she", "him": "her", "his": "her", "self": "herself", "hers": "hers"},
    "m": {"he": "he", "him": "him", "his": "his", "self": "himself", "hers": "his"},
}


@dataclass
class Being:
    """A character: child, animal, grown-up or creature of a fairy tale."""

    noun: str
    sex: str
    name: str = ""
    adjectives: tuple[str, ...] = ()
    kind: str = "animal"
    animal: Animal | None = None
    intro: str = ""
    ref: str = ""
    met: bool = False
    shown: bool = False
    asked_for: bool = False

    @property
    def world(self) -> str:
        return self.animal.world if self.animal else "land"

    def full(self) -> str:
        return " ".join((*self.adjectives, self.noun))


def sex_of(noun: str, rng: Random) -> str:
    """Female or male, by the word where it says so."""
    if noun in _FEMALE:
        return "f"
    return "m" if noun in _MALE else rng.choice("fm")


def make_hero(noun: str, adjectives: tuple[str, ...], rng: Random, name: str = "") -> Being:
    """A hero from the noun of a request; children and people are named always, animals mostly."""
    sex = sex_of(noun, rng)
    if noun in ("girl", "boy"):
        return Being(noun, sex, name or rng.choice(GIRLS if sex == "f" else BOYS), adjectives, "child")
    if noun in PEOPLE:
        return Being(noun, sex, name or rng.choice(GIRLS if sex == "f" else BOYS), adjectives, "person")
    animal = ANIMALS[noun]
    human = noun in ("king", "queen", "prince", "princess", "knight", "wizard", "witch", "pirate", "mermaid")
    names = (GIRLS if sex == "f" else BOYS) if human else PETS
    given = name or (rng.choice(names) if rng.random() < 0.72 else "")
    return Being(noun, sex, given, adjectives, "animal", animal)


@dataclass
class Tale:
    """The slots of one story, filled from a seeded generator."""

    rng: Random
    hero: Being
    thing: Thing | None = None
    thing_adjectives: tuple[str, ...] = ()
    friend: Being | None = None
    weather: str = ""
    kept: dict[str, str] = field(default_factory=dict)
    used: set[tuple[str, int]] = field(default_factory=set)
    recent: Being | None = None
    pronouns: int = 0
    dated: bool = False
    speaker: str = ""

    def __post_init__(self) -> None:
        rng = self.rng
        world = self.hero.world
        homes = [
            place for place in PLACES if place.world == world or (world == "fairy" and place.world in ("fairy", "land"))
        ]
        if self.hero.kind == "person":
            homes = [place for place in homes if place.name not in ("wood", "hill")] or homes
        self.place: Place = rng.choice(homes)
        others = [place for place in homes if place is not self.place]
        self.other: Place = rng.choice(others) if others else self.place
        self.friend = self.friend or self._make_friend(self.hero, ())
        self.third = self._make_friend(self.hero, (self.friend.noun,), self.friend.name)
        self.grown = self._make_grown_up()
        self.stranger = self._make_stranger()
        seasons = [key for key in WEATHERS if key.split()[0] not in ("sea", "jungle")]
        if world == "snow":
            seasons = [key for key in seasons if key.startswith("winter")]
        if world in ("jungle", "sea"):
            seasons = ["sea calm"] if world == "sea" else ["jungle hot", "jungle wet"]
        if self.weather:
            wanted = self.weather.split()
            seasons = [key for key in seasons if any(word in key for word in wanted)] or seasons
        self.sky = rng.choice(seasons)

    def _make_friend(self, hero: Being, taken: tuple[str, ...], taken_name: str = "") -> Being:
        rng = self.rng
        sex = ("m" if hero.sex == "f" else "f") if rng.random() < 0.85 else hero.sex
        if hero.kind in ("child", "person"):
            names = [name for name in (GIRLS if sex == "f" else BOYS) if name not in (hero.name, taken_name)]
            name = rng.choice(names)
            bond = rng.choice(
                [
                    "{h.his} friend ~",
                    "{h.his} best friend ~",
                    "{h.his} neighbour ~",
                    "{h.his} cousin ~",
                    "{h.his} good friend ~",
                    "{h.his} old friend ~",
                ]
            )
            noun = ("girl" if sex == "f" else "boy") if hero.kind == "child" else "friend"
            return Being(noun, sex, name, (), hero.kind, None, bond.replace("~", name), name)
        worlds = ("land", "fairy") if hero.world == "fairy" else (hero.world,)
        shy = {"king", "queen", "prince", "princess", "knight", "giant", "ghost", "pirate"}
        pool = [
            a
            for a in ANIMALS.values()
            if a.world in worlds
            and a.noun != hero.noun
            and a.noun not in taken
            and a.noun not in shy
            and (a.noun not in _FEMALE or sex == "f")
            and (a.noun not in _MALE or sex == "m")
        ]
        animal = rng.choice(pool)
        name = rng.choice([n for n in PETS if n not in (hero.name, taken_name)])
        bond = rng.choice(
            [
                "{h.his} friend ~ the #",
                "{h.his} best friend ~ the #",
                "~ the #",
                "{h.his} good friend ~ the #",
                "{h.his} neighbour ~ the #",
                "a # called ~",
                "{h.his} old friend ~ the #",
            ]
        )
        return Being(
            animal.noun, sex, name, (), "animal", animal, bond.replace("~", name).replace("#", animal.noun), name
        )

    def _make_grown_up(self) -> Being:
        rng, hero = self.rng, self.hero
        if hero.kind == "child":
            intro, ref, sex = rng.choice(
                [
                    ("{h.his} grandmother", "Grandma", "f"),
                    ("{h.his} mother", "Mum", "f"),
                    ("{h.his} father", "Dad", "m"),
                    ("{h.his} grandfather", "Grandpa", "m"),
                    ("{h.his} mother", "{h.his} mother", "f"),
                    ("{h.his} father", "{h.his} father", "m"),
                    ("{h.his} aunt Rose", "Aunt Rose", "f"),
                    ("{h.his} uncle Jim", "Uncle Jim", "m"),
                    ("{h.his} granny", "Granny", "f"),
                    ("old Mr Finch", "Mr Finch", "m"),
                    ("old Mrs Dell", "Mrs Dell", "f"),
                ]
            )
        elif hero.kind == "person":
            intro, ref, sex = rng.choice(
                [
                    ("old Mr Finch", "Mr Finch", "m"),
                    ("old Mrs Dell", "Mrs Dell", "f"),
                    ("{h.his} old grandmother", "{h.his} grandmother", "f"),
                    ("{h.his} sister Ada", "Ada", "f"),
                    ("{h.his} wise old aunt", "{h.his} aunt", "f"),
                    ("the mayor", "the mayor", "m"),
                ]
            )
        else:
            wise = {
                "land": ["owl", "badger", "tortoise", "goat", "donkey", "toad", "heron"],
                "jungle": ["elephant", "tortoise", "camel"],
                "snow": ["walrus", "bear", "whale"],
                "sea": ["turtle", "whale", "lobster"],
                "fairy": ["owl", "wizard", "toad", "hermit"],
            }
            noun = rng.choice(
                [n for n in wise[hero.world] if n not in (hero.noun, self.friend.noun if self.friend else "")]
            )
            sex = "m" if noun in ("wizard", "hermit") else rng.choice("fm")
            options = [
                ("{h.his} grandmother", "{h.his} grandmother", "f"),
                ("{h.his} mother", "{h.his} mother", "f"),
                ("{h.his} father", "{h.his} father", "m"),
                (f"the old {noun}", f"the {noun}", sex),
                (f"a wise old {noun}", f"the old {noun}", sex),
                (f"the oldest {noun} for miles around", f"the old {noun}", sex),
            ]
            intro, ref, sex = rng.choice(options)
        return Being("grown-up", sex, "", (), "grown", None, intro, ref)

    def _make_stranger(self) -> Being:
        rng, hero = self.rng, self.hero
        if hero.kind in ("child", "person"):
            noun, sex = rng.choice(
                [
                    ("old woman", "f"),
                    ("old man", "m"),
                    ("farmer", "m"),
                    ("shepherd", "m"),
                    ("fisherman", "m"),
                    ("young woman", "f"),
                    ("gardener", "f"),
                    ("postman", "m"),
                    ("sailor", "m"),
                    ("milk girl", "f"),
                    ("tinker", "m"),
                    ("beekeeper", "f"),
                    ("carter", "m"),
                    ("travelling musician", "m"),
                    ("washerwoman", "f"),
                    ("woodcutter", "m"),
                ]
            )
            if noun == hero.noun:
                noun, sex = "old woman", "f"
            return Being(noun, sex, "", (), "person", None)
        worlds = ("land",) if hero.world == "fairy" else (hero.world,)
        taken = {hero.noun, self.friend.noun if self.friend else "", self.third.noun, self.grown.ref.split()[-1]}
        pool = [a for a in ANIMALS.values() if a.world in worlds and a.noun not in taken]
        assert pool, (hero, taken)
        animal = rng.choice(pool)
        adjective = rng.choice(["old", "young", "small", "tired", "plump", "thin", "elderly", ""])
        return Being(animal.noun, sex_of(animal.noun, rng), "", (adjective,) if adjective else (), "animal", animal)

    # -- what the templates ask for --------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        probe = _PROBES.get(key)
        return probe(self) if probe else bool(self.kept.get(key))

    def keep(self, key: str, value: str) -> None:
        self.kept[key] = value

    def phrase(self, name: str) -> Node:
        if name in _SPEECH:
            before, self.speaker = self.speaker, name[-1]
            if name[:-1] == "said" and before not in ("", name[-1]) and self.rng.random() < 0.35:
                return parse(self.rng.choice(("answered", "replied")) + " {" + name[-1] + "}")
        return parse(self._fresh("<" + name, PHRASES[name]))

    def _fresh(self, name: str, options: tuple[str, ...]) -> str:
        """One option, not used before in this story while there are others."""
        left = [i for i in range(len(options)) if (name, i) not in self.used]
        if not left:
            self.used -= {(name, i) for i in range(len(options))}
            left = list(range(len(options)))
        chosen = self.rng.choice(left)
        self.used.add((name, chosen))
        return options[chosen]

    def say(self, template: str) -> str:
        return render(parse(template), self)

    def saw(self, text: str) -> None:
        """Note what a fixed text means for the next pronoun: new paragraphs and other people call for a name."""
        if _breaks_focus(text):
            self.recent = None
        if "\n" in text:
            self.speaker = ""

    def look_up(self, key: str) -> str:
        if key == "H" and self._may_say_he():
            self.pronouns += 1
            return "\1" + _PRONOUNS[self.hero.sex]["he"].capitalize()
        key = key[0].lower() + key[1:]
        if key in self.kept:
            return self.kept[key]
        who, _, what = key.partition(".")
        cast = {"h": self.hero, "f": self.friend, "g": self.grown, "x": self.stranger, "k": self.third}
        if who in cast:
            being = cast[who]
            assert being is not None
            return self._being(being, what)
        if who == "job":
            return dict(zip(("place", "tool", "stuff"), PEOPLE[self.hero.noun], strict=True))[what]
        if who in ("p", "q"):
            return self._place(self.place if who == "p" else self.other, what)
        if who == "t":
            return self._thing(what)
        if who == "w":
            if what in ("open", "when"):
                if what == "open" and self.dated:
                    return _lower(self.say("<oneday>"))
                self.dated = True
            return self.say(self._fresh("w." + what, WEATHERS[self.sky][what]))
        raise TemplateError(f"no slot {{{key}}}")

    def _may_say_he(self) -> bool:
        return self.recent is self.hero and self.pronouns < 2 and self.rng.random() < 0.55

    def _being(self, being: Being, what: str) -> str:
        if what in ("", "a", "n", "he", "his", "him", "def"):
            if what in ("", "a", "def") and being is self.hero:
                self.pronouns = 0
            if what in ("", "a", "he", "def") or (being is not self.hero and being.sex == self.hero.sex):
                self.recent = being
        if what == "n" and being is self.third and not being.met:
            what = ""
        if what == "he" and being.intro and not being.met:
            what = ""
        if what in _PRONOUNS["f"]:
            return _PRONOUNS[being.sex][what]
        if what == "":
            return self._mention(being)
        if what == "a":
            being.met = True
            return self._introduce(being)
        if what == "n":
            return being.name or (being.full() if being.adjectives else "little " + being.noun)
        if what == "noun":
            return being.noun
        if what == "def":
            return self._named_start(being)
        if what == "ref":
            being.met = True
            return self.say(being.ref)
        if what == "full":
            return being.full()
        if what == "line":
            return self._trait_line(being)
        if what == "child":
            return {"f": "girl", "m": "boy"}[being.sex]
        animal = being.animal
        if what == "went":
            if animal:
                return self.rng.choice((*animal.went, *animal.went, "went", "hurried", "set off"))
            return self.rng.choice(["went", "walked", "ran", "hurried", "skipped", "set off", "strolled"])
        if what == "food":
            foods = (
                animal.foods
                if animal
                else (
                    "bread and jam",
                    "apple pie",
                    "pancakes",
                    "plum cake",
                    "tomato soup",
                    "buttered toast",
                    "honey cake",
                    "cherry tart",
                )
            )
            return self._fresh(f"food{being.noun}", foods)
        if what == "home":
            houses = (
                "small house by the church",
                "flat above the bakery",
                "yellow house at the end of the lane",
                "farmhouse near the mill",
                "tall thin house by the station",
                "cottage with a green door",
                "house with a crooked chimney",
                "white house by the bridge",
            )
            return animal.home if animal else self._fresh("house", houses)
        if what == "look":
            looks = (
                animal.look
                if animal
                else (
                    "freckles on both cheeks",
                    "curly hair",
                    "a gap between two teeth",
                    "muddy knees",
                    "a quick smile",
                    "a long plait",
                )
            )
            if not animal and being.sex == "m":
                looks = looks[:-1]
            return self._fresh(f"look{being.noun}", looks)
        raise TemplateError(f"no slot .{what}")

    def _named_start(self, being: Being) -> str:
        """A first mention for the very start of a text: "Lily", "the little dragon", "Pip the little dragon"."""
        being.met = being.shown = True
        if being.kind == "child":
            if being.asked_for:
                return (
                    f"{being.name}, a {being.full()}," if being.adjectives else f"a {being.full()} called {being.name}"
                )
            return self.rng.choice((being.name, being.name, f"little {being.name}"))
        if not being.name:
            return "the " + being.full()
        return self.rng.choice(
            (f"{being.name} the {being.full()}", f"the {being.full()}, whose name was {being.name},")
        )

    def _introduce(self, being: Being) -> str:
        if being.intro:
            return self.say(being.intro)
        full = being.full()
        being.shown = True
        if not being.name:
            return "a " + full
        return "a " + full + self.rng.choice([" called ", " named "]) + being.name

    def _mention(self, being: Being) -> str:
        if not being.met and being.intro:
            being.met = True
            return self.say(being.intro)
        if being.ref:
            return self.say(being.ref)
        adjective = (
            being.adjectives[-1] + " " if being.adjectives and self.rng.random() < (0.3 if being.name else 0.15) else ""
        )
        if not being.name:
            return f"the {adjective}{being.noun}"
        if being.kind == "child" or not being.shown or self.rng.random() < 0.7:
            return being.name
        return f"the {adjective}{being.noun}"

    def _trait_line(self, being: Being) -> str:
        known = [word for word in being.adjectives if word in TRAITS]
        if known and being is self.hero:
            word = self.rng.choice(known)
            return self.say(self._fresh("trait" + word, TRAITS[word]))
        return self.say("<habit>")

    def _place(self, place: Place, what: str) -> str:
        if what == "":
            return "the " + place.name
        if what == "in":
            return place.at
        if what == "to":
            return place.to
        if what == "spot":
            return self._fresh("spot" + place.name, place.spots)
        if what == "sight":
            return self._fresh("sight" + place.name, place.sights)
        raise TemplateError(f"no slot p.{what}")

    def _thing(self, what: str) -> str:
        thing = self.thing
        if thing is None:
            raise TemplateError("no thing in this story")
        full = " ".join((*self.thing_adjectives, thing.noun))
        if what == "":
            return f"the {full}" if self.rng.random() < 0.45 and len(full) < 28 else f"the {thing.noun}"
        if what == "a":
            return f"a {full}"
        if what == "full":
            return full
        if what == "noun":
            return thing.noun
        if what == "the":
            return f"the {full}"
        if what == "look":
            return self._fresh("look", thing.looks)
        if what == "line":
            known = [word for word in self.thing_adjectives if word in THING_ADJECTIVES]
            plain: tuple[str, ...] = ("quite simple, but well made", "a fine one", "the best in the house")
            if thing.noun not in THINGS:
                known = [word for word in known if word in COLOURS]
                plain = ("the best for miles around", "quite unlike any other", "a real beauty")
            lines = THING_ADJECTIVES[self.rng.choice(known)][1] if known else plain
            return self._fresh("line", lines)
        if what in ("use", "used", "using"):
            base, past, ing, rest = self.thing.uses[int(self.rng.random() * len(thing.uses))]  # type: ignore[union-attr]
            return {"use": base, "used": past, "using": ing}[what] + " " + rest.replace("~", "it")
        raise TemplateError(f"no slot t.{what}")

    def tell(self, template: str) -> str:
        """The finished text of a plot."""
        return tidy(self.say(template))


@cache
def _breaks_focus(text: str) -> bool:
    return "\n" in text or _OTHERS.search(text) is not None


_OTHERS = re.compile(
    r"\b(she|her|he|him|his|they|them|[Gg]randmother|mother|father|lady|judge|baby|both|man|woman|king|queen|magpie|everyone|others)\b"
)


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _tag(tag: str) -> Callable[[Tale], bool]:
    return lambda tale: tale.thing is not None and tag in tale.thing.tags


_SPEECH = {verb + who for verb in ("said", "asked", "cried", "whisper", "sob") for who in "hfgx"}

_PROBES: dict[str, Callable[[Tale], bool]] = {
    **{
        f"t_{tag}": _tag(tag)
        for tag in (
            "soft",
            "cloth",
            "paper",
            "shiny",
            "light",
            "music",
            "wear",
            "open",
            "wind",
            "water",
            "wheel",
            "round",
            "tool",
            "toy",
            "book",
            "treasure",
            "big",
            "small",
            "glass",
            "china",
            "wood",
            "metal",
        )
    },
    "child": lambda tale: tale.hero.kind == "child",
    "person": lambda tale: tale.hero.kind == "person",
    "animal": lambda tale: tale.hero.kind == "animal",
    "flies": lambda tale: bool(tale.hero.animal and tale.hero.animal.flies),
    "sea": lambda tale: tale.hero.world == "sea",
    "land": lambda tale: tale.hero.world == "land",
    "snowland": lambda tale: tale.hero.world == "snow",
    "mixed": lambda tale: tale.friend is not None and tale.friend.sex != tale.hero.sex,
    "girl": lambda tale: tale.hero.sex == "f",
    "winter": lambda tale: tale.sky.startswith("winter"),
    "sunny": lambda tale: "sunny" in tale.sky,
}

__all__ = ["THINGS", "Being", "Tale", "make_hero", "sex_of"]
