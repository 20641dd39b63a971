"""Exercise 8: bucket choice and padding, row by row."""

from functools import partial

import pytest
import torch

from exercises.expect import equal
from exercises.wire import Kept

graded = partial(pytest.mark.exercise, number=8, part="choose_bucket and pad", timeout=10)
FIELDS = ("input_ids", "positions", "slot_mapping", "block_table", "context_lens")
PADDING = (0, 0, 0, [0], 1)


def some_inputs(rng, n, width):
    """The five tensors of n rows, without a zero in them."""
    whole = [torch.tensor([rng.randrange(1, 100) for _ in range(n)]) for _ in range(3)]
    table = torch.tensor([[rng.randrange(1, 100) for _ in range(width)] for _ in range(n)], dtype=torch.int32)
    return [*whole, table, torch.tensor([rng.randrange(2, 100) for _ in range(n)], dtype=torch.int32)]


def padded(solution, tensors, bucket, width):
    """The five tensors that pad returned."""
    solution.call("decode_inputs", *tensors, of="support", keep="inputs")
    solution.call("pad", Kept("inputs"), bucket, width, keep="padded")
    return [solution.read(name, of="padded") for name in FIELDS]


def check(solution, rng, n, width, bucket, columns, rows):
    """These rows of a batch of n, padded."""
    tensors = some_inputs(rng, n, width)
    got = padded(solution, tensors, bucket, columns)
    what = f"of {n} rows and {width} columns padded to {bucket} and {columns}"
    for name, mine, given, padding in zip(FIELDS, got, tensors, PADDING, strict=True):
        expected = given.tolist()
        if name == "block_table":
            expected = [row + [0] * (columns - width) for row in expected]
            padding = padding * columns
        expected += [padding] * (bucket - n)
        shape = [bucket, columns] if name == "block_table" else [bucket]
        equal(f"{name} {what}, dtype", str(getattr(mine, "dtype", type(mine))), str(given.dtype))
        equal(f"{name} {what}, shape", list(mine.shape), shape)
        equal(f"{name} {what}, from row {rows.start or 0}", mine.tolist()[rows], expected[rows])
    for name, given in zip(FIELDS, tensors, strict=True):
        equal(f"{name} {what}, the tensor that came in", solution.read(name, of="inputs").tolist(), given.tolist())


@graded(points=2, hint="the least of those that are at least as large as the batch, in whatever order they come")
def test_the_smallest_bucket_that_holds_the_batch(solution, rng):
    buckets = rng.sample(range(2, 60), 5)
    for batch in (1, *buckets, *(bucket + 1 for bucket in buckets), *(bucket - 1 for bucket in buckets)):
        expected = next((n for n in range(batch, 60) if n in buckets), None)
        equal(f"choose_bucket({batch}, {buckets})", solution.call("choose_bucket", batch, buckets), expected)
    keys = {8: "a", 2: "b"}
    equal(f"choose_bucket(3, {keys})", solution.call("choose_bucket", 3, keys), 8)
    equal("choose_bucket(1, [])", solution.call("choose_bucket", 1, []), None)


@graded(points=2, hint="the batch's rows come first and stay as they are, dtypes too; new columns of the table are 0")
def test_the_rows_of_the_batch_stay(solution, rng):
    n = rng.randrange(1, 5)
    for bucket, width, columns in ((n, 2, 2), (n + 3, 2, 2), (n, 1, 4), (n + 1, 2, 3)):
        check(solution, rng, n, width, bucket, columns, slice(0, n))


@graded(points=2, hint="a padded row: token 0, position 0, slot 0, blocks 0, context length 1; nothing of anybody's")
def test_padded_rows_touch_the_null_block_alone(solution, rng):
    n = rng.randrange(1, 5)
    for bucket, width, columns in ((n + 1, 1, 1), (n + rng.randrange(2, 6), 2, 4)):
        check(solution, rng, n, width, bucket, columns, slice(n, None))
