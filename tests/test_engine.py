"""The engine against transformers, and against itself in other company: batches, chunks, preemption, streams."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BLOCK_BYTES, FAMILIES, interrupted

from tinyengine import Engine, SamplingParams
from tinyengine.errors import ConfigError, RequestError
from tinyengine.model.inputs import PrefillInputs
from tinyengine.model.transformer import float_logits, forward

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
LENGTHS = (1, 2, 15, 16, 17, 40, 130, 9)  # one is longer than the prefill budget of 100


def prompts_of(lengths=LENGTHS, vocab=300, seed=3):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=g).tolist() for n in lengths]


def hf_greedy(model, prompt, count):
    ids = torch.tensor([prompt])
    options = dict(max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def tokens(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def expected(families):
    """64 greedy tokens of transformers for the ragged batch, one prompt at a time, by family."""
    return {name: [hf_greedy(model, p, 64) for p in prompts_of()] for name, (model, _) in families.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(families, family):
    model, folder = families[family]
    engine = Engine(folder, device="cpu", block_size=16)
    prompt = prompts_of((70,))[0]
    table = torch.arange(1, 6, dtype=torch.int32)[None]
    positions = torch.arange(70)
    inputs = PrefillInputs(torch.tensor(prompt), positions, positions + 16, table, (70,), (70,))
    with torch.inference_mode():
        logits = float_logits(engine.params, forward(engine.params, inputs, engine.attention, engine.cache))
        reference = model(torch.tensor([prompt])).logits[0]
    assert (logits - reference).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_a_ragged_batch_equal_those_of_transformers(families, expected, family):
    engine = Engine(families[family][1], device="cpu", max_num_batched_tokens=100)
    done = engine.generate(prompts_of(), GREEDY, progress=False)
    assert tokens(done) == expected[family]
    assert all(d.finish_reason == "length" for d in done)
    assert engine.scheduler.num_preemptions == 0
    assert engine.scheduler.allocator.num_used == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_same_when_blocks_run_out(families, expected, family):
    folder = families[family][1]
    whole = Engine(folder, device="cpu")
    per_block = whole.cache.data.nbytes // whole.cache.num_blocks
    engine = Engine(folder, device="cpu", max_num_batched_tokens=100, kv_bytes=16 * per_block)
    assert engine.cache.num_blocks == 16
    done = engine.generate(prompts_of(), GREEDY, progress=False)
    assert engine.scheduler.num_preemptions > 0, "the test must have made blocks run out"
    assert tokens(done) == expected[family]
    assert engine.scheduler.allocator.num_used == 0


def test_seeded_samples_do_not_depend_on_company_chunks_or_preemption(families):
    folder = families["llama"][1]
    params = [SamplingParams(temperature=1.5, top_k=40 * (i % 2), top_p=0.9, seed=i, max_tokens=40) for i in range(8)]
    together = Engine(folder, device="cpu").generate(prompts_of(), params, progress=False)
    one_by_one = Engine(folder, device="cpu")
    alone = [one_by_one.generate([p], s)[0] for p, s in zip(prompts_of(), params, strict=True)]
    tight = Engine(folder, device="cpu", max_num_batched_tokens=30, kv_bytes=16 * BLOCK_BYTES)
    squeezed = tight.generate(prompts_of(), params, progress=False)
    assert tight.scheduler.num_preemptions > 0
    assert tokens(together) == tokens(alone) == tokens(squeezed)
    other = Engine(folder, device="cpu").generate(
        prompts_of(),
        [SamplingParams(temperature=1.5, seed=100 + i, max_tokens=40) for i in range(8)],
        progress=False,
    )
    assert tokens(other) != tokens(together)


def test_requests_may_come_and_go_between_steps(families, expected):
    engine = Engine(families["llama"][1], device="cpu", max_num_seqs=3)
    prompts, done, ids = prompts_of(), {}, {}
    arrivals = {0: [0, 1], 5: [2], 6: [3, 4, 5], 30: [6], 90: [7]}
    for step in range(1000):
        for i in arrivals.get(step, ()):
            ids[engine.add_request(prompts[i], GREEDY)] = i
        for output in engine.step():
            if output.completion:
                done[ids[output.request_id]] = output.completion
        if step > 90 and not engine.has_unfinished:
            break
    assert [done[i].token_ids for i in range(8)] == expected["llama"]


def test_streams_and_batches_do_not_lose_each_others_tokens(families, expected):
    engine = Engine(families["llama"][1], device="cpu")
    prompts = prompts_of()
    loose = engine.add_request(prompts[0], GREEDY)
    stream = engine.stream(prompts[2], GREEDY)
    pieces = [next(stream), next(stream)]
    (batch,) = engine.generate([prompts[4]], GREEDY)
    pieces += list(stream)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert batch.token_ids == expected["llama"][4]
    assert [o.token_id for o in outputs] == expected["llama"][0]
    assert {o.request_id for o in outputs} == {loose}
    assert "".join(pieces) == Engine(families["llama"][1], device="cpu").generate([prompts[2]], GREEDY)[0].text


def test_closing_a_stream_early_aborts_its_request(families):
    engine = Engine(families["llama"][1], device="cpu")
    stream = engine.stream("hello", GREEDY)
    next(stream)
    stream.close()
    assert not engine.has_unfinished and engine.scheduler.allocator.num_used == 0


def test_a_closed_stream_leaves_nothing_behind_even_if_it_had_ended_unseen(families):
    engine = Engine(families["llama"][1], device="cpu")
    stream = engine.stream("hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    next(stream)
    engine.generate("longer than that", SamplingParams(max_tokens=20, ignore_eos=True))
    assert not engine.has_unfinished and engine.step() == [], "the stream's tokens are held for it"
    stream.close()
    assert engine._held == [] and engine._claimed == set()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_the_cache_takes_no_memory_before_it_is_used(families):
    def anonymous_bytes():
        (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon")]
        return int(line.split()[1]) * 1024

    before = anonymous_bytes()
    engine = Engine(families["llama"][1], device="cpu", kv_bytes=3 * 10**9, max_num_seqs=10**9)
    assert engine.cache.data.nbytes > 2.9e9
    assert anonymous_bytes() - before < 0.5e9


def test_abort_returns_the_text_so_far_and_frees_the_blocks(families):
    engine = Engine(families["llama"][1], device="cpu")
    keep, drop = (engine.add_request(p, GREEDY) for p in prompts_of((5, 6)))
    for _ in range(4):
        engine.step()
    aborted = engine.abort(drop)
    assert aborted.finish_reason == "abort" and len(aborted.token_ids) == 4
    with pytest.raises(RequestError, match="no unfinished request"):
        engine.abort(drop)
    rest = []
    while engine.has_unfinished:
        rest += engine.step()
    assert {o.request_id for o in rest} == {keep} and engine.scheduler.allocator.num_used == 0


def test_a_stream_whose_request_was_aborted_elsewhere_ends(families):
    engine = Engine(families["llama"][1], device="cpu")
    stream = engine.stream("hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    next(stream)
    engine.abort(0)
    assert list(stream) == []


@pytest.mark.parametrize("ahead", [False, True])
def test_whoever_calls_step_takes_nothing_from_a_stream(families, ahead):
    engine = Engine(families["llama"][1], device="cpu")
    engine._runs_ahead = ahead
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    whole = engine.generate("hello", params)[0].text
    stream = engine.stream("hello", params)
    text, loose, outputs = next(stream), engine.add_request([5, 6, 7], params), []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [output.request_id for output in outputs] == [loose] * 8
    assert text + "".join(stream) == whole and engine._claimed == set()


@pytest.mark.parametrize("where", ["forward", "sample"])
def test_a_step_that_breaks_off_is_run_again(families, expected, monkeypatch, where):
    import tinyengine.engine as module

    engine = Engine(families["llama"][1], device="cpu", max_num_batched_tokens=100)
    ids = [engine.add_request(p, GREEDY) for p in prompts_of()]
    done = {}
    interrupted(monkeypatch, module, where)
    while engine.has_unfinished:
        try:
            done.update({o.request_id: o.completion for o in engine.step() if o.completion})
        except KeyboardInterrupt:
            continue
    assert [done[i].token_ids for i in ids] == expected["llama"]


@pytest.mark.parametrize("where", ["Request.append", "Scheduler.remove", "Request.complete", "EngineStats.count"])
def test_ctrl_c_while_tokens_are_handed_out_waits_and_loses_nothing(families, expected, monkeypatch, where):
    import signal

    import tinyengine.engine as module

    owner, name = where.split(".")
    original, calls = getattr(getattr(module, owner), name), 0

    def pressed(*args):
        nonlocal calls
        calls += 1
        if calls % 3 == 1:
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(getattr(module, owner), name, pressed)
    engine = Engine(families["llama"][1], device="cpu")
    ids, outputs, interrupts = [engine.add_request(p, GREEDY) for p in prompts_of()[:4]], [], 0
    while engine.has_unfinished:
        try:
            outputs += engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts > 0 and engine.scheduler.allocator.num_used == 0
    for i, request_id in enumerate(ids):
        mine = [o for o in outputs if o.request_id == request_id]
        assert [o.token_id for o in mine] == mine[-1].completion.token_ids == expected["llama"][i]


def test_ctrl_c_in_generate_leaves_other_requests_alone(families, expected, monkeypatch):
    engine = Engine(families["llama"][1], device="cpu")
    other = engine.add_request(prompts_of()[0], GREEDY)
    original = engine._next_tokens

    def interrupted(step):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_next_tokens", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts_of()[1:3], GREEDY, progress=False)
    assert engine._next_tokens == original
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert {o.request_id for o in outputs} == {other}
    assert [o.token_id for o in outputs] == expected["llama"][0]


def test_numbers_that_overflow_end_their_request_alone_and_poison_nobody(families):
    engine = Engine(families["llama"][1], device="cpu", kv_bytes=8 * BLOCK_BYTES)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (before,) = engine.generate([[9, 9, 9]], params)
    kept = engine.params.embed[7].clone()
    engine.params.embed[7] = float("inf")
    bad, good = engine.generate([[7, 8], [9, 9, 9]], params, progress=False)
    assert bad.finish_reason == "abort" and "float32" in bad.error and bad.token_ids == []
    assert good.error is None and good.token_ids == before.token_ids
    with pytest.raises(RequestError, match="overflowed"):
        list(engine.stream([7, 8], params))
    engine.params.embed[7] = kept
    assert engine.cache.data.isfinite().all(), "the blocks' next owner must not find NaN"
    assert engine.generate([[9, 9, 9]], params)[0].token_ids == before.token_ids


def test_requests_without_a_seed_differ(families):
    engine = Engine(families["llama"][1], device="cpu")
    done = engine.generate([[5, 6, 7]] * 2, SamplingParams(temperature=2.0, max_tokens=20), progress=False)
    assert done[0].token_ids != done[1].token_ids


def test_statistics_add_up(families):
    engine = Engine(families["llama"][1], device="cpu")
    done = engine.generate(prompts_of((20, 40)), SamplingParams(max_tokens=10, ignore_eos=True), progress=False)
    stats = engine.stats
    assert (stats.prefill_tokens, stats.decode_tokens) == (60, 18)
    engine.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert stats.peak_blocks == 2 + 4, "29 and 49 tokens in blocks of 16; a short request later changes nothing"
    total = stats.prefill_seconds + stats.decode_seconds
    assert all(0 < d.time_to_first_token < total for d in done) and stats.prefill_seconds < total


# ---- how a request ends ----


def test_it_ends_at_any_eos_id_and_the_text_leaves_it_out(families, tmp_path):
    import json
    import shutil

    model, folder = families["qwen2"]
    prompt = prompts_of((12,))[0]
    path = hf_greedy(model, prompt, 20)
    ends = next(t for t in path[3:] if t >= 3)  # a token that greedy decoding is going to produce
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [299, ends]}))
    engine = Engine(tmp_path / "m", device="cpu")
    (done,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=20))
    cut = path.index(ends) + 1
    assert (done.finish_reason, done.token_ids) == ("stop", path[:cut])
    assert done.text == engine.tokenizer.decode(path[: cut - 1])
    (more,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert (more.finish_reason, more.token_ids) == ("length", path)
    (own,) = engine.generate([prompt], SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[path[1]]))
    assert (own.finish_reason, own.token_ids[-1]) == ("stop", path[1])


def scripted(engine, text):
    """An engine whose model is replaced by one that says `text`, byte by byte, then spaces."""
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    space = engine.tokenizer.encode(" ", add_special_tokens=False)[0]
    original = engine._choose

    def choose(logits, seqs):
        rows = [seq.output_ids for seq in seqs]
        chosen = [ids[len(row)] if len(row) < len(ids) else space for row in rows]
        return original(torch.nn.functional.one_hot(torch.tensor(chosen), logits.shape[1]).float(), seqs)

    engine._choose = choose
    return engine


def test_a_stop_string_ends_the_text_before_it_also_across_tokens(families):
    engine = scripted(Engine(families["llama"][1], device="cpu"), "One day. The END of it")
    params = SamplingParams(temperature=0, max_tokens=50, stop=["the end", "END"])
    pieces = list(engine.stream("x", params))
    assert "".join(pieces) == "One day. The "
    (done,) = engine.generate("x", params)
    assert (done.text, done.finish_reason, len(done.token_ids)) == ("One day. The ", "stop", 16)


def test_a_stop_string_that_never_comes_is_shown_after_all(families):
    engine = scripted(Engine(families["llama"][1], device="cpu"), "the EN")
    (done,) = engine.generate("x", SamplingParams(temperature=0, max_tokens=6, stop="END"))
    assert (done.text, done.finish_reason) == ("the EN", "length")


def test_streaming_never_shows_half_a_character(families):
    text = "Zoë 🐉 naïve 龙 e\u0301!"
    engine = scripted(Engine(families["llama"][1], device="cpu"), text)
    count = len(text.encode())
    pieces = list(engine.stream("x", SamplingParams(temperature=0, max_tokens=count)))
    assert all("\ufffd" not in piece for piece in pieces) and "".join(pieces) == text
    cut = SamplingParams(temperature=0, max_tokens=len("Zoë ".encode()) + 2)  # in the middle of the dragon
    assert "".join(engine.stream("x", cut)) == engine.generate("x", cut)[0].text == "Zoë \ufffd"


def test_a_sequence_at_the_models_length_ends_with_length(families):
    engine = Engine(families["llama"][1], device="cpu", max_model_len=40)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    done = engine.generate(prompts_of((39, 20)), params, progress=False)
    assert [len(d.token_ids) for d in done] == [1, 20]
    assert [d.finish_reason for d in done] == ["length", "length"]
    with pytest.raises(RequestError, match="40 tokens"):
        engine.generate(prompts_of((40,)), params)


def test_a_small_cache_bounds_the_length_and_says_so(families):
    folder = families["llama"][1]
    small = Engine(folder, device="cpu", kv_bytes=5 * BLOCK_BYTES)
    assert small.max_model_len == 64
    (done,) = small.generate(prompts_of((60,)), SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(done.token_ids) == 4 and done.finish_reason == "length"
    with pytest.raises(ConfigError, match="kv_bytes must be at least"):
        Engine(folder, device="cpu", kv_bytes=5 * BLOCK_BYTES, max_model_len=100)
    with pytest.raises(ConfigError, match="give it more with kv_bytes"):
        Engine(folder, device="cpu", kv_bytes=1000)


def test_the_default_cache_is_at_most_a_quarter_of_the_free_memory(monkeypatch):
    monkeypatch.setattr("tinyengine.kv.cache.free_bytes", lambda _: 40_000_000)
    engine = Engine("tiny", device="cpu")
    per_block = engine.cache.data.nbytes // engine.cache.num_blocks
    assert 10_000_000 - per_block < engine.cache.data.nbytes <= 10_000_000


# ---- what a request may ask for ----


@pytest.mark.parametrize(
    "prompt, complaint",
    [
        ("", "empty"),
        ([], "no tokens"),
        ([5, 300], "token id 300"),
        ([-1], "token id -1"),
        ([1, "a"], "token id 'a'"),
        ([True, 1], "token id True"),
        ([5] * 512, "512 tokens"),
        ("\udcff", "Unicode"),
        (None, "text or a list of token ids; got NoneType"),
        (5, "text or a list of token ids; got int"),
        (b"bytes", "got bytes"),
        ([1.5], "token id 1.5"),
    ],
    ids=str,
)
def test_a_bad_prompt_is_refused_and_nothing_is_queued(families, prompt, complaint):
    engine = Engine(families["llama"][1], device="cpu")
    with pytest.raises(RequestError, match=complaint):
        engine.add_request(prompt)
    with pytest.raises(RequestError, match=complaint):
        engine.stream(prompt)
    with pytest.raises(RequestError, match=f"prompt 1: .*{complaint}"):
        engine.generate([[5, 6], prompt], progress=False)
    assert not engine.has_unfinished


def test_arrays_and_tensors_are_token_ids_too(families):
    engine = Engine(families["llama"][1], device="cpu")
    short = SamplingParams(temperature=0, max_tokens=4)
    wanted = engine.generate([5, 6, 7], short)[0]
    for prompt in (np.array([5, 6, 7]), torch.tensor([5, 6, 7]), (5, 6, 7)):
        assert tokens(engine.generate(prompt, short)) == [wanted.token_ids]
    for prompts in (np.array([[5, 6, 7]] * 2), torch.tensor([[5, 6, 7]] * 2)):
        assert tokens(engine.generate(prompts, short, progress=False)) == [wanted.token_ids] * 2
    assert type(engine.generate(np.array([5, 6, 7]), short)[0].prompt_token_ids[0]) is int


@pytest.mark.parametrize("prompts", [None, 42, {"prompt": "a"}, b"\x05\x06", {5, 6}], ids=str)
def test_prompts_that_are_none_are_refused(families, prompts):
    with pytest.raises(RequestError, match="prompts must be text"):
        Engine(families["llama"][1], device="cpu").generate(prompts)


def test_what_torch_and_vllm_users_would_write_is_understood(families):
    engine = Engine(families["llama"][1], device=torch.device("cpu"), dtype=torch.float32)
    params = SamplingParams(max_tokens=2, stop=None, stop_token_ids=None)
    assert len(engine.generate((text for text in ("a", "b")), params, progress=False)) == 2


def test_params_that_are_none_of_ours_are_refused(families):
    engine = Engine(families["llama"][1], device="cpu")
    with pytest.raises(RequestError, match="must be SamplingParams"):
        engine.generate("hello", {"temperature": 1})


def test_text_that_the_model_has_no_ids_for_points_at_the_folder(families, tmp_path):
    from conftest import byte_tokenizer_json, hf_model

    hf_model("llama", vocab_size=60).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json())
    with pytest.raises(RequestError, match="do not belong together"):
        Engine(tmp_path, device="cpu").generate("zz")


def test_an_aborted_request_has_no_text_of_its_prompts(families):
    engine = Engine(families["llama"][1], device="cpu")
    half = engine.tokenizer.encode("\u00e9")[:1]  # the first byte of a character
    done = engine.abort(engine.add_request(half, SamplingParams(stop="\ufffd")))
    assert (done.text, done.token_ids, done.finish_reason) == ("", [], "abort")


def test_an_abort_stays_one_even_if_what_was_held_completes_a_stop_string(families):
    engine = scripted(Engine(families["llama"][1], device="cpu"), "\u00e9")
    request_id = engine.add_request("x", SamplingParams(temperature=0, stop="\ufffd"))
    engine.step()  # the first byte of two: held back, since half a character is never shown
    done = engine.abort(request_id)
    assert (done.finish_reason, len(done.token_ids)) == ("abort", 1)
    (full,) = engine.generate("x", SamplingParams(temperature=0, stop="\ufffd", max_tokens=1))
    assert (full.finish_reason, full.text) == ("stop", ""), "what the end makes readable is looked through as well"


def test_rows_get_as_many_logprobs_as_they_asked_for(families):
    engine = Engine(families["llama"][1], device="cpu")
    asked = [0, 2, 5, None]
    params = [SamplingParams(max_tokens=3, ignore_eos=True, logprobs=n, repetition_penalty=1.5) for n in asked]
    done = engine.generate(prompts_of((4, 5, 6, 7)), params, progress=False)
    assert [d.logprobs and [len(e.top) for e in d.logprobs] for d in done] == [[0] * 3, [2] * 3, [5] * 3, None]


def test_a_continuation_keeps_the_space_that_a_llama_2_decoder_strips(families, tmp_path):
    """Its tokenizer decodes ▁upon alone as "upon"; after "Once" it must be " upon"."""
    import shutil

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    shutil.copytree(families["llama"][1], tmp_path / "m")
    vocab = {"<unk>": 0, "▁Once": 1, "▁upon": 2, **{f"x{i}": i for i in range(3, 300)}}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "m" / "tokenizer.json"))
    engine = Engine(tmp_path / "m", device="cpu")
    original = engine._choose
    engine._choose = lambda logits, seqs: original(
        torch.nn.functional.one_hot(torch.tensor([2] * len(seqs)), 300).float(), seqs
    )
    (done,) = engine.generate("Once", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert done.text == " upon upon"


def test_logprobs_belong_to_the_tokens_they_stand_beside(families):
    model, folder = families["llama"]
    prompts = prompts_of((9, 4))
    params = [SamplingParams(temperature=1.2, seed=4, max_tokens=6, logprobs=3), SamplingParams(max_tokens=6)]
    with_them, without = Engine(folder, device="cpu").generate(prompts, params, progress=False)
    assert without.logprobs is None and len(with_them.logprobs) == 6
    with torch.no_grad():
        reference = model(torch.tensor([prompts[0] + with_them.token_ids])).logits[0].log_softmax(-1)
    for i, entry in enumerate(with_them.logprobs):
        row = reference[len(prompts[0]) - 1 + i]
        assert entry.token_id == with_them.token_ids[i]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        assert list(entry.top) == row.topk(3).indices.tolist()


def test_repetition_penalty_equals_transformers(families):
    model, folder = families["llama"]
    prompt = prompts_of((9,))[0]
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, repetition_penalty=1.4,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    params = SamplingParams(temperature=0, repetition_penalty=1.4, max_tokens=30, ignore_eos=True)
    (done,) = Engine(folder, device="cpu").generate([prompt], params)
    assert done.token_ids == out[0, len(prompt) :].tolist()


def test_generate_takes_a_lone_prompt_and_checks_the_number_of_params(families):
    engine = Engine(families["llama"][1], device="cpu")
    short = SamplingParams(temperature=0, max_tokens=2)
    assert len(engine.generate("hello", short)) == len(engine.generate([5, 6, 7], short)) == 1
    assert engine.generate([], short) == []
    with pytest.raises(RequestError, match="2 prompts and 1 sampling params"):
        engine.generate(["a", "b"], [short])


def test_a_progress_bar_shows_for_many_prompts_and_not_for_one(families, capsys):
    engine = Engine(families["llama"][1], device="cpu")
    short = SamplingParams(max_tokens=2)
    engine.generate("hello", short)
    assert capsys.readouterr().err == ""
    engine.generate(["hello", "there"], short)
    assert "2/2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, complaint",
    [
        (dict(max_num_seqs=0), "max_num_seqs"),
        (dict(block_size=-1), "block_size"),
        (dict(max_model_len=1.5), "max_model_len"),
        (dict(max_model_len=513), "above the model's own 512"),
        (dict(kv_bytes=0), "kv_bytes"),
        (dict(max_num_batched_tokens=0), "max_num_batched_tokens"),
        (dict(device="tpu"), "no device 'tpu'"),
        (dict(device="cuda:99"), "cuda:99"),
        (dict(dtype="int8"), "no dtype 'int8'"),
        (dict(model=None), "a folder or a name; got None"),
        (dict(attention="magic"), "no attention path 'magic'"),
        (dict(kv_bytes=2**62, max_num_seqs=2**40), "no room on cpu"),
    ],
    ids=str,
)
def test_a_bad_option_is_named(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Engine(**{"model": "tiny", "device": "cpu", **options})


def test_a_model_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(ConfigError, match=r"'no/such/folder'.*stories-7m.*qwen3-0\.6b"):
        Engine("no/such/folder")


# ---- on a GPU ----


@pytest.mark.cuda
def test_float32_tokens_on_cuda_equal_those_on_the_cpu():
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompts = ["Once upon a time", "Tell me a story about a red kite.", "The little dragon"]
    done = [Engine(device=d, dtype="float32").generate(prompts, params, progress=False) for d in ("cpu", "cuda")]
    assert tokens(done[0]) == tokens(done[1])


@pytest.mark.cuda
@pytest.mark.parametrize("attention", ["gather", "flash"])
def test_bfloat16_on_cuda_tells_the_same_until_a_close_call(families, attention):
    """Where the top two logits of a step are further apart than bfloat16's rounding, the tokens are equal."""
    folder = families["qwen3"][1]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=2)
    reference = Engine(folder, device="cpu").generate(prompts_of(), params, progress=False)
    engine = Engine(folder, device="cuda", dtype="bfloat16", attention=attention, max_num_batched_tokens=100)
    done = engine.generate(prompts_of(), params, progress=False)
    compared = 0
    for mine, theirs in zip(done, reference, strict=True):
        for got, wanted in zip(mine.logprobs, theirs.logprobs, strict=True):
            first, second = list(wanted.top.values())[:2]
            if got.token_id != wanted.token_id:
                assert first - second < 1.0, "a clear choice came out differently"
                break
            compared += 1
    assert compared > 100


def test_as_many_sequences_run_together_as_were_asked_for(families):
    """Each with all its tokens: the cache is sized for them, and for the block that each may ask for next."""
    for count in (2, 3, 5):
        engine = Engine(families["llama"][1], device="cpu", max_num_seqs=count, max_model_len=64)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        for prompt in prompts_of([60] * count):
            engine.add_request(prompt, params)
        engine.step()
        assert len(engine.scheduler.running) == count


def test_an_aborted_request_has_no_outputs_left(families):
    engine = Engine(families["llama"][1], device="cpu")
    first = engine.add_request([72, 105, 1], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(engine.abort(first).token_ids) > 0
    assert not engine.has_unfinished and engine.step() == []
