"""The small template language in which every plot is written.

`[a|b|c]` picks one, nested as deep as one likes; `{h.he}` reads a slot (`{H.he}` with a capital); `{x=a|b}` picks,
keeps and prints nothing; `{?x:then|else}` asks whether a slot is set; `<sad>` takes a phrase not yet used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any, Protocol

Node = tuple[Any, ...]
"""A tagged tuple: text s, pick options, slot key, set key node, if key then else, phrase name, seq nodes."""


class TemplateError(ValueError):
    """A template that does not close its brackets, or asks for a slot or a phrase that is not there."""


class Slots(Protocol):
    """What a story offers to its templates."""

    rng: Random

    def look_up(self, key: str) -> str: ...
    def has(self, key: str) -> bool: ...
    def keep(self, key: str, value: str) -> None: ...
    def phrase(self, name: str) -> Node: ...
    def saw(self, text: str) -> None: ...


@cache
def parse(template: str) -> Node:
    """The tree of a template; parsed once for each text."""
    node, end = _options(template, 0, "")
    if end != len(template):
        raise TemplateError(f"unexpected {template[end]!r} at {end} in {template[:60]!r}")
    return node


def _options(text: str, at: int, close: str) -> tuple[Node, int]:
    """Alternatives up to `close`; a single one is returned bare. At the top level `|` separates alternatives too."""
    options = []
    while True:
        node, at = _sequence(text, at)
        options.append(node)
        if at < len(text) and text[at] == "|":
            at += 1
            continue
        if close and (at >= len(text) or text[at] != close):
            raise TemplateError(f"missing {close!r} in {text[max(0, at - 60) : at + 20]!r}")
        return (options[0] if len(options) == 1 else ("pick", tuple(options))), at


_PLAIN = re.compile(r"[^\[\]{}<>|]+")


def _sequence(text: str, at: int) -> tuple[Node, int]:
    nodes: list[Node] = []
    while at < len(text) and text[at] not in "]}|>":
        mark = text[at]
        if mark == "[":
            node, at = _options(text, at + 1, "]")
            at += 1
        elif mark == "{":
            node, at = _slot(text, at + 1)
        elif mark == "<":
            end = text.index(">", at)
            node, at = ("phrase", text[at + 1 : end]), end + 1
        else:
            found = _PLAIN.match(text, at)
            assert found is not None
            node, at = ("text", found.group()), found.end()
        nodes.append(node)
    return (nodes[0] if len(nodes) == 1 else ("seq", tuple(nodes))), at


def _slot(text: str, at: int) -> tuple[Node, int]:
    found = re.compile(r"(\??)([A-Za-z_]\w*(?:\.\w+)?)([:=}])").match(text, at)
    if found is None:
        raise TemplateError(f"bad slot at {text[at : at + 30]!r}")
    asks, key, mark = found.groups()
    if mark == "}":
        return ("slot", key), found.end()
    node, end = _options(text, found.end(), "}")
    if mark == "=":
        return ("set", key, node), end + 1
    if not asks:
        raise TemplateError(f"a condition needs a question mark: {text[at : at + 30]!r}")
    then, other = node[1] if node[0] == "pick" else (node, ("text", ""))
    return ("if", key, then, other), end + 1


def render(node: Node, slots: Slots) -> str:
    """The text of a tree, choices drawn from the story's own generator."""
    kind = node[0]
    if kind == "text":
        slots.saw(node[1])
        return str(node[1])
    if kind == "seq":
        return "".join([render(part, slots) for part in node[1]])
    if kind == "pick":
        options = node[1]
        return render(options[int(slots.rng.random() * len(options))], slots)
    if kind == "slot":
        key = node[1]
        value = slots.look_up(key)
        return capital(value) if key[0].isupper() else value
    if kind == "phrase":
        return render(slots.phrase(node[1]), slots)
    if kind == "set":
        slots.keep(node[1], render(node[2], slots))
        return ""
    return render(node[2] if slots.has(node[1]) else node[3], slots)


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


_ASKING = re.compile(
    r"(?i)^(?:(?:and|but|so|well|then|oh|hm|yes|no|really|excuse me|hello|why),? )*(?:whom|whose|who\b|why\b|"
    r"(?:who|what|where|when|why) (?:is|are|was|were|am|do|does|did|don't|didn't|has|have|can|can't|could|shall|should|"
    r"will|would|must|else|else's|if|"
    r"about|kind|sort|use|good|time|comes|makes|must|troubles|made|happened|has happened|really|wants|not)\b|"
    r"which (?:one|way)|whatever has|"
    r"how (?:do|did|can|could|is|are|was|shall|much|many|long|far|high|hard|on earth|have|about)\b|"
    r"(?:is|are|am|was|were|do|does|did|have|has|had|can|could|will|would|shall|should|may|must|isn't|aren't|don't|"
    r"didn't|won't|can't|need)"
    r" (?:i|you|he|she|it|we|they|that|this|there|the|your|my|his|her|nobody|anyone|anybody|somebody|someone)\b)"
)
_ORDER = re.compile(
    r"(?i)(?:look|come|try|give|listen|go|stop|wait|tell|take|let|show|no|yes|that|it|there|this|i|we|they)\b"
)
_SPEECH_END = re.compile(
    r'"([^"\n]+?)([.!?,])"'
    r'( [^".!?,;\n]{0,40}?\b(?:asked|wanted to know|said|cried|called|whispered|answered|replied)\b| [a-z]+)?'
)


def _mark(found: re.Match[str]) -> str:
    """Speech with the mark that fits it: templates often share one mark among alternatives."""
    speech, mark, tag = found[1], found[2], found[3] or ""
    last = re.split(r"(?<=[.!?:]) ", speech)[-1]
    asks = any(_ASKING.match(part) for part in (last, re.split(r", (?:and |but |so )?", last)[-1]))
    if asks and mark in ".!,":
        mark = "?"
    elif (
        mark == "?"
        and not asks
        and (len(last.split()) > 3 or _ORDER.match(last))
        and not (last.startswith(("And ", "Or ", "Not ")) and len(last.split()) < 6)
    ):
        mark = "," if tag else "."
        tag = tag.replace("asked", "said").replace("wanted to know", "said")
    return f'"{speech}{mark}"{tag}'


_AN = re.compile(r"\b([Aa])(n?) (?=([A-Za-z'-]+))")
_AN_BEFORE_CONSONANT_LETTER = ("hour", "honest", "heir")
_A_BEFORE_VOWEL_LETTER = ("uni", "use", "one", "once", "eu", "ukulele", "usual")


def article(word: str) -> str:
    """`a` or `an`, by sound."""
    low = word.lower()
    if low.startswith(_AN_BEFORE_CONSONANT_LETTER):
        return "an"
    return "an" if low[0] in "aeiou" and not low.startswith(_A_BEFORE_VOWEL_LETTER) else "a"


def tidy(text: str) -> str:
    """Spaces, paragraph breaks, a/an and capitals put right."""
    text = re.sub(r"[ \t]*\n[ \t\n]*", "\n\n", text.strip())
    text = re.sub(r" {2,}", " ", text)
    text = re.sub(r" +([,.!?;:])", r"\1", text)
    text = re.sub(r"(?<!\.)([.!?]\"?)\.(?!\.)", r"\1", text)
    text = text.replace("\1He's ", "His ").replace("\1She's ", "Her ").replace("\1", "")
    text = _SPEECH_END.sub(_mark, text)
    text = _AN.sub(lambda m: ("A" if m[1] == "A" else "a") + article(m[3])[1:] + " ", text)
    text = re.sub(r"(^|\n\n|(?<=[.!?]) )([a-z])", lambda m: m[1] + m[2].upper(), text)
    return text


def check_slots(node: Node, known: Mapping[str, Any]) -> None:
    """Raise TemplateError where a tree names a phrase that is not in `known`; tests run it over the whole book."""
    if node[0] == "phrase" and node[1] not in known:
        raise TemplateError(f"no phrase <{node[1]}>")
    for part in node[1:]:
        for child in part if isinstance(part, tuple) and part and isinstance(part[0], tuple) else [part]:
            if isinstance(child, tuple) and child:
                check_slots(child, known)
