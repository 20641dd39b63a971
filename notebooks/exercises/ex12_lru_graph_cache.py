"""Exercise 12: the LRU graph cache (LightLLM #964). Read notebooks/09_lru_eviction.ipynb first.

Grade it with `pytest tests/exercises --impl student -k ex12`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any


@dataclass
class CacheStats:
    """What a cache was asked for, and what became of it."""

    hits: int = 0
    misses: int = 0
    captures: int = 0
    evictions: int = 0


class GraphCache:
    """At most `max_graphs` captured graphs by their keys; the least recently used one goes.

    The engine asks with `get` before each decode step. Where that gives None it captures the graph, and calls `put`.
    `stats` is a CacheStats: `get` counts hits and misses, `put` captures, and each graph that goes to make room, or by
    `evict_oldest`, is an eviction. `len(cache)` is how many graphs are held, `key in cache` asks without counting, and
    does not make a graph recently used.

    Example:

        >>> cache = GraphCache(max_graphs=2)
        >>> cache.put(8, "graph of 8"), cache.put(4, "graph of 4")
        ([], [])
        >>> cache.get(8)  # now 4 is the one that was not used for longest
        'graph of 8'
        >>> cache.put(2, "graph of 2")
        [(4, 'graph of 4')]
    """

    def __init__(self, max_graphs: int) -> None:
        raise NotImplementedError("Exercise 12: write GraphCache; see notebooks/09_lru_eviction.ipynb")

    def __len__(self) -> int:
        raise NotImplementedError("Exercise 12: write __len__; see notebooks/09_lru_eviction.ipynb")

    def __contains__(self, key: Hashable) -> bool:
        raise NotImplementedError("Exercise 12: write __contains__; see notebooks/09_lru_eviction.ipynb")

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """The keys held, the least recently used first."""
        raise NotImplementedError("Exercise 12: write keys; see notebooks/09_lru_eviction.ipynb")

    @property
    def values(self) -> tuple[Any, ...]:
        """The graphs held, in the order of the keys."""
        raise NotImplementedError("Exercise 12: write values; see notebooks/09_lru_eviction.ipynb")

    def get(self, key: Hashable) -> Any | None:
        """The graph of a key, which is now the most recently used; None if it is not held."""
        raise NotImplementedError("Exercise 12: write get; see notebooks/09_lru_eviction.ipynb")

    def put(self, key: Hashable, graph: Any) -> list[tuple[Hashable, Any]]:
        """Hold a graph that was just captured; the (key, graph) pairs that went for it, oldest first.

        The graph that was just put never goes.
        """
        raise NotImplementedError("Exercise 12: write put; see notebooks/09_lru_eviction.ipynb")

    def evict_oldest(self) -> tuple[Hashable, Any]:
        """Take out the least recently used graph: its key and the graph. KeyError if there is none."""
        raise NotImplementedError("Exercise 12: write evict_oldest; see notebooks/09_lru_eviction.ipynb")

    def clear(self) -> list[Any]:
        """Take out every graph, the least recently used first. Nothing is counted."""
        raise NotImplementedError("Exercise 12: write clear; see notebooks/09_lru_eviction.ipynb")
