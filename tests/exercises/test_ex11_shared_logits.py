"""Exercise 11: the shared logits buffer (SGLang #8579), on the tape, and on a GPU where there is one."""

from functools import partial

import pytest
import torch

from exercises.expect import close, equal
from exercises.wire import Kept

graded = partial(pytest.mark.exercise, number=11, part="LogitsBuffer", timeout=60)


def made(solution, rng):
    rows, vocab = rng.randrange(5, 9), rng.randrange(10, 30)
    solution.call("backend_of", "tape", of="support", keep="pair")
    solution.call("__getitem__", 1, of="pair", keep="device")
    solution.call("LogitsBuffer", rows, vocab, Kept("device"), keep="buffer")
    solution.read("tensor", of="buffer", keep="tensor")
    return rows, vocab


def address(solution, name):
    return solution.call("data_ptr", of=name)


def check_live_bytes(solution, rng, kind):
    vocab, dim, buckets = rng.randrange(200, 400), 4, sorted(rng.sample(range(1, 40), 4), reverse=True)
    solution.read("LogitsBuffer", keep="class")
    live, results = solution.call("live_logits", Kept("class"), kind, vocab, buckets, dim, of="support")
    weight = torch.arange(dim * vocab, dtype=torch.float32).view(dim, vocab) / vocab
    for bucket, got in zip(buckets, results, strict=True):
        close(f"logits of the graph of {bucket} rows", got, (torch.full((bucket, dim), 1 / bucket) @ weight))
    equal(f"bytes live in the pool after the captures of {buckets} rows, of which no graph owns any", live, [0] * 4)


@graded(points=2, hint="torch.full with NaN, float32, once, in __init__; a view is a slice of it")
def test_there_is_one_buffer_of_which_views_are_handed_out(solution, rng):
    rows, vocab = made(solution, rng)
    tensor = solution.call("clone", of="tensor")
    equal("[shape, dtype] of tensor", [list(tensor.shape), str(tensor.dtype)], [[rows, vocab], "torch.float32"])
    equal("how many of its numbers are NaN", int(tensor.isnan().sum()), rows * vocab)
    for start, count in ((0, rows), (0, 1), (2, 3), (rng.randrange(rows), 1)):
        solution.call("view", start, count, of="buffer", keep="view")
        equal(f"shape of view({start}, {count})", list(solution.call("size", of="view")), [count, vocab])
        offset = address(solution, "view") - address(solution, "tensor")
        equal(f"how many bytes after the buffer view({start}, {count}) begins", offset, start * vocab * 4)


@graded(points=2, hint="copy_ into the view, which also converts, and return the view")
def test_what_is_stored_is_found_in_its_rows(solution, rng):
    rows, vocab = made(solution, rng)
    expected = torch.full((rows, vocab), float("nan"))
    for start, count, dtype in ((0, 2, torch.float32), (3, 2, torch.bfloat16), (1, 3, torch.float16)):
        logits = torch.randn(count, vocab).to(dtype)
        expected[start : start + count] = logits.float()
        solution.call("store", logits, start, of="buffer", keep="stored")
        what = f"store({count} rows of {dtype}, {start})"
        close(f"the result of {what}", solution.call("clone", of="stored"), logits.float())
        equal(
            f"where the result of {what} begins",
            address(solution, "stored"),
            address(solution, "tensor") + start * vocab * 4,
        )
        close(f"the buffer after {what}", solution.call("nan_to_num", -1.0, of="tensor"), expected.nan_to_num(-1.0))


@graded(points=2, hint="store returns the view of the buffer, never the logits that came in")
def test_no_graph_has_logits_of_its_own(solution, rng):
    check_live_bytes(solution, rng, "tape")


@graded(points=0, needs="cuda", hint="the same as on the tape")
def test_no_graph_has_logits_of_its_own_on_a_gpu(solution, rng):
    check_live_bytes(solution, rng, "cuda")
