"""Wrong solutions: the first right one with texts replaced. Which test finds each, and what is wrong with it."""

WRONG = {
    "fifo": (
        "test_the_least_recently_used_goes",
        "a get does not count as a use",
        [("        self.graphs[key] = self.graphs.pop(key)\n", "")],
    ),
    "newest_goes": (
        "test_the_least_recently_used_goes",
        "the most recently used goes",
        [("next(iter(self.graphs))", "list(self.graphs)[-1]")],
    ),
    "evicts_the_active_graph": (
        "test_a_cap_of_one_still_holds_the_graph_that_was_just_put",
        "with a cap of one the new graph goes",
        [
            (
                "            gone.append(self.evict_oldest())",
                "            gone.append((key, self.graphs.pop(key)))\n            self.stats.evictions += 1",
            )
        ],
    ),
    "one_too_many": (
        "test_the_least_recently_used_goes",
        "the cap is one graph too generous",
        [("len(self.graphs) > self.max_graphs", "len(self.graphs) > self.max_graphs + 1")],
    ),
    "tells_nobody_what_went": (
        "test_the_least_recently_used_goes",
        "what goes is not returned, so nobody resets it",
        [("            gone.append(self.evict_oldest())", "            self.evict_oldest()")],
    ),
    "a_miss_counts_as_a_hit": (
        "test_the_counters_tell_what_happened",
        "misses are counted as hits",
        [("self.stats.misses += 1", "self.stats.hits += 1")],
    ),
    "evictions_not_counted": (
        "test_the_counters_tell_what_happened",
        "what makes room is not counted",
        [("        self.stats.evictions += 1\n", "")],
    ),
    "get_takes_out": (
        "test_what_is_put_is_found",
        "a graph that was got is no longer held",
        [
            (
                "        self.graphs[key] = self.graphs.pop(key)\n        return self.graphs[key]",
                "        return self.graphs.pop(key)",
            )
        ],
    ),
}
