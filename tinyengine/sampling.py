"""From logits to the next token: the parameters of a request, and the sampler of a whole batch.

Names and meaning follow vLLM's SamplingParams. A row's noise is a hash of (seed, position), made on the device, and
a token is chosen by inverse CDF in the order of token ids: neither depends on which other requests share the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyengine.device import upload
from tinyengine.errors import RequestError

NO_TOKEN = -1


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. RequestError if a value is out of range.

    The names are vLLM's; what vLLM has and is not here is not implemented.

    temperature: 0 is greedy. top_k: keep the k most likely tokens; 0 or -1 keeps all. top_p: keep the fewest most
    likely tokens whose probability reaches p. min_p: drop tokens less likely than min_p times the likeliest.
    repetition_penalty: above 1 makes tokens of the prompt and the output less likely (Keskar et al. 2019).
    seed: the same seed, prompt and parameters give the same tokens. max_tokens: None for as many as the model's
    length allows. stop: strings that end the text, and are left out of it. stop_token_ids: further ids that end it,
    beside the model's own eos ids, which ignore_eos switches off. logprobs: how many likeliest tokens to report
    with their log-probability at each position, beside the chosen one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            value = () if value is None else value
            if not isinstance(value, str | Iterable):
                raise RequestError(f"{name} must be a list; got {value!r}")
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        rules = {
            "temperature must be a number of 0 or more": _finite(self.temperature) and self.temperature >= 0,
            "top_k must be a whole number of 1 or more, or 0 or -1 for all tokens": _whole(self.top_k)
            and -1 <= self.top_k < 2**63,
            "top_p must be a number above 0 and at most 1": _finite(self.top_p) and 0 < self.top_p <= 1,
            "min_p must be a number from 0 to 1": _finite(self.min_p) and 0 <= self.min_p <= 1,
            "repetition_penalty must be a number above 0": _finite(self.repetition_penalty)
            and self.repetition_penalty > 0,
            "seed must be a whole number from -2**63 to 2**63 - 1": self.seed is None
            or (_whole(self.seed) and -(2**63) <= self.seed < 2**63),
            "max_tokens must be a whole number of 1 or more": self.max_tokens is None
            or (_whole(self.max_tokens) and self.max_tokens >= 1),
            "stop must be strings that are not empty": all(isinstance(s, str) and s for s in self.stop),
            "stop_token_ids must be whole numbers": all(_whole(t) for t in self.stop_token_ids),
            "logprobs must be a whole number of 0 or more": self.logprobs is None
            or (_whole(self.logprobs) and self.logprobs >= 0),
        }
        for rule, holds in rules.items():
            if not holds:
                raise RequestError(f"{rule}; got {getattr(self, rule.split()[0])!r}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


def _finite(value: object) -> bool:
    """Whether it is a number that a float32 can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3.4e38


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingBatch:
    """What n rows ask for, as tensors `[n]` on the device: float32, and int64 for top_k, seed and position."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor  # the index in its sequence of the token to come
    max_top_k: int  # 0 where a row needs the whole vocabulary sorted
    restricted: bool  # whether any row uses top_k or top_p
    uses_min_p: bool
    all_greedy: bool

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        device: torch.device,
    ) -> SamplingBatch:
        """seeds: one for each row, its request's own; positions: the index in its sequence of the token to come."""
        floats = torch.tensor(
            [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]],
            dtype=torch.float32,
        )
        whole = torch.tensor([[max(p.top_k, 0) for p in params], list(seeds), list(positions)])
        temperature, top_p, min_p = upload(floats, device)
        top_k, seed, position = upload(whole, device)
        narrow = [p for p in params if not p.greedy and (p.top_k > 0 or p.top_p < 1)]
        ks = [p.top_k for p in narrow]
        return cls(
            *(temperature, top_k, top_p, min_p, seed, position),
            max_top_k=max(ks) if ks and min(ks) > 0 else 0,
            restricted=bool(narrow),
            uses_min_p=any(p.min_p > 0 for p in params),
            all_greedy=all(p.greedy for p in params),
        )

    def width(self, vocab: int) -> int:
        """How many of the likeliest tokens have to be in order; 0 if no row restricts anything."""
        return min(self.max_top_k or vocab, vocab) if self.restricted else 0

    def later(self, tokens: int) -> SamplingBatch:
        """The same rows so many tokens later."""
        return self if self.all_greedy else replace(self, position=self.position + tokens)


def penalize_repetition(logits: Tensor, params: Sequence[SamplingParams], histories: Sequence[Sequence[int]]) -> Tensor:
    """Logits `[n, vocab]` in which each row's tokens so far are less likely, if it asks for that (CTRL's penalty).

    histories: each row's tokens, prompt included. The same tensor comes back where no row asks, else a copy.
    """
    rows = [i for i, p in enumerate(params) if p.repetition_penalty != 1]
    logits = logits.clone() if rows else logits
    for i in rows:
        token_ids, penalty = upload(torch.tensor(histories[i]), logits.device), params[i].repetition_penalty
        seen = logits[i, token_ids]
        logits[i] = logits[i].index_put((token_ids,), torch.where(seen > 0, seen / penalty, seen * penalty))
    return logits


def sampling_weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Tensor:
    """For each token of each row how likely it is, up to a factor; 0 for what top_k and top_p drop. `[n, vocab]`.

    logits: float32 `[n, vocab]`; temperature: float32 `[n]`, above 0; top_k: int64 `[n]`, 0 for all tokens; top_p:
    float32 `[n]`, of what top_k keeps. width: no row needs more than so many of the likeliest tokens in order; 0 where
    no row has a top_k or a top_p. Ties with the last token that is kept are kept, too.
    """
    # Minus the row's maximum first, so that a tiny temperature cannot overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperature.unsqueeze(1))
    if width:
        scaled.masked_fill_(scaled < _top_k_top_p_floor(scaled, top_k, top_p, width), -math.inf)
    return scaled.exp_()


def _top_k_top_p_floor(logits: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Tensor:
    """The smallest logit that each row's top_k and top_p keep, `[n, 1]`. Ties with it are kept too."""
    vocab = logits.shape[-1]
    ordered = logits.topk(width, -1).values if width < vocab else logits.sort(-1, descending=True).values
    rank = torch.arange(width, device=logits.device)
    k = torch.where(top_k > 0, top_k, vocab).unsqueeze(1)
    kept = ordered.masked_fill(rank >= k, -math.inf)
    # The probability of all that are likelier. The roll brings the total to the front: rank 0 is kept regardless.
    before = kept.softmax(-1).cumsum(-1).roll(1, -1)
    top_p = top_p.unsqueeze(1)
    keep = (rank < k) & ((before < top_p) | (top_p >= 1) | (rank == 0))
    floor = ordered.gather(1, (keep.sum(-1, keepdim=True) - 1))
    # Where `width` cut the sort short, a row without top_k and top_p got a floor that means nothing.
    unrestricted = (top_k <= 0).unsqueeze(1) & (top_p >= 1)
    return floor.masked_fill(unrestricted, -math.inf)


def sample(logits: Tensor, batch: SamplingBatch, sampling_weights: Callable[..., Tensor] = sampling_weights) -> Tensor:
    """The next token of each of n rows, int64 `[n]`, from its logits, float32 `[n, vocab]`, which stay as they are.

    A row with a NaN or an infinite maximum gets NO_TOKEN: whatever was chosen there would mean nothing.
    """
    highest, chosen = logits.max(-1)
    if not batch.all_greedy:
        temperature = torch.where(batch.temperature > 0, batch.temperature, 1.0)
        if batch.uses_min_p:  # a token that is min_p times as likely as the likeliest is so far below it
            least = highest + temperature * batch.min_p.log()
            logits = logits.masked_fill(logits < least.unsqueeze(1), -math.inf)
        weights = sampling_weights(logits, temperature, batch.top_k, batch.top_p, batch.width(logits.shape[-1]))
        drawn = inverse_cdf(weights, uniform(batch.seed, batch.position))
        chosen = torch.where(batch.temperature > 0, drawn, chosen)
    return chosen.masked_fill(~(highest.abs() < math.inf), NO_TOKEN)


def inverse_cdf(weights: Tensor, u: Tensor, part: int = 128) -> Tensor:
    """For each row the first token id at which the summed weight exceeds `u` of the total, int64 `[n]`.

    weights: float32 `[n, vocab]`, 0 or more; u: float32 `[n]`, in [0, 1). Sums over parts of the vocabulary come first,
    and only within the part that is hit a sum for each token. A token of weight 0 is never chosen, whatever the
    rounding of the sums.
    """
    if missing := -weights.shape[-1] % part:
        weights = F.pad(weights, (0, missing))
    parts = weights.view(len(weights), -1, part)
    of_part = parts.sum(-1)
    summed = of_part.cumsum(-1)
    target = u.unsqueeze(1) * _highest(summed, of_part)
    hit = _first_above(summed, of_part, target)
    rest = target - (summed - of_part).gather(1, hit)
    inside = parts.gather(1, hit.unsqueeze(-1).expand(-1, 1, part))[:, 0]
    summed = inside.cumsum(-1)
    below_all = _highest(summed, inside) * (1 - 2**-24)  # rounding may have left more than there is
    return (hit * part + _first_above(summed, inside, torch.minimum(rest, below_all)))[:, 0]


def _highest(summed: Tensor, weights: Tensor) -> Tensor:
    """The sum of all, as it stands at a weight above 0: rounded sums need not rise with each weight. `[n, 1]`."""
    return summed.masked_fill(weights == 0, 0.0).amax(-1, keepdim=True)


def _first_above(summed: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """The first index of a weight above 0 whose sum is above the target, `[n, 1]`."""
    return ((summed > target) & (weights > 0)).to(torch.uint8).argmax(-1, keepdim=True)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """A number in [0, 1) for each row, float32 `[n]`: a hash of seed and position (int64 `[n]`), no state anywhere.

    Two rounds of SplitMix64's finalizer (Steele et al. 2014); the upper 24 bits fill a float32's mantissa.
    """
    mixed = _mix(_mix(seed) + position * -7046029254386353131)  # 2**64 / golden ratio, as a signed number
    return ((mixed >> 40) & 0xFFFFFF).float() / 2**24


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64; a right shift is made logical by masking off the copied sign bits."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))


def top_logprobs(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities before temperature and filters: of `chosen` `[n]`, and of the `count` likeliest.

    Returns the chosen ones' `[n]`, then ids and values of the likeliest, each `[n, count]`.
    """
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(count, logits.shape[-1]), -1)
    return logprobs.gather(1, chosen.unsqueeze(1))[:, 0], ids, values
