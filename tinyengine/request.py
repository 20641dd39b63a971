"""One request as its user sees it: a prompt that becomes text, and in the end a completion."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from tinyengine.model.detokenizer import Detokenizer, StopStrings
from tinyengine.model.tokenizer import TextTokenizer
from tinyengine.sequence import Sequence


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a generated token, and of the likeliest ones there, by token id."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class Completion:
    """What became of one request.

    finish_reason: `stop` (eos or a stop condition), `length`, or `abort`; error says why if the engine aborted it.
    """

    prompt: str
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    time_to_first_token: float  # seconds from add_request; NaN where there was none
    error: str | None = None


class Request:
    """A sequence of tokens and the text that it has become so far.

    seed: for the noise of sampling; the request's own, or one drawn for it. in_pieces: whether somebody reads the text
    as it comes; else, and if no stop string has to be found in it, it is made when the request ends, which is faster.
    """

    def __init__(self, prompt: str, seq: Sequence, seed: int, tokenizer: TextTokenizer, in_pieces: bool) -> None:
        self.prompt = prompt
        self.seq = seq
        self.seed = seed
        self.text = ""
        self._in_pieces = in_pieces or bool(seq.params.stop)
        self._detokenizer = Detokenizer(tokenizer, seq.token_ids)
        self._stops = StopStrings(seq.params.stop)
        self._logprobs: list[TokenLogprobs] = []
        self._started = time.perf_counter()
        self._first_token = float("nan")

    def append(self, token: int, logprobs: TokenLogprobs | None, eos_token_ids: Collection[int]) -> str | None:
        """Add a generated token and, in pieces, the text that it makes readable; why the request ends here, or None.

        The text leaves out the token or the string that ends it; token_ids keep the token.
        """
        seq, params = self.seq, self.seq.params
        if len(seq.token_ids) == seq.num_prompt:
            self._first_token = time.perf_counter() - self._started
        seq.token_ids.append(token)
        if logprobs:
            self._logprobs.append(logprobs)
        if token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos):
            return "stop"
        if self._in_pieces:
            text, stopped = self._stops.push(self._detokenizer.add([token]))
            self.text += text
            if stopped:
                return "stop"
        return "length" if len(seq.token_ids) >= seq.limit else None

    def complete(self, reason: str, error: str | None = None) -> Completion:
        """Show what was held back, and close. What was held back may still complete a stop string."""
        rest = [] if self._in_pieces else self.seq.output_ids
        if reason == "stop":
            rest = rest[:-1]  # the token that ends it
        text, stopped = self._stops.push(self._detokenizer.flush(rest))
        self.text += text + self._stops.flush()
        return Completion(
            prompt=self.prompt,
            text=self.text,
            token_ids=self.seq.output_ids,
            finish_reason="stop" if stopped and reason != "abort" else reason,
            prompt_token_ids=self.seq.token_ids[: self.seq.num_prompt],
            logprobs=self._logprobs if self.seq.params.logprobs is not None else None,
            time_to_first_token=self._first_token,
            error=error,
        )
