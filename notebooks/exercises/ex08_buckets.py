"""Exercise 8: bucket choice and padding. Read notebooks/06_buckets_and_padding.ipynb first.

Grade it with `pytest tests/exercises --impl student -k ex08`.
"""

from collections.abc import Iterable

from tinyengine.model.inputs import DecodeInputs


def choose_bucket(batch: int, buckets: Iterable[int]) -> int | None:
    """The smallest bucket that holds `batch` sequences; None if none does.

    A graph is captured for each of a few batch sizes, the buckets, and a batch runs in one that is large enough. They
    come in any order, and may be any iterable, such as the keys of a dict.

    Example:

        >>> choose_bucket(3, [8, 4, 1])
        4
        >>> choose_bucket(4, [8, 4, 1])
        4
        >>> choose_bucket(9, [8, 4, 1]) is None
        True
    """
    raise NotImplementedError("Exercise 8: write choose_bucket; see notebooks/06_buckets_and_padding.ipynb")


def pad(inputs: DecodeInputs, bucket: int, width: int) -> DecodeInputs:
    """A batch of n sequences filled up to `bucket` rows, and its block table to `width` columns.

    inputs: the tensors of a decode step, with n <= bucket rows: `input_ids`, `positions` and `slot_mapping` are int64
    `[n]`, `block_table` is int32 `[n, w]` with w <= width, and `context_lens` is int32 `[n]`. Make the result with
    `DecodeInputs(input_ids, positions, slot_mapping, block_table, context_lens)`; dtypes stay as they are, and the
    tensors that came in are not changed.

    The rows of the batch come first, unchanged, but for the new columns of the block table, which are 0. A padded row
    is token 0 at position 0, and runs through the model like any other: it writes to slot 0 and reads from block 0, the
    null block, which no sequence owns. Its context length is 1, its own token: a softmax over no position gives NaN.

    Example: one sequence of 5 tokens, the newest of which is 7, in block 3 of 16 slots:

        >>> from tinyengine.model.inputs import DecodeInputs
        >>> table, lens = torch.tensor([[3]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
        >>> inputs = DecodeInputs(torch.tensor([7]), torch.tensor([4]), torch.tensor([52]), table, lens)
        >>> padded = pad(inputs, 2, 2)
        >>> padded.slot_mapping.tolist(), padded.context_lens.tolist()
        ([52, 0], [5, 1])
        >>> padded.block_table
        tensor([[3, 0],
                [0, 0]], dtype=torch.int32)
    """
    raise NotImplementedError("Exercise 8: write pad; see notebooks/06_buckets_and_padding.ipynb")
