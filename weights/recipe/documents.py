"""Training documents: plain stories, stories with a request before them, and chats.

Every document comes from its number alone. Held-out subjects are never asked for in training.
"""

from __future__ import annotations

import re
import zlib
from random import Random

from .lexicon import blocks
from .stories import ASSISTANT, END, END_OF_TEXT, USER, Subject, random_subject, write_story

CHAT_TEMPLATE = (
    "{{- '<|endoftext|>' -}}{%- set turns = namespace(first=true) -%}"
    "{%- for message in messages -%}{%- if message['role'] in ['user', 'assistant'] -%}"
    "{%- if not turns.first -%}{{- '\\n' -}}{%- endif -%}{%- set turns.first = false -%}"
    "{{- '<|' + message['role'] + '|>\\n' + (message['content'] | trim) + '<|end|>' -}}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '\\n<|assistant|>\\n' -}}{%- endif -%}"
)
"""The chat format in jinja; a system message is passed over."""

_CHATS = blocks("chats.txt")
ASKS, MORE, _ANY = _CHATS["asks"], _CHATS["more"], _CHATS["any"]
TALK = [
    (_CHATS[name], _CHATS[name.replace("asks", "answers")])
    for name in _CHATS
    if name.startswith("talk") and name.endswith("asks")
]


def is_held_out(subject: Subject) -> bool:
    """One in forty of the subjects with an adjective is kept from training."""
    return (
        subject.kind in ("thing", "being") and bool(subject.adjectives) and zlib.crc32(subject.key.encode()) % 40 == 0
    )


def held_out_subject(rng: Random) -> Subject:
    """A subject that training never asks for."""
    while True:
        subject = random_subject(rng)
        if is_held_out(subject) and subject.hero is None and not subject.name:
            return subject


def _subject(rng: Random) -> Subject:
    while True:
        subject = random_subject(rng)
        if not is_held_out(subject):
            return subject


def request(subject: Subject, rng: Random, more: bool = False) -> str:
    """One of many ways to ask for a story."""
    ask = rng.choice(MORE if more else ASKS) if rng.random() < 0.75 or more else ASKS[0]
    text = ask.replace("X", subject.text) if "X" in ask else ask.replace(" x", " " + subject.text)
    text = text[0].upper() + text[1:] if ask[0] == "X" and rng.random() < 0.5 else text
    return text.lower() if "X" not in ask or rng.random() < 0.06 else text


def chat(turns: list[tuple[str, str]]) -> str:
    """The text of a chat: pairs of what the user said and what was answered."""
    return END_OF_TEXT + "\n".join(f"{USER}\n{ask}{END}\n{ASSISTANT}\n{answer}{END}" for ask, answer in turns)


def _small_talk(rng: Random) -> tuple[str, str]:
    asks, answers = rng.choice(TALK)
    return rng.choice(asks), rng.choice(answers)


def _story_turn(rng: Random, more: bool = False) -> tuple[str, str]:
    subject = _subject(rng)
    if not more and rng.random() < 0.04:
        return rng.choice(_ANY), write_story(subject, rng)
    return request(subject, rng, more), write_story(subject, rng)


def _chat_document(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.07:
        return chat([_small_talk(rng) for _ in range(rng.choice((1, 1, 2)))])
    if draw < 0.11:
        return chat([_small_talk(rng), _story_turn(rng)])
    if draw < 0.15:
        return chat(
            [
                _story_turn(rng),
                (rng.choice(["thanks", "talk"]) == "talk" and _small_talk(rng))
                or (rng.choice(TALK[3][0]), rng.choice(TALK[3][1])),
            ]
        )
    if draw < 0.27:
        return chat([_story_turn(rng), _story_turn(rng, more=True)])
    return chat([_story_turn(rng)])


def _from_the_middle(text: str, rng: Random) -> str:
    """The story without its first sentences, so that a text may begin anywhere."""
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z\"])", text)
    cut = rng.choice((1, 1, 1, 2, 2, 3, 4, 6))
    return " ".join(sentences[cut:]) if len(sentences) > cut + 6 else text


def document(seed: int | str) -> str:
    """One training document; it begins with the end-of-text token, which also closes the one before."""
    rng = Random(f"document {seed}")
    draw = rng.random()
    if draw < 0.58:
        return _chat_document(rng)
    subject = _subject(rng)
    if draw > 0.94:
        subject = Subject("being", rng.choice(("girl", "boy")), free=True)
    text = write_story(subject, rng)
    if draw < 0.68:
        return f"{END_OF_TEXT}{request(subject, rng)}\n\n{text}"
    return END_OF_TEXT + (_from_the_middle(text, rng) if draw < 0.82 else text)
