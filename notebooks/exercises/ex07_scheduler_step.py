"""Exercise 7: one scheduler step: admit and preempt. Read notebooks/03_decode_loop.ipynb first.

Grade it with `pytest tests/exercises --impl student -k ex07`.
"""

from collections.abc import Iterable, Sequence


def admit(needs: Iterable[int], num_running: int, num_free: int, max_num_seqs: int) -> int:
    """How many of the waiting sequences start now.

    needs: how many blocks of the KV cache each waiting sequence has to take, the one that waits for longest first;
    num_running: sequences that run already; num_free: blocks that are free.

    They start in order, and the first that cannot start holds up all behind it, however small these are: else a long
    prompt might wait for ever. A sequence can start if fewer than max_num_seqs run, and if after it took its blocks one
    block stays free for each sequence that runs already: each may need another one in the next step, and would have to
    be preempted at once. A sequence that starts runs from then on, for those behind it. When nothing runs, nothing has
    to stay free. When none waits, 0 start.

    Example: of 10 free blocks the first takes 4 and leaves 6; the second takes 3, and one must stay free; the third
    finds 3, and would leave none for the two that run:

        >>> admit([4, 3, 3], 0, 10, 8)
        2
    """
    raise NotImplementedError("Exercise 7: write admit; see notebooks/03_decode_loop.ipynb")


def preempt(missing: Sequence[int], released: Sequence[int], num_free: int) -> int:
    """How many running sequences must give way, so that the others find the blocks that they miss.

    Each running sequence is about to get one token, and where its last block is full it misses a block. If too few are
    free, the youngest sequence gives its blocks back and waits again; if that is not enough, the next youngest, and so
    on, but no more of them than it takes. What gives way misses nothing any more.

    missing: blocks that each running sequence misses (0 or 1, say), the oldest first; released: blocks that come free
    when it gives way, those younger than it having given way before it; num_free: blocks that are free. Returns the
    number of sequences that give way, 0 where there is room for all. It never takes more than all of them.

    Example: the youngest gives back two blocks, which are what the other two miss:

        >>> preempt([1, 1, 1], [2, 2, 2], 0)
        1
    """
    raise NotImplementedError("Exercise 7: write preempt; see notebooks/03_decode_loop.ipynb")
