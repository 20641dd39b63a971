"""One request on its way through the engine."""

from __future__ import annotations

from tinyengine.kv.blocks import BlockTable
from tinyengine.sampling import SamplingParams


class Sequence:
    """The tokens of a request, how many of them are in the cache, and where.

    `pending` tokens still have to go through the model: all of a new prompt, one of a sequence that decodes, and
    everything again after a preemption.
    """

    def __init__(
        self, request_id: int, prompt_ids: list[int], params: SamplingParams, table: BlockTable, max_len: int
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_ids)
        self.num_prompt = len(prompt_ids)
        self.num_computed = 0
        self.params = params
        self.table = table
        self.max_len = max_len

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def pending(self) -> int:
        """How many tokens are not in the cache yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt :]

    @property
    def is_full(self) -> bool:
        """Whether the model's length, or the request's max_tokens, allows no further token."""
        limit = self.params.max_tokens
        return len(self) >= self.max_len or (limit is not None and len(self) - self.num_prompt >= limit)
