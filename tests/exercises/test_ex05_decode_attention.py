"""Exercise 5: decode attention over blocks, against the definition in float64."""

from functools import partial

import pytest
import torch

from exercises.expect import close
from exercises.wire import Kept

graded = partial(pytest.mark.exercise, number=5, part="decode_attention", timeout=10)


def scene(rng, lens, heads, kv_heads, size=4, dim=8, scale=1.0):
    """Arguments of decode_attention for sequences of these lengths in shuffled blocks, and what must come out."""
    width = -(-max(lens) // size)
    cache = torch.randn(len(lens) * width + 3, size, 2, kv_heads, dim) * scale
    q, mask = torch.randn(len(lens), heads, dim) * scale, torch.zeros(len(lens), 1, 1, width * size)
    free, table, out = rng.sample(range(1, len(cache)), len(lens) * width), [], torch.zeros_like(q)
    for i, length in enumerate(lens):
        blocks = [free.pop() for _ in range(-(-length // size))]
        table += blocks + blocks[:1] * (width - len(blocks))
        mask[i, ..., length:] = float("-inf")
        kv = torch.cat([cache[block] for block in blocks])[:length].double()
        for head in range(heads):
            k, v = kv[:, 0, head // (heads // kv_heads)], kv[:, 1, head // (heads // kv_heads)]
            out[i, head] = ((k @ q[i, head].double() / dim**0.5).softmax(0) @ v).float()
    gathered = torch.zeros(len(table), *cache.shape[1:])
    return [q, cache, torch.tensor(table), mask, gathered], out


def check(what, solution, *args, **options):
    given, expected = scene(*args, **options)
    close(what, solution.call("decode_attention", *given), expected)


@graded(
    points=3, hint="gather the blocks in the order of the table, then scores q . k / sqrt(head_dim), softmax, values"
)
def test_full_blocks_anywhere_in_the_cache(solution, rng):
    for n, width in ((1, 1), (1, rng.randrange(2, 5)), (3, 2)):
        check(f"{n} sequences of {width} full blocks", solution, rng, [4 * width] * n, 2, 2)


@graded(points=3, hint="add the mask to the scores before the softmax: -inf makes a weight of 0")
def test_sequences_of_different_lengths(solution, rng):
    for lens in ([1], [3, 9], [rng.randrange(1, 17) for _ in range(4)]):
        check(f"sequences of {lens} tokens in blocks of 4", solution, rng, lens, 2, 2)
    check("scores of several hundred", solution, rng, [5, 11], 2, 2, scale=12.0)


@graded(points=2, hint="query head h reads kv head h // (heads // kv_heads): neighbours share one")
def test_query_heads_share_kv_heads(solution, rng):
    for heads, kv_heads in ((4, 2), (6, 2), (5, 1)):
        lens = [rng.randrange(1, 12) for _ in range(3)]
        check(f"{heads} heads on {kv_heads} kv heads", solution, rng, lens, heads, kv_heads)


@graded(points=2, hint="index the cache with the tensor of blocks itself; nothing may go through the host")
def test_it_can_be_captured(solution, rng):
    solution.read("decode_attention", keep="attention")
    first, _ = scene(rng, [7, 2, 5], 4, 2)
    then, expected = scene(rng, [3, 8, 6], 4, 2)
    got = solution.call("replayed", Kept("attention"), first, then, of="support")
    close("a replay for other sequences than those at the capture", got, expected)
