"""Exercise 6: the sampler's weights, against the definition in plain Python."""

import math
from functools import partial

import pytest
import torch

from exercises.expect import close, equal, wrong
from exercises.wire import Kept

graded = partial(pytest.mark.exercise, number=6, part="sampling_weights", timeout=10)


TINY = 1e-6  # a chance so small that sums in float32 round it away


def by_definition(row, temperature, k, p):
    """The probability of each token, 0 for those that do not stay."""
    highest = max(row)
    odds = [math.exp((x - highest) / temperature) for x in row]
    order = sorted(range(len(row)), key=lambda token: -odds[token])[: k or len(row)]
    total, reached, stay = sum(odds[token] for token in order), 0.0, []
    for token in order:
        if p < 1 and stay and reached >= p:
            break
        stay.append(token)
        reached += odds[token] / total
    total = sum(odds[token] for token in stay)
    return [odds[token] / total if token in stay else 0.0 for token in range(len(row))]


def between(row, temperature, k, count):
    """A top_p that keeps `count` tokens, and is far from keeping one more or less."""
    odds = sorted(by_definition(row, temperature, k, 1.0), reverse=True)
    return sum(odds[:count]) - odds[count - 1] / 2


def check(what, solution, rows, temperature, k, p):
    logits, vocab = torch.tensor(rows), len(rows[0])
    limited = any(k) or any(x < 1 for x in p)
    width = 0 if not limited else max(k) if all(k) else vocab
    given = (torch.tensor(temperature), torch.tensor(k), torch.tensor(p))
    got = solution.call("sampling_weights", logits, *given, width)
    if not isinstance(got, torch.Tensor) or got.shape != logits.shape or got.dtype != torch.float32:
        shape = f"{got.dtype} {list(got.shape)}" if isinstance(got, torch.Tensor) else f"a {type(got).__name__}"
        wrong(what, f"torch.float32 {list(logits.shape)}", shape)
    for i in range(len(rows)):
        told = f"{what}, row {i} of {len(rows)} (temperature {temperature[i]:g}, top_k {k[i]}, top_p {p[i]:.3f})"
        expected = by_definition(logits[i].tolist(), temperature[i], k[i], p[i])
        stay = [token for token, weight in enumerate(expected) if weight > TINY]
        kept = [t for t in (got[i] > 0).nonzero()[:, 0].tolist() if not 0 < expected[t] <= TINY]
        equal(f"{told}: tokens with a weight above 0", kept, stay)
        close(f"{told}: weights, made to sum to 1", got[i] / got[i].sum(), torch.tensor(expected))


def some_logits(n, vocab, scale=2.0):
    return (torch.randn(n, vocab) * scale).tolist()


@graded(points=2, hint="softmax of logits / temperature, before top_k and top_p look, in a new tensor")
def test_temperature(solution, rng):
    n, vocab = rng.randrange(2, 5), rng.randrange(5, 30)
    temperature = [rng.uniform(0.3, 3.0) for _ in range(n)]
    check("temperature alone", solution, some_logits(n, vocab, 1.0), temperature, [0] * n, [1.0] * n)
    rows, high = some_logits(2, 20), [rng.uniform(2.5, 4.0) for _ in range(2)]
    p = [between(row, t, 0, 8) for row, t in zip(rows, high, strict=True)]
    check("a high temperature and top_p", solution, rows, high, [0, 0], p)
    logits, one = torch.randn(2, 10), torch.ones(2)
    solution.read("torch", of="support", keep="torch")
    solution.call("clone", logits, of="torch", keep="logits")
    solution.call("sampling_weights", Kept("logits"), one * 2, torch.tensor([3, 0]), one * 0.5, 10)
    close("the logits after the call", solution.call("clone", Kept("logits"), of="torch"), logits)


@graded(points=2, hint="exactly k tokens stay, the most likely ones, and 0 keeps all; each row has its own k")
def test_top_k(solution, rng):
    vocab = rng.randrange(12, 30)
    for k in ([1, 3, rng.randrange(2, 10)], [2, 0, vocab + 5]):
        check("top_k alone", solution, some_logits(3, vocab), [1.0] * 3, k, [1.0] * 3)


@graded(points=3, hint="the token that makes the sum reach p stays; the most likely one stays whatever p is")
def test_top_p(solution, rng):
    vocab = rng.randrange(12, 30)
    rows = some_logits(4, vocab)
    p = [between(row, 1.0, 0, count) for row, count in zip(rows, (1, 2, 4, rng.randrange(3, 9)), strict=True)]
    check("top_p alone", solution, rows, [1.0] * 4, [0] * 4, p)
    check("a tiny top_p, and one of 1", solution, rows[:2], [1.0] * 2, [0] * 2, [1e-6, 1.0])


@graded(points=2, hint="top_k first; then what it left counts as the whole for top_p")
def test_top_p_of_what_top_k_left(solution, rng):
    rows = some_logits(3, 20, 1.0)
    k, counts = [3, 6, rng.randrange(4, 9)], (2, 4, 3)
    p = [between(row, 0.8, top, count) for row, top, count in zip(rows, k, counts, strict=True)]
    check("top_k and top_p", solution, rows, [0.8] * 3, k, p)


@graded(points=1, hint="subtract the row's largest logit before you divide by the temperature")
def test_extremes_do_not_overflow(solution, rng):
    rows = some_logits(2, 10, 1e4)
    check("logits of ten thousand", solution, rows, [1.0, 50.0], [0, 0], [1.0, 1.0])
    check("a temperature of 1e-36", solution, some_logits(2, 10, 1e4), [1e-36, 1.0], [0, 4], [1.0, 1.0])
