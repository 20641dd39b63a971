"""Right: a dict in the order of use."""

from dataclasses import dataclass


@dataclass
class CacheStats:
    hits: int = 0
    misses: int = 0
    captures: int = 0
    evictions: int = 0


class GraphCache:
    def __init__(self, max_graphs):
        self.max_graphs, self.graphs, self.stats = max_graphs, {}, CacheStats()

    def __len__(self):
        return len(self.graphs)

    def __contains__(self, key):
        return key in self.graphs

    @property
    def keys(self):
        return tuple(self.graphs)

    @property
    def values(self):
        return tuple(self.graphs.values())

    def get(self, key):
        if key not in self.graphs:
            self.stats.misses += 1
            return None
        self.stats.hits += 1
        self.graphs[key] = self.graphs.pop(key)
        return self.graphs[key]

    def put(self, key, graph):
        gone = [(key, self.graphs.pop(key))] if key in self.graphs else []
        self.graphs[key] = graph
        self.stats.captures += 1
        while len(self.graphs) > self.max_graphs:
            gone.append(self.evict_oldest())
        return gone

    def evict_oldest(self):
        if not self.graphs:
            raise KeyError("no graph is held")
        key = next(iter(self.graphs))
        self.stats.evictions += 1
        return key, self.graphs.pop(key)

    def clear(self):
        graphs, self.graphs = list(self.graphs.values()), {}
        return graphs
