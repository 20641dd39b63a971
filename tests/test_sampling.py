"""The sampler against transformers' logits processors, against plain loops, and against chance."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyengine.errors import RequestError
from tinyengine.sampling import (
    NO_TOKEN,
    SamplingBatch,
    SamplingParams,
    _top_k_top_p_floor,
    inverse_cdf,
    penalize_repetition,
    sample,
    top_logprobs,
    uniform,
)

CPU = torch.device("cpu")


def draw(logits, params, seeds=None, positions=None):
    n = len(logits)
    params = params if isinstance(params, list) else [params] * n
    return sample(logits, SamplingBatch.build(params, seeds or [1] * n, positions or list(range(n)), CPU))


def support(row, params, draws=4000):
    """The tokens that a row can give, found by drawing."""
    return set(draw(row.repeat(draws, 1), params).tolist())


@pytest.mark.parametrize(
    "bad",
    [
        dict(temperature=-0.1),
        dict(temperature=math.nan),
        dict(temperature=math.inf),
        dict(top_k=-2),
        dict(top_k=1.5),
        dict(top_p=0),
        dict(top_p=1.1),
        dict(min_p=-0.1),
        dict(min_p=2),
        dict(repetition_penalty=0),
        dict(seed=1.5),
        dict(seed=2**63),
        dict(max_tokens=0),
        dict(max_tokens=True),
        dict(stop=""),
        dict(stop=["ok", ""]),
        dict(stop=[3]),
        dict(stop_token_ids=["a"]),
        dict(logprobs=-1),
        dict(temperature="warm"),
        dict(temperature=10**400),
        dict(top_k=2**70),
        dict(stop=5),
        dict(stop_token_ids=7),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_named(bad):
    (name,) = bad
    with pytest.raises(RequestError, match=name):
        SamplingParams(**bad)


def test_temperature_zero_is_greedy_in_any_company():
    logits = torch.randn(3, 50)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=0, top_k=3),
    ]
    chosen = draw(logits, params)
    assert chosen[0] == logits[0].argmax() and chosen[2] == logits[2].argmax()


def test_a_tiny_temperature_is_as_good_as_greedy_and_never_overflows():
    logits = torch.randn(20, 50) * 30
    assert draw(logits, SamplingParams(temperature=1e-30)).equal(logits.argmax(-1))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0, 1, 2, 5, 29, 30, 500]),
    st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_filters_keep_the_tokens_that_the_definition_names(seed, top_k, top_p, min_p):
    row = torch.randn(30, generator=torch.Generator().manual_seed(seed)) * 2
    kept = reference_support(row, top_k, top_p, min_p)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    found = support(row, params, draws=3000)
    assert found <= kept
    likely = {t for t in kept if kept_probability(row, kept)[t] > 0.01}
    assert likely <= found


def reference_support(row, top_k, top_p, min_p):
    """top_k, top_p and min_p one after the other, as their definitions say, in plain Python."""
    probs = row.double().softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda t: -probs[t])
    order = [t for t in order if probs[t] >= min_p * max(probs) * (1 - 1e-6)]
    order = order[: top_k or len(order)]
    total, before, kept = sum(probs[t] for t in order), 0.0, set()
    for t in order:
        if not kept or before / total < top_p:
            kept.add(t)
        before += probs[t]
    return kept


def kept_probability(row, kept):
    probs = row.softmax(-1)
    return {t: float(probs[t]) / sum(float(probs[k]) for k in kept) for t in kept}


@pytest.mark.parametrize(
    "top_k, top_p, min_p, temperature", [(5, 1.0, 0.0, 0.7), (0, 0.8, 0.0, 1.3), (0, 1.0, 0.1, 1.0)]
)
def test_filters_agree_with_transformers(top_k, top_p, min_p, temperature):
    lp = pytest.importorskip("transformers.generation.logits_process")
    row = torch.randn(40) * 2
    warpers = [lp.TemperatureLogitsWarper(temperature)]
    warpers += [lp.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [lp.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [lp.MinPLogitsWarper(min_p)] if min_p else []
    scores = row[None]
    for warper in warpers:
        scores = warper(None, scores)
    allowed = set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = support(row, params, draws=20_000)
    assert found <= allowed
    probs = scores[0].softmax(-1)
    assert {t for t in allowed if probs[t] > 1e-3} <= found


def test_repetition_penalty_agrees_with_transformers():
    lp = pytest.importorskip("transformers.generation.logits_process")
    row, seen = torch.randn(40), torch.tensor([3, 7, 7, 39, 3])
    expected = lp.RepetitionPenaltyLogitsProcessor(1.7)(seen[None], row.clone()[None])[0]
    params = [SamplingParams(repetition_penalty=1.7)]
    assert penalize_repetition(row[None], params, [seen.tolist()])[0].equal(expected)


def test_draws_follow_the_probabilities():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    n = 40_000
    tokens = draw(probs.log().repeat(n, 1), SamplingParams())
    share = torch.bincount(tokens, minlength=5) / n
    # Five standard deviations of a binomial share.
    assert ((share - probs).abs() <= 5 * (probs * (1 - probs) / n).sqrt()).all(), share


def test_noise_is_uniform_and_a_function_of_seed_and_position_alone():
    seeds = torch.arange(200).repeat_interleave(200) - 100
    positions = torch.arange(200).repeat(200)
    u = uniform(seeds, positions)
    assert u.dtype == torch.float32 and u.min() >= 0 and u.max() < 1
    assert (torch.histc(u, 10, 0, 1) / len(u) - 0.1).abs().max() < 0.01
    assert len(u.unique()) > 0.99 * len(u), "different seeds and positions give different numbers"
    grid = u.view(200, 200)
    for pair in (grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:]):  # next position, next seed
        assert torch.corrcoef(torch.stack([x.flatten() for x in pair]))[0, 1].abs() < 0.02
    shuffle = torch.randperm(len(u))
    assert uniform(seeds[shuffle], positions[shuffle]).equal(u[shuffle])


def test_a_row_gives_the_same_token_whatever_its_batch_mates_ask_for():
    logits = torch.randn(6, 100)
    mine = [SamplingParams(), SamplingParams(top_k=7), SamplingParams(top_p=0.8, min_p=0.01)]
    for extra in (SamplingParams(temperature=0), SamplingParams(top_k=50), SamplingParams(top_p=0.3)):
        together = draw(logits, [*mine, extra, extra, extra], [5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16])
        alone = [draw(logits[i : i + 1], [mine[i]], [5 + i], [11 + i]) for i in range(3)]
        assert together[:3].tolist() == [int(t) for t in alone]


def test_a_narrow_top_k_serves_rows_of_every_k_and_rows_of_none():
    """When every restricted row has a top_k, only the largest k is sorted: nobody may notice."""
    n, k = 3000, [7, 50, 0]
    logits = torch.randn(3, 200)
    for i, top_k in enumerate(k):
        mixed = [SamplingParams(top_k=other) for other in k] * n
        found = draw(logits.repeat(n, 1), mixed, [1] * 3 * n, list(range(3 * n))).view(n, 3)[:, i]
        alone = draw(logits[i].repeat(n, 1), SamplingParams(top_k=top_k), [1] * n, list(range(i, 3 * n, 3)))
        assert found.equal(alone)
        assert set(found.tolist()) <= set(logits[i].topk(top_k or 200).indices.tolist())
    assert len(set(found.tolist())) > 50, "the row without top_k keeps the whole vocabulary"


def test_a_row_that_keeps_everything_keeps_it_beside_one_that_does_not():
    """The sorted sums of a peaked row reach 1 early in float32; without top_p its tail is kept all the same."""
    n, vocab = 500, 20_000
    row = torch.full((vocab,), -10.0)
    row[0] = 0.5
    params = [SamplingParams(), SamplingParams(top_p=0.5)] * n
    tokens = draw(row.repeat(2 * n, 1), params, [1] * 2 * n, list(range(2 * n))).view(n, 2)
    tail = 1 / (1 + math.exp(0.5) / ((vocab - 1) * math.exp(-10)))
    assert (tokens[:, 0] != 0).float().mean() == pytest.approx(tail, abs=5 * (tail / n) ** 0.5)
    assert (tokens[:, 0] > vocab // 2).any() and (tokens[:, 1] == 0).all()


def test_top_k_without_top_p_keeps_k_tokens_however_the_sums_round():
    """The first token's probability alone rounds to 1 in float32."""
    row = torch.cat([torch.zeros(1), torch.linspace(-30, -31, 1999)])
    assert float(_top_k_top_p_floor(row[None], torch.tensor([1000]), torch.ones(1), 1000)) == row[999]


def test_noise_goes_with_the_length_of_the_history():
    logits, params = torch.zeros(1, 1000), [SamplingParams()]
    batch = SamplingBatch.build(params, [5], [1], CPU)
    drawn = [int(sample(logits, batch.later(length - 1))) for length in range(1, 41)]
    assert len(set(drawn)) > 30
    assert drawn == [int(t) for t in draw(logits.repeat(40, 1), SamplingParams(), [5] * 40, list(range(1, 41)))]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_of_broken_logits_gets_no_token_and_its_neighbours_do(value):
    logits = torch.randn(3, 20)
    logits[1] = value if value < 0 else logits[1].index_fill(0, torch.tensor([4]), value)
    for params in (SamplingParams(temperature=0), SamplingParams(seed=1)):
        chosen = draw(logits, params, [1, 2, 3]).tolist()
        assert chosen[1] == NO_TOKEN and NO_TOKEN not in (chosen[0], chosen[2])


def test_a_penalty_leaves_the_logits_themselves_as_they_were():
    logits = torch.randn(2, 20)
    before = logits.clone()
    params = [SamplingParams(repetition_penalty=3.0), SamplingParams()]
    penalized = penalize_repetition(logits, params, [[1, 2], [3]])
    assert logits.equal(before) and penalized[1].equal(before[1]) and not penalized[0].equal(before[0])
    assert penalize_repetition(logits, params[1:] * 2, [[1, 2], [3]]) is logits


def test_uniform_never_reaches_one():
    assert uniform(torch.arange(1_000_000), torch.zeros(1_000_000, dtype=torch.int64)).max() < 1
    assert float(torch.tensor(0xFFFFFF).float() / 2**24) < 1, "the largest value that the hash can give"


def test_the_ends_of_the_cdf_never_give_a_token_of_probability_zero():
    probs = torch.tensor([[0.0, 0.7, 0.0, 0.3, 0.0]])
    last = 1 - 2**-24
    assert [int(inverse_cdf(probs, torch.tensor([u]))) for u in (0.0, 0.69, 0.71, last)] == [1, 1, 3, 3]
    many = torch.rand(1000, 777).softmax(-1)
    many[:, 500:] = 0
    assert (inverse_cdf(many, torch.full((1000,), last)) < 500).all()


def test_logprobs_are_those_of_the_untouched_logits():
    logits = torch.randn(2, 20)
    picked, ids, values = top_logprobs(logits, torch.tensor([3, 4]), 5)
    expected = logits.log_softmax(-1)
    assert picked.equal(expected[torch.arange(2), torch.tensor([3, 4])])
    assert ids.equal(expected.argsort(descending=True)[:, :5]) and values.equal(expected.gather(1, ids))


@pytest.mark.cuda
def test_the_device_draws_what_the_host_draws():
    logits = torch.randn(64, 5000)
    params = [SamplingParams(top_k=i % 3 * 20, top_p=1 - 0.1 * (i % 4), min_p=0.01 * (i % 2)) for i in range(64)]
    build = [SamplingBatch.build(params, list(range(64)), list(range(64)), torch.device(d)) for d in ("cpu", "cuda")]
    assert uniform(build[1].seed, build[1].position).cpu().equal(uniform(build[0].seed, build[0].position))
    same = sample(logits, build[0]) == sample(logits.cuda(), build[1]).cpu()
    assert same.sum() >= 63, "sums in another order may move one border"
