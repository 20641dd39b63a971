"""The ladder as data: one measure a rung, the published figures, and the bucket that fits."""

import itertools
from dataclasses import fields

import pytest

from tinyengine.graphs.rungs import BUCKETS, LADDER, block_table_bytes, choose_bucket, logits_bytes

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
