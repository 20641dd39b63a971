"""The graph cache against a plain list, and the two things that may never happen."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyengine.graphs.lru import GraphCache


def test_the_least_recently_used_graph_goes():
    cache = GraphCache(2)
    assert cache.put("a", 1) == cache.put("b", 2) == []
    assert cache.get("a") == 1
    assert cache.put("c", 3) == [("b", 2)]
    assert cache.keys == ("a", "c") and cache.get("b") is None


def test_the_graph_just_put_is_never_the_one_that_goes():
    cache = GraphCache(1)
    for key in "abcab":
        assert all(gone != key for gone, _ in cache.put(key, key.upper())) and cache.keys == (key,)


def test_a_failed_capture_costs_nobody_a_graph():
    cache = GraphCache(1)
    cache.put("a", 1)
    assert cache.get("b") is None  # the caller now captures, and fails: nothing is put
    assert cache.get("a") == 1


def test_a_second_graph_of_a_key_replaces_the_first():
    cache = GraphCache(3)
    cache.put("a", 1)
    assert cache.put("a", 2) == [("a", 1)]
    assert len(cache) == 1 and cache.get("a") == 2


def test_no_room_at_all_is_refused_and_an_empty_cache_has_nothing_to_evict():
    with pytest.raises(ValueError, match="max_graphs=0"):
        GraphCache(0)
    cache = GraphCache(1)
    with pytest.raises(KeyError):
        cache.evict_oldest()
    assert cache.stats.evictions == 0


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(0, 7), max_size=60))
def test_serving_a_trace_of_keys(cap, requests):
    """Get, and capture on a miss, as the runner does; beside it the same with a list, moved to its end at each use."""
    cache, plain, hits, evicted, captured = GraphCache(cap), [], 0, 0, []
    for key in requests:
        if cache.get(key) is None:
            cache.put(key, key * 10)
            captured.append(key)
        if key in plain:
            hits += 1
            plain.remove(key)
        plain.append(key)
        evicted += len(plain) > cap
        plain = plain[-cap:]
        assert cache.keys == tuple(plain) and cache.get(key) == key * 10
    stats = cache.stats
    assert (stats.hits - len(requests), stats.evictions) == (hits, evicted)
    assert stats.misses == stats.captures == len(captured)
