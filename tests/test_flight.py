"""Steps whose tokens are read one step later: nothing that a user sees changes, whatever happens in between."""

import random

import pytest
import torch
from conftest import BLOCK_BYTES, interrupted

from tinyengine.engine import Engine
from tinyengine.sampling import SamplingParams


def engine_of(families, ahead, device="cpu", **options):
    engine = Engine(families["llama"][1], device=device, dtype="float32", **options)
    engine._runs_ahead = ahead
    return engine


def requests(seed, count=14):
    """Prompts and parameters of every kind that matters here."""
    rng = random.Random(seed)
    for i in range(count):
        prompt = [rng.randrange(3, 259) for _ in range(rng.choice([1, 2, 7, 16, 33, 60]))]
        params = dict(temperature=rng.choice([0, 0, 0.8, 1.5]), seed=i, max_tokens=rng.choice([1, 2, 5, 17, 30]))
        params |= rng.choice([{}, {}, dict(ignore_eos=True), dict(stop_token_ids=range(3, 30)), dict(stop=["e", "a"])])
        params |= rng.choice([{}, {}, {}, dict(logprobs=2), dict(top_k=5), dict(repetition_penalty=1.3)])
        yield prompt, SamplingParams(**params)


def told(completion):
    logprobs = completion.logprobs and [entry.token_id for entry in completion.logprobs]
    return completion.token_ids, completion.text, completion.finish_reason, logprobs


def serve(engine, asked, seed=0, abort=()):
    """Requests that arrive over time, a few at once; what became of each."""
    rng, waiting, ids, done = random.Random(seed), list(asked), [], {}
    while waiting or engine.has_unfinished:
        for _ in range(rng.randrange(3) if waiting else 0):
            if waiting:
                ids.append(engine.add_request(*waiting.pop(0)))
        for output in engine.step():
            if output.completion:
                assert output.request_id not in done
                done[output.request_id] = told(output.completion)
        for number in abort:
            if number < len(ids) and ids[number] not in done and rng.random() < 0.2:
                done[ids[number]] = told(engine.abort(ids[number]))
    assert engine.scheduler.allocator.num_used == 0 and engine.scheduler.is_idle
    return [done[i] for i in ids]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("blocks", [7, 12, 60])
def test_a_step_ahead_gives_the_same_completions(families, seed, blocks):
    """Also when blocks run out, and the youngest is preempted while a token of it is coming."""
    options = dict(kv_bytes=blocks * BLOCK_BYTES, max_num_seqs=6, max_num_batched_tokens=40)
    asked = list(requests(seed))
    plain, ahead = (engine_of(families, ahead, **options) for ahead in (False, True))
    assert serve(ahead, asked, seed) == serve(plain, asked, seed)
    assert ahead.stats.prefill_tokens + ahead.stats.decode_tokens >= plain.stats.decode_tokens


def test_the_youngest_may_be_preempted_while_a_token_of_it_is_coming(families):
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    asked = [([5 + i] * 30, params) for i in range(3)]
    plain, ahead = (engine_of(families, ahead, kv_bytes=9 * BLOCK_BYTES) for ahead in (False, True))
    preempt, coming = ahead.scheduler._preempt, []
    ahead.scheduler._preempt = lambda seq: (coming.append(seq.coming), preempt(seq))
    assert serve(ahead, asked) == serve(plain, asked) and 1 in coming


@pytest.mark.parametrize("seed", range(4))
def test_an_abort_while_a_token_is_coming_harms_nobody_else(families, seed):
    asked, aborted = list(requests(seed)), (1, 4, 6)
    plain, ahead = (engine_of(families, ahead, max_num_seqs=6) for ahead in (False, True))
    expected, got = serve(plain, asked, seed), serve(ahead, asked, seed, aborted)
    for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine == theirs or (i in aborted and mine[2] == "abort" and theirs[0][: len(mine[0])] == mine[0])


def test_tokens_of_the_step_before_come_from_the_device(families):
    """The second call launches a step on a token that no call has returned yet."""
    engine = engine_of(families, True)
    engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    seq = engine.scheduler.waiting[0]
    assert engine.step() == [] and (len(seq.token_ids), len(seq)) == (3, 4)
    (first,) = engine.step()
    assert seq.token_ids[3:] == [first.token_id] and len(seq) == 5 and engine.has_unfinished
    assert [len(engine.step()) for _ in range(2)] == [1, 1] and not engine.has_unfinished
    assert engine.stats.decode_tokens == 2, "a length is known beforehand: no step is made in vain"


def test_a_row_of_broken_numbers_ends_its_request_alone(families):
    engine = engine_of(families, True)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (before,) = engine.generate([[9, 9, 9]], params)
    kept = engine.params.embed[7].clone()
    engine.params.embed[7] = float("inf")
    bad, good = engine.generate([[7, 8], [9, 9, 9]], params, progress=False)
    engine.params.embed[7] = kept
    assert bad.finish_reason == "abort" and "float32" in bad.error and bad.token_ids == []
    assert good.error is None and good.token_ids == before.token_ids
    assert engine.cache.data.isfinite().all(), "the blocks' next owner must not find NaN"


def test_a_stream_ahead_is_the_same_text(families):
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=40)
    plain, ahead = (engine_of(families, ahead) for ahead in (False, True))
    assert list(ahead.stream("Once", params)) == list(plain.stream("Once", params))


@pytest.mark.parametrize("prompts", [[17], [3, 200], [33, 1, 65]])
def test_a_decode_step_may_follow_a_chunk_that_gives_no_token(families, prompts):
    """Of a prompt whose last chunk is a single token, and when decoding is due between the chunks of another."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    asked = [[5 + i % 200 for i in range(length)] for length in prompts]
    plain, ahead = (engine_of(families, ahead, max_num_batched_tokens=16) for ahead in (False, True))
    got, expected = (engine.generate(asked, params, progress=False) for engine in (ahead, plain))
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]


def test_a_token_too_many_leaves_nothing_broken_behind(families):
    """The token that ends a request goes through the model once more, and its numbers may be none."""
    (known,) = engine_of(families, False).generate([[11, 12, 13]], SamplingParams(temperature=0, max_tokens=3))
    last = known.token_ids[2]
    engine = engine_of(families, True)
    engine.params.embed[last] = float("inf")
    ends = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[last])
    assert engine.generate([[11, 12, 13]], ends)[0].finish_reason == "stop"
    assert engine.cache.data.isfinite().all()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_steps_seconds_are_the_engines_own(families, monkeypatch, ahead):
    """Whoever reads slowly, or comes back after a night, does not make the engine slow."""
    import tinyengine.engine as module

    now, original = [1000.0], module.sample

    def a_second(*args):
        now[0] += 1
        return original(*args)

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "sample", a_second)
    engine = engine_of(families, ahead)
    for _ in range(2):
        engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        while engine.has_unfinished:
            now[0] += 500
            engine.step()
    assert engine.stats.prefill_seconds + engine.stats.decode_seconds == 8


def test_nothing_stays_in_the_air_when_nobody_waits_for_it(families):
    engine = engine_of(families, True)
    first = engine.add_request([5, 6, 7], SamplingParams(temperature=0, ignore_eos=True))
    engine.step()
    engine.abort(first)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (done,) = engine.generate([[5, 6, 7]], params)
    stats = engine.stats
    assert not engine.has_unfinished and (stats.prefill_tokens, stats.decode_steps) == (3, 2), "not the aborted one's"
    ends = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=done.token_ids[1:2])
    engine.generate([[5, 6, 7]], ends)
    assert stats.decode_steps == 3, "the step that was launched before the end was known gave nobody a token"


def test_what_a_broken_step_preempted_is_computed_again_even_after_an_abort(families, monkeypatch):
    import tinyengine.engine as module

    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    asked = [([5 + i] * 30, params) for i in range(3)]
    expected = serve(engine_of(families, False), asked)
    engine, original = engine_of(families, True, kv_bytes=9 * BLOCK_BYTES), module.sample
    ids, done, broke = [engine.add_request(*request) for request in asked], {}, False

    def breaks(*args):
        if engine.scheduler.num_preemptions and not broke:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(module, "sample", breaks)
    for _ in range(1000):
        try:
            done.update({o.request_id: told(o.completion) for o in engine.step() if o.completion})
        except KeyboardInterrupt:
            broke = True
            engine.abort(ids[0])
        if not engine.has_unfinished:
            break
    assert broke and [done[i] for i in ids[1:]] == expected[1:] and engine.scheduler.allocator.num_used == 0


@pytest.mark.parametrize("where", ["forward", "sample"])
def test_a_step_ahead_that_breaks_off_is_run_again(families, monkeypatch, where):
    import tinyengine.engine as module

    asked = list(requests(1))
    expected = serve(engine_of(families, False), asked)
    engine, step = engine_of(families, True), Engine.step
    calls = interrupted(monkeypatch, module, where)

    def again():
        while True:
            try:
                return step(engine)
            except KeyboardInterrupt:
                continue

    monkeypatch.setattr(engine, "step", again)
    assert serve(engine, asked) == expected and len(calls) > 10


@pytest.mark.cuda
@pytest.mark.parametrize("stalled", [False, True])
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_device_that_runs_ahead_gives_the_same_completions(families, graphs, stalled, monkeypatch):
    """Stalled: each step waits behind idle time on the device, so the host is as far ahead as it can be."""
    asked = list(requests(2, 24))
    plain, ahead = (
        engine_of(families, ahead, "cuda", graphs=graphs, kv_bytes=40 * BLOCK_BYTES, block_size=16, max_num_seqs=6)
        for ahead in (False, True)
    )
    assert ahead.device.type == "cuda"
    if stalled:
        original = ahead.runner.decode
        monkeypatch.setattr(ahead.runner, "decode", lambda *args: (torch.cuda._sleep(int(2e7)), original(*args))[1])
    expected, got = serve(plain, asked), serve(ahead, asked)
    assert sum(a == b for a, b in zip(got, expected, strict=True)) >= len(asked) - 1, "one close choice may differ"
