"""Right: the tick of each last use."""

import itertools
from types import SimpleNamespace


class GraphCache:
    """Each graph with the tick of its last use."""

    def __init__(self, max_graphs):
        self.max_graphs, self.held, self.ticks = max_graphs, {}, itertools.count()
        self.stats = SimpleNamespace(hits=0, misses=0, captures=0, evictions=0)

    def __len__(self):
        return len(self.held)

    def __contains__(self, key):
        return key in self.held

    @property
    def keys(self):
        return tuple(sorted(self.held, key=lambda key: self.held[key][1]))

    @property
    def values(self):
        return tuple(self.held[key][0] for key in self.keys)

    def get(self, key):
        found = self.held.get(key)
        if found is None:
            self.stats.misses += 1
            return None
        self.stats.hits += 1
        self.held[key] = (found[0], next(self.ticks))
        return found[0]

    def put(self, key, graph):
        gone = []
        if key in self.held:
            gone.append((key, self.held.pop(key)[0]))
        elif len(self.held) == self.max_graphs:
            gone.append(self.evict_oldest())
        self.held[key] = (graph, next(self.ticks))
        self.stats.captures += 1
        return gone

    def evict_oldest(self):
        oldest = self.keys
        if not oldest:
            raise KeyError("no graph is held")
        self.stats.evictions += 1
        return oldest[0], self.held.pop(oldest[0])[0]

    def clear(self):
        graphs = list(self.values)
        self.held.clear()
        return graphs
