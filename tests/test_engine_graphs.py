"""The engine with graphs: the same tokens as without, whatever comes and goes; and what a user may ask of it."""

import gc
import json
import logging
import random

import pytest
import torch

from tinyengine import Engine, SamplingParams
from tinyengine.errors import ConfigError
from tinyengine.generate import main
from tinyengine.graphs.arena import PoolBytes
from tinyengine.graphs.meter import GraphMemory, Predictor
from tinyengine.graphs.rungs import LADDER
from tinyengine.model.checkpoint import destinations

RUNGS = [rung.name for rung in LADDER]
BLOCK_BYTES = 2 * 16 * 2 * 2 * 16 * 4  # of the preset tiny: layers, tokens, K and V, heads, head_dim, float32


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def engine_of(graphs="on", **options):
    """The preset tiny on the CPU, its weights large enough that greedy choices are clear ones."""
    engine = Engine("tiny", **{"device": "cpu", "max_num_seqs": 6, "max_model_len": 80, "graphs": graphs, **options})
    generator = torch.Generator(engine.device).manual_seed(0)
    with torch.inference_mode():
        for place in destinations(engine.params).values():
            if place.dim() == 2:
                place.normal_(0.0, 0.2, generator=generator)
    return engine


def prompt_of(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 512, (length,), generator=generator).tolist()


# Step at which it comes, tokens of the prompt, tokens of the answer: the batch grows and shrinks, and so do contexts.
REQUESTS = [
    (0, 1, 30),
    (0, 17, 4),
    (0, 40, 25),
    (3, 5, 60),
    (3, 2, 1),
    (4, 16, 12),
    (9, 30, 30),
    (20, 60, 20),
    (50, 3, 9),
]


def serve(engine, requests=REQUESTS, after_step=lambda step: None, **params):
    """Serve requests that come while others run; the token ids of each."""
    ids, tokens = [], {}
    for step in range(5000):
        for i, (when, length, count) in enumerate(requests):
            if when == step:
                ids.append(engine.add_request(prompt_of(length, i), greedy(count, **params)))
        for output in engine.step():
            tokens.setdefault(output.request_id, []).append(output.token_id)
        after_step(step)
        if step > requests[-1][0] and not engine.has_unfinished:
            break
    assert not engine.has_unfinished and engine.scheduler.allocator.num_used == 0
    return [tokens[i] for i in ids]


@pytest.fixture(scope="module")
def expected():
    """Without graphs."""
    tokens = serve(engine_of("off"))
    assert [len(row) for row in tokens] == [count for _, _, count in REQUESTS]
    assert len({token for row in tokens for token in row}) > 60, "the model must have something to say"
    return tokens


# ---- the same tokens ----


HALVES = [(graphs, 2) for graphs in ("capture", "largest-first", "on", "off")]


@pytest.mark.parametrize("graphs, microbatches", [*((graphs, 1) for graphs in (*RUNGS, "on", "off")), *HALVES])
def test_tokens_do_not_depend_on_graphs(expected, graphs, microbatches):
    engine = engine_of(graphs, microbatches=microbatches)
    assert serve(engine) == expected
    stats = engine.runner.stats
    if graphs in ("off", "eager"):
        assert stats["replays"] == stats["captures"] == 0
    else:
        assert stats["replays"] > 50 and stats["eager_steps"] == stats["failed_captures"] == 0
        assert stats["working_set"] > 5


@pytest.mark.parametrize("max_graphs", [1, 3])
@pytest.mark.parametrize("graphs", ["on", "capture"])
def test_tokens_do_not_depend_on_the_cap(expected, graphs, max_graphs, caplog):
    engine = engine_of(graphs, max_graphs=max_graphs)
    held = []
    for _ in range(2):
        assert serve(engine, after_step=lambda _: held.append(len(engine.runner.graphs))) == expected
    assert max(held) == max_graphs and engine.runner.stats["recaptures"] > 0
    advice = [r.getMessage() for r in caplog.records if f"max_graphs is {max_graphs}" in r.getMessage()]
    assert len(advice) == 1 and "would hold them so far" in advice[0], "told once"


@pytest.mark.parametrize("graphs", ["on", "capture"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_tokens_do_not_depend_on_preemption(expected, graphs, microbatches):
    engine = engine_of(graphs, microbatches=microbatches, kv_bytes=7 * BLOCK_BYTES)
    assert engine.cache.num_blocks == 7
    assert serve(engine) == expected
    assert engine.scheduler.num_preemptions > 0, "the test must have made blocks run out"


@pytest.mark.parametrize("graphs", ["off", "on", "largest-first"])
def test_an_abort_midway_changes_nothing_for_the_others(expected, graphs):
    """Its blocks are erased and go to others, and no graph writes a row of it any more."""
    engine = engine_of(graphs)
    aborted = []

    def abort(step):
        if step == 8:
            aborted.append(engine.abort(3))

    tokens = serve(engine, after_step=abort)
    assert aborted[0].finish_reason == "abort" and 0 < len(aborted[0].token_ids) < 60
    assert tokens[3] == expected[3][: len(aborted[0].token_ids)] == aborted[0].token_ids
    assert tokens[:3] + tokens[4:] == expected[:3] + expected[4:]


@pytest.mark.parametrize("options", [dict(), dict(microbatches=2), dict(max_graphs=2)], ids=str)
def test_in_500_steps_of_random_arrivals_every_token_is_the_same(options):
    dice, requests, step = random.Random(11), [], 0
    while step < 500:
        requests.append((step, dice.randint(1, 50), dice.randint(1, 29)))
        step += dice.choice((0, 1, 2, 5, 8, 20))
    steps = []
    engine = engine_of(kv_bytes=7 * BLOCK_BYTES, **options)
    with_graphs = serve(engine, requests, after_step=steps.append)
    assert with_graphs == serve(engine_of("off"), requests)
    assert len(steps) >= 500 and len(requests) > 60 and engine.runner.stats["replays"] > 400
    assert engine.scheduler.num_preemptions > 0


def test_seeded_samples_and_penalties_are_the_same():
    params = [
        SamplingParams(temperature=1.3, top_p=0.9, seed=i, repetition_penalty=1.2, max_tokens=20) for i in range(5)
    ]
    prompts = [prompt_of(length, 7) for length in (1, 5, 16, 17, 33)]
    done = [engine_of(graphs).generate(prompts, params, progress=False) for graphs in ("off", "on", "capture")]
    texts = [[completion.token_ids for completion in each] for each in done]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("graphs", ["on", "capture", "shared-logits"])
def test_temperature_0_is_the_plain_case(graphs):
    prompts, params = [prompt_of(4, 1), prompt_of(9, 2)], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    first, again = (engine_of(graphs).generate(prompts, params, progress=False) for _ in range(2))
    assert [d.token_ids for d in first] == [d.token_ids for d in again]
    assert [d.finish_reason for d in first] == ["length", "length"]


@pytest.mark.parametrize("graphs", ["on", "capture"])
@pytest.mark.parametrize("max_model_len", [17, 40, 64])
def test_a_sequence_at_the_models_length_ends_with_length(graphs, max_model_len):
    """The next step would need a position, and at 64 a block, that there is not."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    prompts = [prompt_of(max_model_len - 1, 1), prompt_of(max_model_len // 2, 2)]
    engine = engine_of(graphs, max_model_len=max_model_len)
    done = engine.generate(prompts, params, progress=False)
    plain = engine_of("off", max_model_len=max_model_len).generate(prompts, params, progress=False)
    assert [d.finish_reason for d in done] == ["length", "length"]
    assert [len(d.token_ids) for d in done] == [1, max_model_len - max_model_len // 2]
    assert [d.token_ids for d in done] == [d.token_ids for d in plain]
    assert engine.runner.stats["eager_steps"] == 0 and engine.generate([[5]], greedy(2))[0].finish_reason == "length"


# ---- what is kept ----


def floats(entries):
    return [(e.token_id, e.logprob, tuple(e.top.items())) for e in entries]


@pytest.mark.parametrize("graphs", ["capture", "shared-logits", "direct-logits"])
def test_what_was_handed_out_does_not_change_in_a_later_step(graphs):
    """Logits are a view that every replay overwrites; the engine keeps none of it (vLLM #53520)."""
    engine, outputs, seen = engine_of(graphs), [], []
    first = engine.add_request(prompt_of(5, 1), greedy(12, logprobs=4))
    engine.add_request(prompt_of(9, 2), greedy(30, logprobs=4))
    while engine.has_unfinished:
        outputs += engine.step()
        seen = seen or [(o, floats(o.completion.logprobs)) for o in outputs if o.completion and o.request_id == first]
        with torch.inference_mode():
            for captured in engine.runner.graphs.values:
                captured.step.logits.fill_(float("nan"))  # between two steps nobody reads them
    (output, before), *_ = seen
    assert floats(output.completion.logprobs) == before and len(before) == 12
    for o in outputs:
        assert type(o.token_id) is int
        for entry in o.completion.logprobs if o.completion else ():
            assert type(entry.logprob) is float and {type(v) for v in entry.top.values()} == {float}
            assert entry.logprob == max(entry.top.values()) <= 0.0
    plain = engine_of("off")
    ids = [plain.add_request(prompt_of(5, 1), greedy(12, logprobs=4)), plain.add_request(prompt_of(9, 2), greedy(30))]
    done = {o.request_id: o.completion for _ in range(40) for o in plain.step() if o.completion}
    assert [token for token, *_ in before] == done[ids[0]].token_ids
    assert [x for _, x, _ in before] == pytest.approx([e.logprob for e in done[ids[0]].logprobs], abs=1e-4)


def test_between_steps_nobody_but_the_graphs_holds_the_logits():
    engine = engine_of("direct-logits")
    engine.warmup(progress=False)
    address = engine.runner._buffers._logits.tensor.untyped_storage().data_ptr()

    def holders():
        gc.collect()
        tensors = [value for value in gc.get_objects() if type(value) is torch.Tensor and value.device.type == "cpu"]
        return sum(tensor.untyped_storage().data_ptr() == address for tensor in tensors)

    for seed in range(3):
        engine.add_request(prompt_of(5, seed), greedy(30, logprobs=2))
    before = holders()
    for _ in range(5):
        engine.step()
        assert holders() == before > 0


# ---- captures ----


def test_graphs_are_off_by_default_on_the_cpu():
    engine = Engine("tiny", device="cpu")
    engine.generate([[1, 2], [3]], greedy(3), progress=False)
    engine.warmup(progress=False)
    stats = engine.runner.stats
    assert engine.runner.rung.name == "eager" and engine.runner.keys == ()
    assert stats["captures"] == stats["replays"] == stats["pool_reserved_bytes"] == 0 and stats["eager_steps"] > 0


def test_on_is_the_last_rung_without_its_cap():
    assert engine_of("on").runner.rung.name == "lru"
    many = Engine("tiny", device="cpu", graphs="on", max_num_seqs=64)
    assert many.runner.graphs.max_graphs == len(many.runner.keys) > 16
    assert Engine("tiny", device="cpu", graphs="lru", max_num_seqs=64).runner.graphs.max_graphs == 16
    assert Engine("tiny", device="cpu", graphs="on", max_graphs=5).runner.graphs.max_graphs == 5


@pytest.mark.parametrize("graphs, captures", [("on", True), ("capture", True), ("off", False)])
@pytest.mark.parametrize("max_graphs", [None, 1, 4])
def test_warmup_captures_what_the_cap_holds_and_evicts_nothing(graphs, captures, max_graphs):
    engine = engine_of(graphs, max_graphs=max_graphs)
    engine.warmup(progress=False)
    stats = engine.runner.stats
    wanted = min(max_graphs or 10**9, len(engine.runner.keys)) if captures else 0
    assert (stats["captures"], stats["graphs"], stats["evictions"]) == (wanted, wanted, 0)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("graphs", ["on", "capture"])
def test_after_a_warmup_nothing_is_captured(expected, graphs, microbatches):
    engine = engine_of(graphs, microbatches=microbatches)
    engine.warmup(progress=False)
    before = engine.runner.stats
    assert serve(engine) == expected
    after = engine.runner.stats
    assert after["captures"] == before["captures"] > 10 and after["capture_seconds"] == before["capture_seconds"] > 0
    assert after["misses"] == before["misses"] and after["replays"] > 50
    assert after["pool_reserved_bytes"] == before["pool_reserved_bytes"] > 0


def test_warmup_shows_a_bar_with_the_pools_and_is_silent_when_asked(capsys):
    engine_of().warmup()
    err = capsys.readouterr().err
    assert "capturing" in err and "MiB" in err and "graph" in err
    engine_of().warmup(progress=False)
    assert capsys.readouterr().err == ""


def test_a_lazy_captures_latency_is_seen_in_the_stats():
    """Of the step that captures, in seconds of capture; later steps add none (vLLM #2143)."""
    engine = engine_of()
    engine.add_request(prompt_of(3, 1), greedy(8))
    seconds, captures, replays = [], [], []
    while engine.has_unfinished:
        engine.step()
        stats = engine.runner.stats
        seconds.append(stats["capture_seconds"])
        captures.append(stats["captures"])
        replays.append(stats["replays"])
    assert captures == [0] + [2] * 7, "the prompt; then the largest, for room, and the one that was asked for"
    assert seconds[0] == 0 < seconds[1] == seconds[-1]
    assert replays == list(range(8)) and seconds[1] < engine.stats.decode_seconds


def test_each_capture_and_eviction_is_logged(caplog):
    engine = engine_of(max_graphs=1)
    with caplog.at_level(logging.INFO, "tinyengine"):
        engine.generate([prompt_of(3, 1)], greedy(4))
    lines = [r.getMessage() for r in caplog.records]
    assert sum(line.startswith("captured graph (") for line in lines) == engine.runner.stats["captures"] == 2
    assert sum(line.startswith("evicted graph (6, ") for line in lines) == 1


def test_an_engine_made_in_inference_mode_captures_outside_it_too(caplog):
    with torch.inference_mode():
        engine = engine_of()
    engine.warmup(progress=False)
    assert engine.runner.stats["failed_captures"] == 0, caplog.messages


def test_dropped_graphs_come_back_when_they_are_needed(expected):
    """As when a service sleeps (vLLM #45648)."""
    engine, during = engine_of(), []

    def drop(step):
        if step == 15:
            engine.runner.drop()
            during.append(engine.runner.stats)

    assert serve(engine, after_step=drop) == expected
    assert during[0]["graphs"] == during[0]["pool_reserved_bytes"] == 0 and engine.runner.stats["graphs"] > 0


# ---- which graphs there are ----


def sizes(engine):
    return sorted({key.bucket for key in engine.runner.keys}), sorted({key.width for key in engine.runner.keys})


@pytest.mark.parametrize(
    "max_num_seqs, buckets", [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])]
)
def test_buckets_end_at_the_most_sequences_of_a_step(max_num_seqs, buckets):
    assert sizes(engine_of(max_num_seqs=max_num_seqs))[0] == buckets


@pytest.mark.parametrize(
    "max_model_len, widths", [(16, [1]), (17, [1, 2]), (80, [1, 2, 4, 5]), (512, [1, 2, 4, 8, 16, 32])]
)
def test_widths_end_at_the_longest_sequence(max_model_len, widths):
    assert sizes(engine_of(max_model_len=max_model_len))[1] == widths


def test_no_graph_is_for_more_than_the_cache_holds():
    """Three blocks serve three sequences at most, each of at most 48 tokens."""
    engine = Engine("tiny", device="cpu", graphs="on", kv_bytes=4 * BLOCK_BYTES)
    assert engine.scheduler.max_num_seqs == 3 and engine.max_model_len == 48
    assert sizes(engine) == ([1, 2, 3], [1, 2, 3])
    assert all(key.bucket * key.width <= 2 * 4 for key in engine.runner.keys)
    done = engine.generate([[5]] * 6, greedy(15), progress=False)
    assert engine.runner.stats["eager_steps"] == 0 and len({tuple(d.token_ids) for d in done}) == 1


def test_a_batch_too_ragged_for_the_graphs_of_a_small_cache_is_served_right_with_one_warning(caplog):
    """Of 13 blocks one sequence has 8 and five others have one each: as a rectangle they are more than the cache."""
    options = dict(max_num_seqs=20, max_model_len=None, kv_bytes=14 * BLOCK_BYTES)
    prompts = [prompt_of(120, 1)] + [[5 + i] for i in range(5)]
    engine, plain = engine_of(**options), engine_of("off", **options)
    with_graphs, without = (e.generate(prompts, greedy(6), progress=False) for e in (engine, plain))
    assert [d.token_ids for d in with_graphs] == [d.token_ids for d in without]
    assert engine.runner.stats["eager_steps"] > 0
    assert len([m for m in caplog.messages if "such steps run eagerly" in m]) == 1


@pytest.mark.parametrize("blocks", [3, 5, 8])
def test_whatever_a_small_cache_can_run_has_a_graph(blocks):
    engine = engine_of(max_num_seqs=20, max_model_len=None, kv_bytes=blocks * BLOCK_BYTES)
    dice = random.Random(blocks)
    longest = engine.max_model_len - 1
    requests = [(i * 3, dice.randint(1, min(60, longest)), dice.randint(1, 30)) for i in range(25)]
    tokens = serve(engine, requests)
    assert tokens == serve(engine_of("off", max_model_len=engine.max_model_len), requests)
    assert engine.runner.stats["eager_steps"] == 0


@pytest.mark.parametrize(
    "options, complaint",
    [
        (dict(graphs="nonsense"), r"no rung 'nonsense': choose off, on or one of eager, capture, .*direct-logits, lru"),
        (dict(graphs=""), "no rung ''"),
        (dict(graphs=None), "no rung None"),
        (dict(max_graphs=0), "max_graphs must be a whole number of 1 or more; got 0"),
        (dict(max_graphs=-3), "max_graphs must be a whole number of 1 or more"),
        (dict(max_graphs=2.0), "max_graphs must be a whole number"),
        (dict(max_graphs=True), "max_graphs must be a whole number"),
        (dict(microbatches=3), "microbatches must be 1 or 2; got 3"),
        (dict(microbatches=0), "microbatches must be"),
        (dict(microbatches="2"), "microbatches must be"),
    ],
    ids=str,
)
def test_a_bad_option_is_named_with_its_choices(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Engine(**{"model": "tiny", "device": "cpu", "graphs": "on", **options})


# ---- on the command line ----


@pytest.fixture
def cli(capsys):
    """Run the program in this process; exit code, stdout, stderr."""

    def run(*args):
        options = ("--model", "tiny", "--device", "cpu", "--max-tokens", "6", "--temperature", "0")
        code = main([*options, *args])
        out, err = capsys.readouterr()
        return code, out, err

    return run


CLI_OPTIONS = [
    ["--graphs", "on"],
    ["--graphs", "capture"],
    ["--graphs", "on", "--max-graphs", "1"],
    ["--graphs", "on", "--microbatches", "2"],
    ["--graphs", "off", "--max-graphs", "1"],
]


@pytest.mark.parametrize("options", CLI_OPTIONS, ids=" ".join)
def test_the_program_tells_the_same_with_graphs(cli, options):
    prompts = ("Once upon", "a", "time there was a kite", "--json", "--quiet")
    code, out, err = cli(*prompts, *options)
    assert code == 0 and err == "" and out == cli(*prompts)[1]
    assert [json.loads(line)["completion_tokens"] for line in out.splitlines()] == [6, 6, 6]
    assert cli("Once upon", *options)[1] == cli("Once upon")[1]


def test_the_line_of_statistics_counts_graphs_where_there_are_some(cli):
    assert "graphs 1 captured, 5 replays" in cli("Once", "--graphs", "capture")[2]
    assert "graphs" not in cli("Once")[2]


@pytest.mark.parametrize(
    "args, complaint",
    [
        (["--graphs", "nonsense"], "no rung 'nonsense': choose off, on or one of eager, capture"),
        (["--graphs"], "--graphs: expected one argument"),
        (["--max-graphs", "0"], "--max-graphs: must be a whole number of 1 or more"),
        (["--max-graphs", "few"], "--max-graphs: must be a whole number of 1 or more"),
        (["--microbatches", "3"], "--microbatches: invalid choice: 3 (choose from "),
        (["--microbatches", "two"], "--microbatches: invalid int value: 'two'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(cli, args, complaint):
    code, out, err = cli("Once", *args)
    assert code == 2 and out == "" and complaint in err
    assert err.startswith("tinyengine: ") and err.count("\n") == 1


# ---- on a GPU ----


@pytest.fixture
def _emptied_device():
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.cuda
def test_on_cuda_graphs_are_on_by_default(_emptied_device):
    engine = Engine("tiny", device="cuda")
    engine.generate([[1, 2], [3]], greedy(6), progress=False)
    stats = engine.runner.stats
    assert engine.runner.rung.name == "lru" and stats["replays"] == 6 and stats["failed_captures"] == 0
    assert stats["eager_steps"] == 0 and stats["max_graphs"] == len(engine.runner.keys)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [dict(), dict(microbatches=2), dict(max_graphs=2), dict(graphs="capture")], ids=str)
def test_on_cuda_float32_tokens_do_not_depend_on_graphs(options, _emptied_device):
    device = dict(device="cuda", dtype="float32", block_size=16, attention="gather")
    plain = serve(engine_of("off", **device))
    engine = engine_of(**{"graphs": "auto", **device, **options})
    assert serve(engine) == plain
    stats = engine.runner.stats
    assert stats["replays"] > 50 and stats["eager_steps"] == stats["failed_captures"] == 0


@pytest.mark.cuda
def test_on_cuda_the_cache_leaves_room_for_the_graphs(monkeypatch, _emptied_device):
    """Its bytes are known before it is sized (vLLM #11251, SGLang #1455)."""
    monkeypatch.setattr("tinyengine.kv.cache.free_bytes", lambda _: 12 << 30)
    graphs, blocks = 2 << 30, []
    for predicted in (0, graphs):
        memory = GraphMemory(1, PoolBytes(0, 0), PoolBytes(predicted, 0), 0, 0)
        monkeypatch.setattr(Predictor, "predict", lambda *_, memory=memory: memory)
        engine = Engine("qwen3-0.6b", device="cuda")
        blocks.append(engine.cache.num_blocks)
        per_block = engine.cache.data.nbytes // engine.cache.num_blocks
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    assert abs(blocks[0] - blocks[1] - graphs // per_block) <= 1


@pytest.mark.cuda
def test_on_cuda_with_the_default_cache_all_graphs_still_fit(_emptied_device):
    engine = Engine("qwen3-0.6b", device="cuda", max_model_len=2048)
    engine.warmup(progress=False)
    prompts = [[5 + i] * (1 + 7 * i) for i in range(256)]
    done = engine.generate(prompts, greedy(20), progress=False)
    stats = engine.runner.stats
    assert stats["failed_captures"] == stats["eager_steps"] == 0 and stats["graphs"] == len(engine.runner.keys)
    assert all(len(d.token_ids) == 20 and d.error is None for d in done)
    free, _ = torch.cuda.mem_get_info()
    assert free > 0
    plan_bytes = stats["pool_reserved_bytes"]
    layout_bytes = engine.cache.data.nbytes
    assert torch.cuda.memory_reserved() >= layout_bytes + plan_bytes
