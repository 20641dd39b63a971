"""Exercise 1: grouped-query causal attention, against the definition in float64."""

from functools import partial

import pytest
import torch

from exercises.expect import close

graded = partial(pytest.mark.exercise, number=1, part="causal_attention", timeout=10)


def by_definition(q, k, v):
    """Query by query, head by head, with a softmax over what it may see."""
    t, s, group = len(q), len(k), q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for i in range(t):
        for head in range(q.shape[1]):
            seen = slice(0, s - t + i + 1)
            scores = k[seen, head // group].double() @ q[i, head].double() / q.shape[-1] ** 0.5
            out[i, head] = (scores.softmax(0) @ v[seen, head // group].double()).float()
    return out


def check(what, solution, t, s, heads, kv_heads, dim, scale=1.0):
    q, k, v = (torch.randn(n, h, dim) * scale for n, h in ((t, heads), (s, kv_heads), (s, kv_heads)))
    close(what, solution.call("causal_attention", q, k, v), by_definition(q, k, v))


@graded(points=2, hint="scores are q·k / sqrt(head_dim), and position i sees positions 0 to i")
def test_a_prompt_with_as_many_kv_heads_as_heads(solution, rng):
    for t in (1, rng.randrange(2, 6), rng.randrange(6, 20)):
        check(f"{t} tokens, 3 heads", solution, t, t, 3, 3, 8)


@graded(points=2, hint="query head h reads kv head h // (heads // kv_heads): neighbours share one")
def test_query_heads_share_kv_heads(solution, rng):
    t = rng.randrange(3, 9)
    for heads, kv_heads in ((4, 2), (6, 2), (5, 1)):
        check(f"{heads} heads on {kv_heads} kv heads", solution, t, t, heads, kv_heads, 8)


@graded(
    points=3, hint="with s - t tokens of context the first query already sees s - t + 1 keys: the last one sees all"
)
def test_tokens_after_a_context(solution, rng):
    for t, s in ((1, rng.randrange(2, 9)), (3, rng.randrange(5, 12)), (rng.randrange(2, 5), 17)):
        check(f"{t} tokens after {s - t}", solution, t, s, 4, 2, 8)


@graded(points=1, hint="subtract the maximum before exp, or let torch.softmax do it")
def test_large_scores_do_not_overflow(solution, rng):
    check("scores of several hundred", solution, 6, rng.randrange(7, 12), 4, 2, 16, scale=12.0)
