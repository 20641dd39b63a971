"""Exercise 12: the LRU graph cache (LightLLM #964)."""

from functools import partial

import pytest

from exercises.expect import equal

graded = partial(pytest.mark.exercise, number=12, part="GraphCache", timeout=10)


def made(solution, max_graphs):
    solution.call("GraphCache", max_graphs, keep="c")
    return partial(solution.call, of="c")


@graded(points=2, hint="get returns what was put under the key, and None for a key that is not held")
def test_what_is_put_is_found(solution, rng):
    call, keys = made(solution, 3), rng.sample(range(1, 500), 3)
    for key in keys:
        equal(f"put({key})", call("put", key, f"graph {key}"), [])
    for key in keys:
        equal(f"get({key})", call("get", key), f"graph {key}")
    equal("get of a key that was never put", call("get", 1000), None)
    equal("how many are held", call("__len__"), 3)


@graded(points=3, hint="a get makes its graph the most recently used: not the oldest put goes, but the longest unused")
def test_the_least_recently_used_goes(solution, rng):
    call, (a, b, c, d) = made(solution, 3), rng.sample(range(1, 500), 4)
    for key in (a, b, c):
        call("put", key, f"graph {key}")
    call("get", a)
    equal(
        f"what goes for a fourth, after puts of {a, b, c} and a get of {a}", call("put", d, "new"), [(b, f"graph {b}")]
    )
    equal("the keys, least recently used first", list(solution.read("keys", of="c")), [c, a, d])
    equal(
        "the graphs, in the order of the keys",
        list(solution.read("values", of="c")),
        [f"graph {c}", f"graph {a}", "new"],
    )
    equal("evict_oldest()", call("evict_oldest"), (c, f"graph {c}"))
    equal("clear()", call("clear"), [f"graph {a}", "new"])
    equal("how many are held after clear()", call("__len__"), 0)


@graded(points=1, hint="the graph that was just put is in use: it must not be the one that goes")
def test_a_cap_of_one_still_holds_the_graph_that_was_just_put(solution, rng):
    call = made(solution, 1)
    call("put", 1, "one")
    equal("what goes", call("put", 2, "two"), [(1, "one")])
    equal("get(2)", call("get", 2), "two")


@graded(points=2, hint="hits and misses are counted in get, captures in put, evictions where a graph goes to make room")
def test_the_counters_tell_what_happened(solution, rng):
    call, counts, held = made(solution, 2), dict(hits=0, misses=0, captures=0, evictions=0), []
    for _ in range(30):
        key = rng.randrange(4)
        found = call("get", key)
        equal(f"get({key}) with {held} held", found, f"graph {key}" if key in held else None)
        counts["hits" if key in held else "misses"] += 1
        if key in held:
            held.remove(key)
        else:
            call("put", key, f"graph {key}")
            counts["captures"] += 1
            counts["evictions"] += len(held) == 2
            held = held[-1:] if len(held) == 2 else held
        held.append(key)
    solution.read("stats", of="c", keep="s")
    equal("the counters", {name: solution.read(name, of="s") for name in counts}, counts)
