"""The ladder as data: one measure a rung, the published figures, and the bucket that fits."""

import itertools
from dataclasses import fields

import pytest

from tinyengine.errors import ConfigError
from tinyengine.graphs.rungs import (
    BUCKETS,
    LADDER,
    GraphOptions,
    GraphPlan,
    block_table_bytes,
    choose_bucket,
    clamp_buckets,
    find_rung,
    logits_bytes,
    width_buckets,
)

GIB = 1 << 30


def test_each_rung_differs_from_the_one_above_in_one_measure():
    measures = [f.name for f in fields(LADDER[0]) if f.name not in ("name", "adds", "source")]
    for above, rung in itertools.pairwise(LADDER):
        changed = [name for name in measures if getattr(above, name) != getattr(rung, name)]
        assert len(changed) == 1, (rung.name, changed)
    order = "eager, capture, one-stream, shared-inputs, shared-pool, largest-first, shared-logits, direct-logits, lru"
    assert ", ".join(rung.name for rung in LADDER) == order
    assert all(rung.adds and rung.source for rung in LADDER)


@pytest.mark.parametrize(
    "name, count, total, largest", [("sglang", 35, 4231, 256), ("vllm", 51, None, 512), ("lightllm", 46, None, 256)]
)
def test_bucket_sets_have_the_published_sizes(name, count, total, largest):
    buckets = BUCKETS[name]
    assert len(set(buckets)) == len(buckets) == count and max(buckets) == largest
    assert list(buckets) == sorted(buckets) and (total is None or sum(buckets) == total)


def test_the_closed_forms_give_the_drops_of_the_two_pull_requests():
    """SGLang #8579 reports 5.16 to 2.89 GB, with #8567 0.95 GB, on GLM-4.5-Air with 35 sizes."""
    assert logits_bytes(BUCKETS["sglang"], 151_552) / GIB == pytest.approx(2.24, abs=0.01)
    assert block_table_bytes(BUCKETS["sglang"], 131_072) / GIB == pytest.approx(1.94, abs=0.01)


@pytest.mark.parametrize("buckets", [(1, 2, 4, 8), (8, 4, 2, 1), (2, 8, 1, 4)], ids=str)
def test_the_smallest_bucket_that_fits_is_chosen_in_any_order(buckets):
    assert [choose_bucket(n, buckets) for n in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, None]


def test_buckets_clamp_to_what_the_engine_can_run():
    assert clamp_buckets((1, 2, 4, 8, 16), 6) == (1, 2, 4, 6)
    assert clamp_buckets((1, 2, 4), 100) == (1, 2, 4)
    assert clamp_buckets(BUCKETS["vllm"], 1) == (1,)


@pytest.mark.parametrize("width, expected", [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8))])
def test_widths_double_up_to_the_widest(width, expected):
    assert width_buckets(width) == expected


def test_a_plan_leaves_out_what_no_cache_could_fill_and_orders_by_the_rung():
    plan = GraphPlan(find_rung("capture"), (1, 2, 4), (1, 2, 4), max_blocks=8)
    assert plan.pairs == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]
    largest_first = GraphPlan(find_rung("lru"), (1, 2, 4), (1, 2, 4), max_blocks=8)
    assert largest_first.pairs == plan.pairs[::-1] and largest_first.cap == 16
    assert largest_first.largest_pairs == [(4, 2), (4, 1), (2, 4)]
    assert plan.cap == 8 and plan.largest_pairs == plan.pairs, "without largest_first each graph adds its own"


def test_the_users_words_become_a_rung():
    choose = GraphOptions.choose
    assert choose("auto", "cpu", None, 1).rung == LADDER[0] and choose("auto", "mps", None, 1).rung == LADDER[0]
    assert choose("auto", "cuda", None, 1).rung.name == LADDER[-1].name
    for rung in LADDER:
        assert choose(rung.name, "cpu", None, 1).rung == rung
    assert choose("lru", "cuda", None, 1).plan(512, 64, 10_000).cap == 16, "the rung's own cap"
    on = choose("on", "cuda", None, 1).plan(512, 64, 10_000)
    assert on.cap == len(on.pairs) > 16, "the default holds every graph that can be asked for"
    assert choose("on", "cuda", 3, 2).plan(512, 64, 10_000).cap == 3
    for bad in (("on", "mps", None, 1), ("onn", "cpu", None, 1), ("on", "cpu", None, 3)):
        with pytest.raises(ConfigError):
            choose(*bad)
    with pytest.raises(ConfigError, match=r"choose off, on or one of eager, capture, .*lru"):
        find_rung("ladder")
