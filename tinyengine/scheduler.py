"""Which sequences run in the next step: admit, chunk, preempt.

Continuous batching (Orca, Yu et al. 2022): a step is either a prefill step, several prompts or a chunk of a long
one under a token budget, or a decode step, one token for every running sequence. When blocks run out the youngest
sequence gives its own back and is computed again later (vLLM's recompute preemption).
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
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


class Scheduler:
    """Two queues, oldest request first: `waiting` holds no blocks, `running` holds blocks for all its tokens.

    A running sequence with more than one token pending is in prefill; with one it decodes, whether that token was
    generated, is the last of a chunked prompt, or is the whole prompt: to the model there is no difference. One that
    is full waits for its last token to be read.
    """

    def __init__(self, allocator: PrefixCache, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._prefills_in_a_row = 0

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
        """Move the oldest waiting sequence to running, if there is room for its tokens so far.

        Full blocks that somebody has computed before are shared (kv/prefix.py), and their tokens count as computed.

        One block for each running sequence stays free, else the next decode step would preempt what was just
        admitted. When none runs nothing is kept free, and any sequence fits, since none longer than the cache is
        ever accepted: so this cannot wait for ever.
        """
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return None
        seq = self.waiting[0]
        # At least one token must go through the model, since it gives the next one.
        known = self.allocator.find(seq.digests[: (len(seq) - 1) // seq.table.block_size])
        missing = seq.table.missing(len(seq)) - len(known) + self.allocator.num_idle(known)
        if missing + len(self.running) > self.allocator.num_free:
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
        served = 0
        while served < len(self.running):
            seq = self.running[served]
            missing = 0 if seq.is_full else seq.table.missing(len(seq))
            if missing > self.allocator.num_free:
                self._preempt(self.running[-1])
                continue
            if missing:
                seq.table.grow(len(seq))
            served += 1
        chunks = tuple((seq, 1) for seq in self.running if seq.pending == 1 and not seq.is_full)
        return Step(True, chunks) if chunks else None

    def _preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to the front of the queue; its tokens stay, its cache does not."""
        self.running.remove(seq)
        seq.table.release()
        seq.num_computed = seq.num_remembered = 0
        self.waiting.appendleft(seq)
        self.num_preemptions += 1
