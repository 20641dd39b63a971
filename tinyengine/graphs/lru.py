"""At most so many graphs: the least recently used one goes (LightLLM #964)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Graph = TypeVar("Graph")


@dataclass
class CacheStats:
    """What a cache was asked for, and what became of it."""

    hits: int = 0
    misses: int = 0
    captures: int = 0
    evictions: int = 0


class GraphCache(Generic[Key, Graph]):
    """An ordered mapping, the least recently used first, that never holds more than `max_graphs` after a `put`.

    A graph is put only once it is captured, and only then does the oldest one go: a capture that fails costs nobody
    a graph, and the graph that was just put is never the one that goes.
    """

    def __init__(self, max_graphs: int) -> None:
        if max_graphs < 1:
            raise ValueError(f"a cache needs room for one graph at least; got max_graphs={max_graphs}")
        self.max_graphs = max_graphs
        self.stats = CacheStats()
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys held, the least recently used first."""
        return tuple(self._graphs)

    @property
    def values(self) -> tuple[Graph, ...]:
        """The graphs held, in the order of the keys."""
        return tuple(self._graphs.values())

    def get(self, key: Key) -> Graph | None:
        """The graph of a key, now the most recently used; None, counted as a miss, if it is not held."""
        if key not in self._graphs:
            self.stats.misses += 1
            return None
        self.stats.hits += 1
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def put(self, key: Key, graph: Graph) -> list[tuple[Key, Graph]]:
        """Hold a graph that was just captured; the graphs that went for it, oldest first, for the caller to reset.

        A graph held under the same key goes too.
        """
        gone = [(key, self._graphs.pop(key))] if key in self._graphs else []
        self._graphs[key] = graph
        self.stats.captures += 1
        while len(self._graphs) > self.max_graphs:
            gone.append(self.evict_oldest())
        return gone

    def evict_oldest(self) -> tuple[Key, Graph]:
        """Take out the least recently used graph. KeyError if there is none."""
        key, graph = self._graphs.popitem(last=False)
        self.stats.evictions += 1
        return key, graph

    def clear(self) -> list[Graph]:
        """Take out every graph; what was counted stays."""
        graphs = list(self._graphs.values())
        self._graphs.clear()
        return graphs
