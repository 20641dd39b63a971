"""Exercise 10: predict the pool's bytes, and choose the capture order. Read notebooks/07_one_pool.ipynb first.

Grade it with `pytest tests/exercises --impl student -k ex10`.
"""

from collections.abc import Iterable


def round_size(nbytes: int) -> int:
    """The size in bytes of the block that PyTorch's CUDA caching allocator gives to a request of `nbytes`.

    Every size is rounded up to a multiple of 512 bytes, and no block is smaller than 512.

    Example: `round_size(1)` is 512, `round_size(512)` is 512, `round_size(513)` is 1024.
    """
    raise NotImplementedError("Exercise 10: write round_size; see notebooks/07_one_pool.ipynb")


def segment_size(size: int) -> int:
    """What the allocator asks of the device for a block of `size` bytes (already rounded) that fits nowhere else.

    Up to and with 1 MiB (2**20 bytes) the request is small, and the segment is one of 2 MiB, which other small blocks
    share. Above that and below 10 MiB the segment is one of 20 MiB. From 10 MiB on the segment is the request alone,
    rounded up to a multiple of 2 MiB.

    Example: `segment_size(512)` is 2 MiB, `segment_size(3 * 2**20)` is 20 MiB, `segment_size(11 * 2**20)` is 12 MiB.
    """
    raise NotImplementedError("Exercise 10: write segment_size; see notebooks/07_one_pool.ipynb")


def capture_order(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """In which order to capture graphs that share one pool, so that it stops growing after the first capture.

    pairs: (bucket, width) of each graph: how many rows, and how many columns of the block table. The intermediates of
    a graph grow with both, and what one capture has freed the next one uses again, if it is large enough. So the
    largest bucket comes first, and of equal buckets the widest. The pairs come in any order.

    Example: `capture_order([(1, 4), (8, 2), (8, 4)])` is `[(8, 4), (8, 2), (1, 4)]`.
    """
    raise NotImplementedError("Exercise 10: write capture_order; see notebooks/07_one_pool.ipynb")
