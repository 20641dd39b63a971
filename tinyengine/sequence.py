"""One request on its way through the engine."""

from __future__ import annotations

from tinyengine.kv.blocks import BlockTable
from tinyengine.kv.prefix import extend_digests
from tinyengine.sampling import SamplingParams


class Sequence:
    """The tokens of a request, how many of them are in the cache, and where.

    `pending` tokens still have to go through the model: all of a new prompt, one of a sequence that decodes, and
    everything again after a preemption. `coming` tokens are being computed and have no value yet, but they count: the
    sequence is so long already, and `limit` is how long it may become. `coming_row` is where the newest of them will
    stand among the tokens of its step.
    """

    def __init__(
        self, request_id: int, prompt_ids: list[int], params: SamplingParams, table: BlockTable, max_len: int
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_ids)
        self.num_prompt = len(prompt_ids)
        self.num_computed = 0
        self.num_remembered = 0  # of its blocks, in the prefix cache
        self.params = params
        self.table = table
        self.limit = max_len if params.max_tokens is None else min(max_len, self.num_prompt + params.max_tokens)
        self.coming = self.coming_row = 0
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self.token_ids) + self.coming

    @property
    def pending(self) -> int:
        """How many tokens are not in the cache yet."""
        return len(self) - self.num_computed

    @property
    def digests(self) -> list[bytes]:
        """Of each block that its tokens fill; see kv/prefix.py."""
        return extend_digests(self._digests, self.token_ids, self.table.block_size)

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt :]

    @property
    def is_full(self) -> bool:
        """Whether it may get no further token, beside those that are coming."""
        return len(self) >= self.limit
