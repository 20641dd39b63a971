"""Exercise 2: the rotary embedding, against turns of complex numbers."""

from functools import partial

import pytest
import torch

from exercises.expect import close, wrong
from exercises.wire import Kept

graded = partial(pytest.mark.exercise, number=2, part="rotations", timeout=10)


def table(max_len, pairs, theta=100.0):
    """The angles `[max_len, pairs]`, and the rope table that is made of them."""
    angle = torch.outer(torch.arange(max_len, dtype=torch.float64), theta ** -(torch.arange(pairs) / pairs))
    cos, sin = angle.cos(), angle.sin()
    return angle, torch.stack([torch.stack([cos, sin], 1), torch.stack([-sin, cos], 1)], 1).float()


def by_definition(rope, positions):
    """Entry by entry."""
    pairs = rope.shape[-1]
    out = torch.zeros(len(positions), 2 * pairs, 2 * pairs, dtype=rope.dtype)
    for t, p in enumerate(positions.tolist()):
        for pair in range(pairs):
            for row in range(2):
                for column in range(2):
                    out[t, row * pairs + pair, column * pairs + pair] = rope[p, row, column, pair]
    return out


def some_positions(rng, count, max_len):
    return torch.tensor([rng.randrange(max_len) for _ in range(count)])


@graded(points=3, hint="pair i is dimensions i and i + head_dim / 2, and (a, b) becomes (a cos - b sin, a sin + b cos)")
def test_each_pair_is_turned_by_its_angle(solution, rng):
    for pairs in (1, rng.randrange(2, 5), 8):
        angle, rope = table(20, pairs)
        positions = some_positions(rng, 6, 20)
        x = torch.randn(6, 2 * pairs)
        turned = torch.complex(x[:, :pairs].double(), x[:, pairs:].double())
        turned = turned * torch.polar(torch.ones_like(angle[positions]), angle[positions])
        got = solution.call("rotations", rope, positions)
        what = f"x @ matrix with head_dim {2 * pairs} at positions {positions.tolist()}"
        close(f"the matrices for {what}", got, by_definition(rope, positions))
        close(what, (x[:, None] @ got)[:, 0], torch.cat([turned.real, turned.imag], -1).float())


@graded(points=2, hint="take rope[positions] for each token: positions come in any order, and in rope's dtype")
def test_positions_come_in_any_order(solution, rng):
    for dtype in (torch.float32, torch.bfloat16):
        rope = table(12, 3)[1].to(dtype)
        last = rng.randrange(5, 12)
        for positions in ([last], [0, 0, 0], [last, 3, last, 0, 1]):
            got = solution.call("rotations", rope, torch.tensor(positions))
            close(f"{dtype} matrices at positions {positions}", got, by_definition(rope, torch.tensor(positions)))


@graded(points=1, hint="a turn by p and one back by p must cancel out: look at the signs of sin")
def test_scores_depend_on_the_distance_alone(solution, rng):
    _, rope = table(40, 4)
    q, k, distance = torch.randn(8), torch.randn(8), rng.randrange(1, 9)
    starts = torch.tensor([0, rng.randrange(1, 30), 30])
    queries, keys = (solution.call("rotations", rope, starts + by) for by in (distance, 0))
    for got in (queries, keys):
        if not isinstance(got, torch.Tensor) or got.shape != (3, 8, 8) or got.dtype != torch.float32:
            shape = f"{got.dtype} {list(got.shape)}" if isinstance(got, torch.Tensor) else f"a {type(got).__name__}"
            wrong("the matrices for 3 positions with head_dim 8", "torch.float32 [3, 8, 8]", shape)
    scores = torch.stack([(q @ queries[i]) @ (k @ keys[i]) for i in range(3)])
    close(f"q . k at distance {distance} from positions {starts.tolist()}", scores, scores[:1].expand(3).clone())
    angle = table(40, 4)[0][distance]
    turned = torch.polar(torch.ones_like(angle), angle) * torch.complex(q[:4].double(), q[4:].double())
    expected = (turned * torch.complex(k[:4].double(), -k[4:].double())).real.sum().float()
    close(f"q . k at distance {distance}", scores[0], expected)


@graded(points=2, hint="index rope with the tensor of positions itself; nothing may go through the host")
def test_it_can_be_captured(solution, rng):
    _, rope = table(16, 3)
    solution.read("rotations", keep="rotations")
    first, then = (some_positions(rng, 4, 16) for _ in range(2))
    got = solution.call("replayed", Kept("rotations"), [rope, first], [rope, then], of="support")
    what = f"a replay at positions {then.tolist()} of what was captured at {first.tolist()}"
    close(what, got, by_definition(rope, then))
