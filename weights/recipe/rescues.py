"""What a thing can do in a rescue, and where vehicles live: facts that plots need word by word.

RESCUES: noun of the thing -> (the trouble, what the hero does, what the thing got from it).
VEHICLES: noun -> (home, work, sound).
"""

from __future__ import annotations

from .lexicon import blocks

RESCUES: dict[str, tuple[str, ...]] = blocks("rescues.txt")
VEHICLES: dict[str, tuple[str, ...]] = blocks("vehicles.txt")
