"""Which sequences run in the next step: admit, chunk, preempt.

Continuous batching (Orca, Yu et al. 2022): a step is either a prefill step, several prompts or a chunk of a long
one under a token budget, or a decode step, one token for every running sequence. When blocks run out the youngest
sequence gives its own back and is computed again later (vLLM's recompute preemption).
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from tinyengine.kv.prefix import PrefixCache
from tinyengine.sequence import Sequence

MAX_PREFILLS_IN_A_ROW = 8


@dataclass(frozen=True)
class Step:
    """What to run: for each sequence, how many of its pending tokens. A decode step runs one of each."""

    is_decode: bool
    chunks: tuple[tuple[Sequence, int], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model in this step."""
        return sum(count for _, count in self.chunks)

    @property
    def completes(self) -> list[bool]:
        """For each sequence, before the step is committed: does it leave none pending, and so get a new token?"""
        return [seq.pending == count for seq, count in self.chunks]


def admit(needs: Iterable[int], num_running: int, num_free: int, max_num_seqs: int) -> int:
    """How many of the waiting sequences start now, in order: the first that cannot start holds up those behind it.

    needs: blocks that each has to take. One starts if fewer than `max_num_seqs` run, and if beside the blocks that it
    takes one for each running sequence stays free, else the next decode step would preempt what was just admitted.
    What starts runs, for those that come after it. When none runs nothing is kept free, and any sequence fits, since
    none longer than the cache is ever accepted: so this cannot wait for ever.
    """
    admitted = 0
    for need in needs:
        running = num_running + admitted
        if running >= max_num_seqs or need + running > num_free:
            break
        num_free -= need
        admitted += 1
    return admitted


def preempt(missing: ListLike[int], released: ListLike[int], num_free: int) -> int:
    """How many of the running sequences have to give way, the youngest first, so that the others can go on.

    missing: blocks that each running sequence has to take for its next token, the oldest sequence first; released:
    blocks that come free when it gives way after all that are younger. As few as can be: those that are left must find
    what they miss among `num_free` blocks and those that came free.
    """
    victims, wanted = 0, sum(missing)
    while wanted > num_free:
        victims += 1
        wanted -= missing[-victims]
        num_free += released[-victims]
    return victims


class Scheduler:
    """Two queues, oldest request first: `waiting` holds no blocks, `running` holds blocks for all its tokens.

    A running sequence with more than one token pending is in prefill; with one it decodes, whether that token was
    generated, is the last of a chunked prompt, or is the whole prompt: to the model there is no difference. One that
    is full waits for its last token to be read.
    """

    def __init__(
        self,
        allocator: PrefixCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        admit: Callable[..., int] = admit,
        preempt: Callable[..., int] = preempt,
    ) -> None:
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._prefills_in_a_row = 0
        self._may_start, self._have_to_give_way = admit, preempt

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits or runs."""
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        """Queue a new request."""
        self.waiting.append(seq)

    def remember(self, seq: Sequence) -> None:
        """What a sequence has computed may be shared from now on: its full blocks whose tokens are known."""
        full = min(seq.num_computed, len(seq.token_ids)) // seq.table.block_size
        for i in range(seq.num_remembered, full):
            self.allocator.remember(seq.table.blocks[i], seq.digests[i])
        seq.num_remembered = max(full, seq.num_remembered)

    def forget_all(self) -> None:
        """Nothing that was computed so far may be shared, nor what running sequences add to it."""
        self.allocator.forget(range(self.allocator.num_blocks))
        for seq in self.running:
            seq.num_remembered = sys.maxsize

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, ended or aborted, and free its blocks."""
        (self.running if seq in self.running else self.waiting).remove(seq)
        seq.table.release()

    def schedule(self) -> Step | None:
        """The next step, its blocks taken; None when there is nothing to do.

        Prompts go first: the more sequences decode together, the less each token costs. But a stream of new prompts
        must not silence those that are being answered, so they get a step after MAX_PREFILLS_IN_A_ROW at the latest.
        """
        decode_is_due = self._prefills_in_a_row >= MAX_PREFILLS_IN_A_ROW
        step = (self._decode_step() if decode_is_due else None) or self._prefill_step() or self._decode_step()
        self._prefills_in_a_row = 0 if step is None or step.is_decode else self._prefills_in_a_row + 1
        return step

    def _admit(self) -> Sequence | None:
        """Move the oldest waiting sequence to running, if there is room for its tokens so far (see `admit`).

        Full blocks that somebody has computed before are shared (kv/prefix.py), and their tokens count as computed.
        """
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return None
        seq = self.waiting[0]
        # At least one token must go through the model, since it gives the next one.
        known = self.allocator.find(seq.digests[: (len(seq) - 1) // seq.table.block_size])
        missing = seq.table.missing(len(seq)) - len(known) + self.allocator.num_idle(known)
        if not self._may_start([missing], len(self.running), self.allocator.num_free, self.max_num_seqs):
            return None
        seq.table.share(known)
        seq.table.grow(len(seq))
        seq.num_remembered = len(known)
        seq.num_computed = len(known) * seq.table.block_size
        self.num_cached_tokens += seq.num_computed
        self.running.append(self.waiting.popleft())
        return seq

    def _prefill_step(self) -> Step | None:
        """Chunks of the running sequences that have more than one token pending, oldest first, up to the budget.

        Waiting sequences are admitted as long as the budget has room for them, and no earlier: what a step computes
        may be shared by those that come after it. One with a single token pending goes on to decode.
        """
        budget = self.max_num_batched_tokens
        chunks = []
        for seq in itertools.chain(list(self.running), iter(self._admit, None)):
            if seq.pending > 1:
                chunks.append((seq, min(seq.pending, budget)))
                budget -= chunks[-1][1]
            if budget == 0:
                break
        return Step(False, tuple(chunks)) if chunks else None

    def _decode_step(self) -> Step | None:
        """One token of every sequence that has one pending, after the youngest made room where blocks ran out."""
        missing = [0 if seq.is_full else seq.table.missing(len(seq)) for seq in self.running]
        if sum(missing) > self.allocator.num_free:
            for _ in range(self._have_to_give_way(missing, self._released(), self.allocator.num_free)):
                self._preempt(self.running[-1])
        for seq, count in zip(self.running, missing, strict=False):
            if count:
                seq.table.grow(len(seq))
        chunks = tuple((seq, 1) for seq in self.running if seq.pending == 1 and not seq.is_full)
        return Step(True, chunks) if chunks else None

    def _released(self) -> list[int]:
        """For each running sequence the blocks of which it is the last owner, once all younger ones gave way."""
        left = {block: self.allocator.ref_count(block) for seq in self.running for block in seq.table.blocks}
        counts = []
        for seq in reversed(self.running):
            for block in seq.table.blocks:
                left[block] -= 1
            counts.append(sum(left[block] == 0 for block in seq.table.blocks))
        return counts[::-1]

    def _preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to the front of the queue; its tokens stay, its cache does not."""
        self.running.remove(seq)
        seq.table.release()
        seq.num_computed = seq.num_remembered = 0
        self.waiting.appendleft(seq)
        self.num_preemptions += 1
