"""The phrase book: small turns of speech that every plot shares, and the weather.

`<sad>` in a template takes one of `PHRASES["sad"]`, and not the same one twice in a story while others are left.
"""

from __future__ import annotations

from .lexicon import blocks

PHRASES: dict[str, tuple[str, ...]] = blocks("phrases.txt")
"""Name of a phrase -> its alternatives, each a template."""

WEATHERS: dict[str, dict[str, tuple[str, ...]]] = {}
"""Season and weather -> slot (`open`, `when`, `sky`, `feel`) -> alternatives."""

for _name, _lines in blocks("weathers.txt").items():
    _key, _slot = _name.split(" / ")
    WEATHERS.setdefault(_key, {})[_slot] = _lines
