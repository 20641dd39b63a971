"""The graph runner on both backends: right tokens in any order, addresses, memory, eviction, fallback and failure.

Every test that takes `kind` runs on the tape, and on CUDA where there is a device.
"""

import dataclasses
import gc
import logging
import random
import weakref

import pytest
import torch

from tinyengine.errors import CaptureError
from tinyengine.graphs.arena import SMALL_SEGMENT, round_size
from tinyengine.graphs.cuda import CudaBackend
from tinyengine.graphs.meter import Predictor, predicted
from tinyengine.graphs.recorder import branch_stream
from tinyengine.graphs.rungs import LADDER, GraphPlan, Rung, find_rung
from tinyengine.graphs.runner import GraphKey, GraphRunner
from tinyengine.graphs.static import pad
from tinyengine.graphs.tape import TapeBackend, TapePool
from tinyengine.kv.blocks import BlockAllocator, blocks_needed, pad_block_tables
from tinyengine.kv.cache import KVCache, KVLayout
from tinyengine.model.attention import FlashAttention, GatherAttention
from tinyengine.model.checkpoint import destinations, random_params
from tinyengine.model.config import PRESETS
from tinyengine.model.inputs import DecodeInputs
from tinyengine.model.transformer import float_logits, forward
from tinyengine.tolerance import TOLERANCE, relative_error

CONFIG = PRESETS["tiny"]
BLOCK, MOST_SEQS, MOST_WIDTH = 16, 12, 6
RUNGS = [rung.name for rung in LADDER[1:]]
ONE_OF_EACH_LOGITS = ["capture", "largest-first", "shared-logits", "direct-logits"]
NAN = float("nan")
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)


@pytest.fixture(params=["tape", CUDA])
def kind(request):
    return request.param


@pytest.fixture(autouse=True)
def _nothing_left_on_the_device():
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Scene:
    """A runner over a small random model and a cache full of random numbers, and batches to send through it."""

    def __init__(
        self,
        kind,
        rung="direct-logits",
        *,
        buckets=(1, 2, 4, 8),
        widths=(1, 2, 4),
        config=CONFIG,
        dtype=torch.float32,
        block_size=BLOCK,
        path="gather",
        attention=None,
        **plan,
    ):
        self.kind, self.config, self.block_size = kind, config, block_size
        self.device = torch.device("cpu" if kind == "tape" else "cuda")
        self.backend = TapeBackend() if kind == "tape" else CudaBackend(self.device)
        self.attention = attention or (GatherAttention() if path == "gather" else FlashAttention(config))
        self.generator, self.random = torch.Generator().manual_seed(0), random.Random(0)
        params = random_params(config, self.device, dtype, MOST_WIDTH * block_size)
        for place in destinations(params).values():
            if place.dim() == 2:  # large enough that greedy choices are clear ones
                place.copy_(torch.randn(place.shape, generator=self.generator) * 0.2)
        self.layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)
        cache = self.random_cache()
        self.changes = []
        rung = find_rung(rung) if isinstance(rung, str) else rung
        self.plan = GraphPlan(rung, buckets, widths, **plan)
        self.runner = GraphRunner(params, cache, self.attention, self.backend, self.plan, self.changes.append)

    def random_cache(self):
        cache = KVCache(self.layout, MOST_SEQS * MOST_WIDTH + 1, self.device)
        cache.data.copy_(torch.randn(cache.data.shape, generator=self.generator))
        return cache

    def batch(self, n, width):
        """n sequences in blocks of their own, at random; the longest needs exactly `width` blocks."""
        g, size = self.generator, self.block_size
        lens = torch.randint(1, width * size + 1, (n,), generator=g)
        lens[0] = torch.randint((width - 1) * size + 1, width * size + 1, (), generator=g)
        blocks = (torch.randperm(MOST_SEQS * MOST_WIDTH, generator=g) + 1)[: n * width].view(n, width)
        last = blocks.gather(1, ((lens - 1) // size).unsqueeze(1))[:, 0]
        return DecodeInputs(
            input_ids=torch.randint(0, self.config.vocab_size, (n,), generator=g),
            positions=lens - 1,
            slot_mapping=last * size + (lens - 1) % size,
            block_table=blocks.masked_fill(torch.arange(width) * size >= lens.unsqueeze(1), 0).int(),
            context_lens=lens.int(),
        )

    def every_batch(self):
        """A batch of every size and width that the plan's graphs hold, in random order."""
        pairs = [(n, w) for n in range(1, max(self.plan.buckets) + 1) for w in range(1, max(self.plan.widths) + 1)]
        self.random.shuffle(pairs)
        return [self.batch(*pair) for pair in pairs]

    def key_of(self, inputs):
        return self.runner.key_for(*inputs.block_table.shape)

    @torch.inference_mode()
    def reference(self, inputs):
        """The step without runner, padding or graph."""
        runner = self.runner
        return float_logits(runner.params, forward(runner.params, inputs.to(self.device), self.attention, runner.cache))

    @torch.inference_mode()
    def poison(self):
        """NaN into what every graph writes: a replay that writes nothing leaves it there."""
        for captured in self.runner.graphs.values:
            captured.step.logits.fill_(NAN)

    def check(self, inputs):
        """A replay writes eager's logits: on the tape to the bit, else within the tolerance; tokens are equal.

        In halves, products of fewer rows may sum in another order.
        """
        key, replays = self.key_of(inputs), self.runner.replays
        self.poison()
        got = self.runner.decode(inputs)
        want = self.runner.eager(inputs, key)
        assert self.runner.replays == replays + 1, "it came from a graph"
        assert got.isfinite().all(), "a replay wrote nothing"
        assert got.shape == want.shape and got.dtype == want.dtype == torch.float32
        assert got.equal(want) if self.kind == "tape" and self.plan.microbatches == 1 else near(got, want)
        assert tokens(got).equal(tokens(self.reference(inputs)))

    def pointers(self):
        """The addresses of each graph's inputs and logits."""
        graphs = self.runner.graphs
        return {
            key: [t.data_ptr() for t in (*captured.inputs.view(key.bucket, key.width).tensors, captured.step.logits)]
            for key, captured in zip(graphs.keys, graphs.values, strict=True)
        }

    @torch.inference_mode()
    def garble(self):
        """Garbage of the worst kind into the static inputs: every row points at a block that may be somebody's."""
        for tensor in self.runner.static_tensors:
            if not tensor.dtype.is_floating_point:
                tensor.fill_(self.block_size + 1 if tensor.dtype == torch.int64 else 1)  # a slot of block 1


def tokens(logits):
    return logits.argmax(-1).cpu()


def near(got, want, dtype=torch.float32):
    return relative_error(got, want) <= TOLERANCE[dtype]


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "tinyengine" in r.name]


def meta_runner(scene, on_change=None):
    """What the scene's runner would take, by arithmetic alone."""
    return Predictor(scene.config, scene.layout, scene.attention).runner(scene.plan, on_change)


def reserved_on_device():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


# ---- replay equals eager ----


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("rung", RUNGS)
def test_a_replay_equals_eager_for_every_batch_and_width_in_any_order(kind, rung, microbatches):
    scene = Scene(kind, rung, buckets=(1, 2, 5), widths=(1, 3), microbatches=microbatches)
    batches = scene.every_batch()
    assert len(batches) == 15
    for inputs in batches:
        scene.check(inputs)
    assert set(scene.runner.graphs.keys) == set(scene.runner.keys) and scene.runner.eager_steps == 0


@pytest.mark.parametrize("rung", ["capture", "direct-logits"])
def test_a_replay_stores_the_keys_and_values_that_eager_stores(kind, rung):
    scene = Scene(kind, rung, widths=(2,))
    for n in (5, 2, 8, 1):
        inputs, cache = scene.batch(n, 2), scene.runner.cache.data
        before = cache.clone()
        scene.runner.decode(inputs)
        replayed = cache.clone()
        cache.copy_(before)
        scene.reference(inputs)
        assert near(replayed[:, 1:], cache[:, 1:]) and not replayed[:, 1:].equal(before[:, 1:])


def test_without_graphs_every_step_is_eager_and_nobody_is_warned(kind, caplog):
    scene = Scene(kind, "eager")
    for inputs in (scene.batch(3, 2), scene.batch(12, 6)):
        assert near(scene.runner.decode(inputs), scene.reference(inputs))
    assert scene.runner.eager_steps == 2 and not len(scene.runner.graphs) and not warnings_of(caplog)


@pytest.mark.cuda
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rung", ONE_OF_EACH_LOGITS)
def test_in_bfloat16_with_flash_the_tokens_are_equal_wherever_the_choice_is_clear(rung, head_dim, microbatches):
    config = dataclasses.replace(CONFIG, head_dim=head_dim, dtype="bfloat16")
    options = dict(config=config, dtype=torch.bfloat16, block_size=256, path="flash", microbatches=microbatches)
    scene, clear, total = Scene("cuda", rung, **options), 0, 0
    for inputs in scene.every_batch():
        scene.poison()
        got = scene.runner.decode(inputs)
        want = scene.runner.eager(inputs, scene.key_of(inputs))
        assert near(got, want, torch.bfloat16)
        first, second = want.topk(2).values.unbind(1)
        sure = first - second > 2 * TOLERANCE[torch.bfloat16] * want.abs().amax(1)
        assert got.argmax(-1)[sure].equal(want.argmax(-1)[sure])
        clear, total = clear + int(sure.sum()), total + len(sure)
    assert clear > total / 2, "the test must have compared something"
    assert set(scene.runner.graphs.keys) == set(scene.runner.keys) and scene.runner.eager_steps == 0


# ---- a replay that does nothing ----


class Nothing:
    """A graph whose replay does nothing."""

    def replay(self):
        pass

    def reset(self):
        pass


@pytest.mark.parametrize("rung", ONE_OF_EACH_LOGITS)
def test_a_replay_that_writes_nothing_is_noticed(kind, rung):
    scene = Scene(kind, rung, widths=(2,))
    scene.runner.warmup()
    for n in (8, 1, 3):
        scene.check(scene.batch(n, 2))
    inputs = scene.batch(3, 2)
    captured = scene.runner.find(scene.key_of(inputs))
    kept, captured.step.graph = captured.step.graph, Nothing()
    with pytest.raises(AssertionError, match="wrote nothing"):
        scene.check(inputs)
    captured.step.graph = kept
    scene.check(inputs)


# ---- padded rows ----


def test_a_padded_row_is_one_token_of_context_in_the_null_block():
    inputs = pad(Scene("tape").batch(3, 2), 5, 4)
    assert [t.shape for t in inputs.tensors] == [(5,), (5,), (5,), (5, 4), (5,)]
    assert inputs.slot_mapping[3:].tolist() == inputs.positions[3:].tolist() == [0, 0]
    assert not inputs.block_table[3:].any() and not inputs.block_table[:, 2:].any()
    assert inputs.context_lens[3:].tolist() == [1, 1]


@pytest.mark.parametrize("rung", ["capture", "direct-logits"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_writes_its_own_slots_and_the_null_block_and_nothing_else(kind, rung, microbatches):
    """Also when the static inputs still hold a larger batch, or garbage that points at living blocks."""
    scene = Scene(kind, rung, buckets=(4, 8), microbatches=microbatches)
    scene.runner.warmup()
    cache = scene.runner.cache.data
    for n, width in ((8, 4), (3, 1), (5, 4), (1, 2), (6, 1)):
        inputs = scene.batch(n, width)
        scene.garble()
        before = cache.clone()
        scene.poison()
        got = tokens(scene.runner.decode(inputs))
        changed = (cache != before).flatten(3).any(-1).any(0)  # [blocks, block_size]
        changed[0] = False
        assert changed.flatten().nonzero()[:, 0].cpu().equal(inputs.slot_mapping.sort().values)
        assert got.equal(tokens(scene.reference(inputs)))


@pytest.mark.parametrize("rung", ["capture", "direct-logits"])
def test_a_capture_writes_the_null_block_at_most(kind, rung):
    scene = Scene(kind, rung)
    scene.runner.decode(scene.batch(8, 4))
    scene.garble()
    before = scene.runner.cache.data.clone()
    for key in scene.runner.keys:
        scene.runner.find(key)
    assert scene.runner.cache.data[:, 1:].equal(before[:, 1:])


# ---- addresses ----


@pytest.mark.parametrize("rung", RUNGS)
def test_static_addresses_never_change(kind, rung):
    scene, seen = Scene(kind, rung, buckets=(1, 3, 6), widths=(1, 3)), {}
    for inputs in scene.every_batch() + scene.every_batch():
        scene.runner.decode(inputs)
        now = scene.pointers()
        assert seen.items() <= now.items()
        seen = now
    assert len(seen) == 6
    shared = scene.plan.rung.shared_inputs, scene.plan.rung.logits != "own"
    first = [{pointers[0] for pointers in seen.values()}, {pointers[-1] for pointers in seen.values()}]
    assert [len(addresses) for addresses in first] == [1 if is_shared else 6 for is_shared in shared]


def test_weights_changed_in_place_are_seen(kind):
    scene = Scene(kind)
    inputs = scene.batch(3, 2)
    before = scene.runner.decode(inputs).clone()
    for weight in (scene.runner.params.layers[0].down, scene.runner.params.embed, scene.runner.params.lm_head):
        weight.mul_(1.5)
        scene.check(inputs)
        assert not near(scene.runner.decode(inputs), before)
    scene.runner.cache.data.mul_(0.5)
    scene.check(inputs)


def replaced_params(scene):
    params = scene.runner.params
    scene.runner.params = dataclasses.replace(params, embed=params.embed.clone().mul_(-2))


def replaced_layer(scene):
    layers = list(scene.runner.params.layers)
    layers[1] = dataclasses.replace(layers[1], gate_up=layers[1].gate_up.clone().mul_(-2))
    scene.runner.params = dataclasses.replace(scene.runner.params, layers=tuple(layers))


def replaced_storage(scene):
    down = scene.runner.params.layers[0].down
    down.data = down.data.clone().mul_(-2)


def replaced_cache(scene):
    scene.runner.cache = scene.random_cache()


def replaced_cache_tensor(scene):
    cache = scene.runner.cache
    cache.data = torch.randn_like(cache.data)
    cache.layers = cache.data.unbind(0)


REPLACEMENTS = [replaced_params, replaced_layer, replaced_storage, replaced_cache, replaced_cache_tensor]


@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda f: f.__name__)
def test_what_was_replaced_is_refused_until_the_graphs_are_dropped(kind, replace):
    scene = Scene(kind)
    inputs = scene.batch(3, 2)
    before = scene.runner.decode(inputs).clone()
    replace(scene)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"has moved.*copy_\(\).*drop the graphs"):
            scene.runner.decode(inputs)
    scene.runner.drop()
    scene.check(inputs)
    assert not near(scene.runner.decode(inputs), before), "the new numbers must have been used"
    scene.check(scene.batch(7, 4))


def test_a_graph_asked_for_while_something_is_replaced_does_not_outlive_the_mistake(kind):
    """The step is refused; when the old weights are put back, no graph may read those that were there in between."""
    scene = Scene(kind)
    inputs, other, params = scene.batch(3, 2), scene.batch(8, 4), scene.runner.params
    scene.check(inputs)
    replaced_params(scene)
    for batch in (scene.batch(1, 1), inputs, other):
        with pytest.raises(CaptureError, match="has moved"):
            scene.runner.decode(batch)
    scene.runner.params = params
    for batch in (scene.batch(1, 1), inputs, other):
        scene.check(batch)


def test_before_the_first_capture_anything_may_be_replaced(kind):
    scene = Scene(kind)
    replaced_params(scene)
    replaced_cache(scene)
    scene.check(scene.batch(3, 2))


# ---- the key rule ----


def test_a_key_is_bucket_width_path_and_microbatches():
    assert GraphKey._fields == ("bucket", "width", "path", "microbatches")
    one, two = Scene("tape"), Scene("tape", microbatches=2)
    assert len(set(one.runner.keys)) == len(one.runner.keys) == 12
    assert {key.microbatches for key in one.runner.keys} == {1}
    assert all(key.microbatches == min(2, key.bucket) for key in two.runner.keys)
    other = GatherAttention()
    other.name = "another"
    assert not set(Scene("tape", attention=other).runner.keys) & set(one.runner.keys)


def test_nothing_that_changes_every_token_is_in_the_key(kind):
    scene = Scene(kind, buckets=(1, 2, 4), widths=(1, 2, 4))
    n, used = 1, set()
    for _ in range(500):
        n = min(4, max(1, n + scene.random.choice((-1, 0, 1))))
        inputs = scene.batch(n, scene.random.randint(1, 4))
        used.add(scene.key_of(inputs))
        scene.runner.decode(inputs)
    stats = scene.runner.stats
    assert used == set(scene.runner.keys) and stats["captures"] == len(scene.runner.keys) == 9
    assert stats["replays"] == 500 and stats["recaptures"] == stats["evictions"] == stats["eager_steps"] == 0


@pytest.mark.parametrize("buckets", [(8, 1, 4, 2), (2, 8, 1, 4), (1, 2, 4, 8)], ids=str)
@pytest.mark.parametrize("widths", [(4, 1, 2), (1, 2, 4)], ids=str)
def test_the_smallest_graph_that_fits_is_chosen_in_whatever_order_they_stand(buckets, widths):
    scene = Scene("tape", buckets=buckets, widths=widths)
    chosen = [tuple(scene.runner.key_for(n, w)[:2]) for n, w in ((1, 1), (2, 2), (3, 3), (5, 1), (8, 4))]
    assert chosen == [(1, 1), (2, 2), (4, 4), (8, 1), (8, 4)]
    inputs = scene.batch(3, 2)
    scene.check(inputs)
    assert scene.runner.graphs.keys[-1] == scene.key_of(inputs)


# ---- the view rule ----


@pytest.mark.parametrize("rung", ONE_OF_EACH_LOGITS)
def test_logits_are_a_view_until_the_next_step(kind, rung):
    scene = Scene(kind, rung)
    first, second = scene.batch(3, 2), scene.batch(4, 2)
    kept = scene.runner.decode(first)
    cloned, expected = kept.clone(), scene.reference(first)
    scene.runner.decode(second)
    assert not kept.equal(cloned) and near(cloned, expected)
    kept = scene.runner.decode(first)
    cloned = kept.clone()
    scene.runner.decode(scene.batch(1, 1))  # of another graph
    assert kept[1:].equal(cloned[1:]), "a replay writes the rows of its own bucket alone"
    assert kept[:1].equal(cloned[:1]) == (scene.plan.rung.logits == "own")


def test_padded_rows_are_not_handed_out(kind):
    scene = Scene(kind)
    for n in (1, 3, 5, 8):
        assert scene.runner.decode(scene.batch(n, 1)).shape == (n, CONFIG.vocab_size)


# ---- the fallback rule ----


def test_what_no_graph_holds_runs_eagerly_with_one_warning_of_each_kind(kind, caplog):
    scene = Scene(kind, buckets=(2, 8), widths=(1, 4), max_blocks=8)
    assert [key[:2] for key in scene.runner.keys] == [(8, 1), (2, 4), (2, 1)]
    too_many, too_wide, too_much = scene.batch(9, 1), scene.batch(2, 5), scene.batch(3, 2)
    for inputs in (too_many, too_wide, too_much) * 3:
        logits = scene.runner.decode(inputs)
        one_by_one = [scene.reference(inputs.rows(i, i + 1)) for i in range(len(inputs.input_ids))]
        assert near(logits, torch.cat(one_by_one)) and tokens(logits).equal(tokens(torch.cat(one_by_one)))
    assert scene.runner.eager_steps == 9 and scene.runner.stats["captures"] == 0
    batch, width = warnings_of(caplog)
    assert "batch of 9" in batch and "largest bucket, 8" in batch and "eagerly" in batch
    assert f"beyond the {4 * BLOCK} tokens" in width and "eagerly" in width
    scene.check(scene.batch(8, 1))
    scene.check(scene.batch(2, 4))
    assert len(warnings_of(caplog)) == 2


def test_a_plan_that_leaves_no_graph_serves_eagerly(kind, caplog):
    scene = Scene(kind, max_blocks=0)
    scene.runner.warmup()
    inputs = scene.batch(3, 2)
    assert near(scene.runner.decode(inputs), scene.reference(inputs)) and scene.runner.eager_steps == 1
    assert len(warnings_of(caplog)) == 1


# ---- a capture that fails ----


def raises_a_runtime_error(q):
    raise RuntimeError("no luck")


def divides_by_zero(q):
    return 1 / 0


def reads_a_value(q):
    return q.sum().item()


def masks(q):
    return q[q > 0]


FAULTS = {
    raises_a_runtime_error: ["no luck"],
    divides_by_zero: ["division by zero"],
    reads_a_value: ["cannot be captured", "test_runner.py", "q.sum().item()"],
    masks: ["index", "test_runner.py", "q[q > 0]"],
}


def arm(scene, monkeypatch, fault):
    """From now on captures, and nothing else, meet the fault. The list grows by one with each that is tried."""
    capture, decode, tried = scene.backend.capture, scene.attention.decode, []

    def faulty(q, *rest):
        fault(q)
        return decode(q, *rest)

    def faulty_capture(fn, pool, stream):
        tried.append(pool)
        with monkeypatch.context() as patch:
            patch.setattr(scene.attention, "decode", faulty)
            return capture(fn, pool, stream)

    monkeypatch.setattr(scene.backend, "capture", faulty_capture)
    return tried


def serve_some(scene):
    """Steps of several graphs, each right however it is run."""
    for n, width in ((3, 2), (8, 4), (3, 2), (1, 1), (8, 3)):
        inputs = scene.batch(n, width)
        assert tokens(scene.runner.decode(inputs)).equal(tokens(scene.reference(inputs)))


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_capture_that_fails_leaves_eager_steps_one_warning_and_no_bytes(
    kind, fault, microbatches, monkeypatch, caplog
):
    scene = Scene(kind, microbatches=microbatches)
    if kind == "cuda":  # what libraries allocate at their first use is no graph's
        scene.runner.warmup()
        scene.runner.drop()
        serve_some(scene)
        scene.runner.drop()
        before, served = reserved_on_device(), scene.runner.stats["captures"]
    else:
        served = 0
    tried = arm(scene, monkeypatch, fault)
    serve_some(scene)
    keys = len({scene.runner.keys[0], *map(lambda pair: scene.runner.key_for(*pair), ((3, 2), (8, 4), (1, 1)))})
    assert len(tried) == keys == scene.runner.stats["failed_captures"], "none is tried again"
    assert scene.runner.stats["captures"] == served and not len(scene.runner.graphs)
    assert scene.runner.eager_steps == 5
    (warning,) = warnings_of(caplog)
    assert all(
        word in warning for word in (*FAULTS[fault], f"capture of graph (8, 4, 'gather', {microbatches})", "eagerly")
    )
    if kind == "cuda":
        assert reserved_on_device() == before
    else:
        assert [scene.backend.pool_bytes(pool).live for pool in tried] == [0] * keys
        assert [pool.graphs for pool in tried] == [0] * keys
    monkeypatch.undo()
    scene.runner.drop()
    scene.check(scene.batch(3, 2))


@pytest.mark.parametrize("rung", ONE_OF_EACH_LOGITS)
def test_a_capture_that_fails_costs_nobody_a_graph_and_the_pool_nothing(kind, rung, monkeypatch):
    scene = Scene(kind, rung, buckets=(2, 8), widths=(2,), max_graphs=1)
    large, small = scene.batch(8, 2), scene.batch(2, 2)
    if rung == "capture":
        scene.runner.find(scene.key_of(large))  # else it comes first by itself
    scene.check(large)
    held, before = scene.runner.graphs.keys, scene.runner.pool_bytes
    arm(scene, monkeypatch, raises_a_runtime_error)
    assert tokens(scene.runner.decode(small)).equal(tokens(scene.reference(small)))
    gc.collect()
    assert scene.runner.graphs.keys == held and scene.runner.pool_bytes == before
    assert scene.runner.stats["evictions"] == 0
    scene.check(large)


def test_ctrl_c_within_a_capture_is_no_failure(kind, monkeypatch, caplog):
    def pressed(q):
        raise KeyboardInterrupt

    scene = Scene(kind)
    inputs = scene.batch(3, 2)
    arm(scene, monkeypatch, pressed)
    with pytest.raises(KeyboardInterrupt):
        scene.runner.decode(inputs)
    monkeypatch.undo()
    scene.check(inputs)
    assert scene.runner.stats["failed_captures"] == 0 and not warnings_of(caplog)


@pytest.mark.cuda
def test_a_capture_that_cuda_breaks_off_leaves_a_runner_that_serves(monkeypatch, caplog):
    scene = Scene("cuda")
    scene.runner.warmup()
    serve_some(scene)
    scene.runner.drop()
    serve_some(scene)
    scene.runner.drop()
    before = reserved_on_device()
    tried = arm(scene, monkeypatch, lambda q: torch.cuda.synchronize())
    serve_some(scene)
    assert tried and len(warnings_of(caplog)) == 1 and not len(scene.runner.graphs)
    leaked = reserved_on_device() - before
    monkeypatch.undo()
    scene.runner.drop()
    serve_some(scene)
    assert len(scene.runner.graphs), "captures work again"
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert leaked == 0 or (release < (2, 14) and leaked <= 20 * 2**20 * len(tried)), f"{leaked:,} bytes leaked"


# ---- bytes ----

ODD_VOCAB = dataclasses.replace(CONFIG, vocab_size=509)  # so that rounding shows
BUCKETS = (1, 2, 3, 7)


def rounded(*sizes):
    return sum(map(round_size, sizes))


def input_bytes(rows, width):
    """Three int64 and an int32 a row, and the row's block table, in one buffer of whole int64."""
    return rounded(8 * (3 * rows + -(-rows * (1 + width) // 2)))


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("rung", RUNGS)
def test_live_bytes_are_the_closed_forms(kind, rung, microbatches):
    options = dict(buckets=BUCKETS, widths=(4,), table_width=33, config=ODD_VOCAB, microbatches=microbatches)
    scene = Scene(kind, rung, **options)
    scene.runner.warmup()
    largest = max(BUCKETS)
    logits = {bucket: bucket * 509 * 4 for bucket in BUCKETS}
    measures = scene.plan.rung
    own_logits = measures.logits == "own"
    statics = input_bytes(largest, 33) if measures.shared_inputs else sum(input_bytes(b, 33) for b in BUCKETS)
    statics += 0 if own_logits else rounded(logits[largest])
    assert rounded(*(t.untyped_storage().nbytes() for t in scene.runner.static_tensors)) == statics
    if kind == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # one lies in each pool of a stream that was not warmed up
        assert scene.backend.static_bytes.live == statics
    assert scene.runner.pool_bytes.live == (rounded(*logits.values()) if own_logits else 0)


LARGER = dataclasses.replace(CONFIG, vocab_size=8192, hidden_size=128, intermediate_size=512)


def shuffled(scene, seed):
    keys = list(scene.runner.keys)
    random.Random(seed).shuffle(keys)
    return keys


@pytest.mark.parametrize("microbatches, smallest", [(1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("rung", ["shared-logits", "direct-logits"])
def test_the_pool_does_not_grow_after_the_first_capture_in_any_order(kind, rung, microbatches, smallest):
    """But for a batch of one row where others are halved: it runs on a stream on which the first took nothing."""
    options = dict(buckets=(smallest, 3, 17, 64), widths=(1, 4), config=LARGER, microbatches=microbatches)
    scene = Scene(kind, rung, **options)
    for key in shuffled(scene, 0):
        scene.runner.find(key)
    reserved = {change.key[:2]: change.after.reserved for change in scene.changes}
    grown = max(reserved.values()) - scene.changes[0].after.reserved
    assert len(reserved) == 8 and grown == (SMALL_SEGMENT if (microbatches, smallest) == (2, 1) else 0), reserved


@pytest.mark.parametrize("buckets, widths", [((1, 8, 96, 128, 160, 256), (4,)), ((1, 8, 96, 256), (1, 2, 4))], ids=str)
@pytest.mark.parametrize("preset", ["qwen3-0.6b", "llama-3.2-1b", "glm-4.5-air-vocab"])
def test_by_arithmetic_a_large_models_pool_does_not_grow_either(preset, buckets, widths):
    """Some of these need small segments where the first capture has none: for fewer rows, or for a narrower table."""
    config = dataclasses.replace(PRESETS[preset], num_layers=2)
    layout = KVLayout(2, config.num_kv_heads, config.head_dim, 256, torch.bfloat16)
    predictor = Predictor(config, layout, FlashAttention(config))
    for rung in ("shared-logits", "direct-logits"):
        plan, changes = GraphPlan(find_rung(rung), buckets, widths, max_graphs=100), []
        runner = predictor.runner(plan, changes.append)
        for key in random.Random(rung).sample(runner.keys, len(runner.keys)):
            runner.find(key)
        reserved = {change.key[:2]: change.after.reserved for change in changes}
        grown = max(reserved.values()) - changes[0].after.reserved
        assert len(reserved) == len(runner.keys) and grown <= SMALL_SEGMENT * (len(widths) - 1), reserved


@pytest.mark.parametrize("rung", ["shared-pool", "largest-first"])
def test_what_grows_otherwise_is_what_the_ladder_says(kind, rung):
    """Smallest first grows; largest first with logits of each graph's own grows by them, and only in their segments."""
    scene = Scene(kind, rung, buckets=(1, 2, 17, 64), widths=(4,), config=LARGER)
    scene.runner.warmup()
    reserved = [change.after.reserved for change in scene.changes]
    assert reserved == sorted(reserved)
    if rung == "shared-pool":
        assert reserved[-1] > reserved[0]
    else:
        assert scene.runner.pool_bytes.live == sum(bucket * 8192 * 4 for bucket in (1, 2, 17, 64))


@pytest.mark.parametrize(
    "microbatches, rung", [*((1, rung) for rung in (*ONE_OF_EACH_LOGITS, "shared-pool")), (2, "lru")]
)
def test_the_tape_takes_what_arithmetic_predicts_capture_by_capture(rung, microbatches):
    options = dict(buckets=(1, 3, 64), widths=(1, 4), config=LARGER, max_graphs=3, microbatches=microbatches)
    scene, changes = Scene("tape", rung, **options), []
    meta = meta_runner(scene, changes.append)
    for key in (*shuffled(scene, 1), *shuffled(scene, 2)[:4]):
        scene.runner.find(key)
        meta.find(key)
    mine, theirs = ([(c.what, c.key, c.before, c.after) for c in found] for found in (scene.changes, changes))
    assert len(mine) > 9 and mine == theirs


@pytest.mark.cuda
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("rung", RUNGS[1:])  # those that capture on a warmed-up stream: no workspace in a pool
def test_the_device_takes_what_arithmetic_predicts_capture_by_capture(rung, microbatches):
    config = dataclasses.replace(LARGER, head_dim=64, dtype="bfloat16")
    options = dict(config=config, dtype=torch.bfloat16, block_size=256, path="flash", microbatches=microbatches)
    scene, changes = Scene("cuda", rung, buckets=(1, 2, 3, 17, 64), widths=(1, 4), **options), []
    scene.runner.warmup()
    meta = meta_runner(scene, changes.append)
    meta.warmup()
    measured = [(change.key, change.after.reserved, change.after.live) for change in scene.changes]
    assert measured == [(change.key, change.after.reserved, change.after.live) for change in changes]
    assert len(measured) == 10 and scene.backend.static_bytes == predicted(meta).static


# ---- nothing in flight is disturbed ----


@pytest.mark.cuda
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("max_graphs", [None, 1])
def test_on_a_stalled_stream_neither_new_inputs_nor_an_eviction_change_a_token(max_graphs, pinned):
    scene = Scene("cuda", buckets=(2, 8), widths=(2,), max_graphs=max_graphs)
    scene.runner.warmup()
    batches, cache = [scene.batch(n, 2) for n in (8, 2, 7, 1, 8, 2)], scene.runner.cache.data
    before, results = cache.clone(), []
    expected = [tokens(scene.reference(inputs)) for inputs in batches]
    cache.copy_(before)
    torch.cuda.synchronize()
    for inputs in batches:
        staged = DecodeInputs(*(t.pin_memory() if pinned else t.clone() for t in inputs.tensors))
        torch.cuda._sleep(int(2e8))
        results.append(scene.runner.decode(staged).clone())
        other = scene.batch(len(inputs.input_ids), 2)
        staged.copy_(other)  # the host is free to use its buffers again
    assert all(tokens(got).equal(want) for got, want in zip(results, expected, strict=True))
    assert scene.runner.replays == 6 and scene.runner.stats["evictions"] == (5 if max_graphs else 0)


@pytest.mark.parametrize("rung", ONE_OF_EACH_LOGITS)
def test_a_graph_that_goes_takes_no_result_with_it(kind, rung):
    """Logits are valid until the next step; what was cloned before outlives the graph."""
    scene = Scene(kind, rung, buckets=(2, 8), widths=(2,), max_graphs=1)
    for n in (8, 2, 7, 1):
        inputs = scene.batch(n, 2)
        if kind == "cuda":
            torch.cuda._sleep(int(5e7))
        got = scene.runner.decode(inputs).clone()
        scene.runner.find(scene.runner.key(2 if n > 2 else 8, 2))  # evicts the one that is in flight
        assert scene.key_of(inputs) not in scene.runner.graphs
        assert tokens(got).equal(tokens(scene.reference(inputs)))


# ---- the least recently used goes ----


@pytest.mark.parametrize("rung", ONE_OF_EACH_LOGITS)
@pytest.mark.parametrize("cap", [1, 2])
def test_a_cap_below_the_working_set_gives_right_tokens_and_is_told(kind, rung, cap, caplog):
    scene = Scene(kind, rung, widths=(2,), buckets=(1, 2, 4), max_graphs=cap)
    for n in (4, 2, 1) * 4:
        scene.check(scene.batch(n, 2))
        assert len(scene.runner.graphs) <= cap
    stats = scene.runner.stats
    assert (stats["captures"], stats["recaptures"], stats["evictions"]) == (12, 9, 12 - cap)
    assert stats["working_set"] == 3 and stats["replays"] == 12 and stats["eager_steps"] == 0
    (warning,) = warnings_of(caplog)
    assert f"max_graphs is {cap}" in warning and "max_graphs=3 would hold" in warning
    evicted = [change for change in scene.changes if change.what == "evicted"]
    assert len(evicted) == stats["evictions"] and len(scene.changes) == 12 + len(evicted)


def test_a_cap_that_holds_the_working_set_warns_nobody(kind, caplog):
    scene = Scene(kind, widths=(2,), buckets=(1, 2, 4), max_graphs=3)
    for n in (1, 2, 4) * 3:
        scene.check(scene.batch(n, 2))
    assert scene.runner.stats["captures"] == 3 and not warnings_of(caplog)


def test_the_least_recently_used_graph_goes_and_the_cap_bounds_all_keys_together(kind):
    scene, used = Scene(kind, max_graphs=3), []
    scene.runner.decode(scene.batch(8, 4))  # captured first in any case
    for inputs in scene.every_batch():
        key = scene.key_of(inputs)
        used = [k for k in used if k != key] + [key]
        scene.runner.decode(inputs)
        held = scene.runner.graphs.keys
        assert len(held) <= 3 and held[-len(used) :] == tuple(used[-3:])


def test_each_eviction_is_logged_with_its_key_and_what_came_back(kind, caplog):
    caplog.set_level(logging.INFO, "tinyengine")
    scene = Scene(kind, widths=(2,), buckets=(1, 2), max_graphs=1)
    for n in (2, 1):
        scene.runner.decode(scene.batch(n, 2))
    messages = [r.getMessage() for r in caplog.records]
    assert [str(change) for change in scene.changes] == messages and len(messages) == 3
    assert messages[-1].startswith("evicted graph (2, 2, 'gather', 1): graph pools 2.0 -> 2.0 MiB")


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("cap", [1, 3, 20])
def test_warmup_captures_nothing_that_it_would_evict(kind, rung, cap):
    scene = Scene(kind, rung, buckets=(1, 2, 4), widths=(1, 2), max_graphs=cap)
    for _ in range(2):
        scene.runner.warmup()
        assert scene.runner.graphs.keys == scene.runner.keys[:cap]
        assert scene.runner.stats["captures"] == min(cap, 6) and scene.runner.stats["evictions"] == 0


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_warmup_of_chosen_graphs_evicts_none_either(kind, cap):
    scene = Scene(kind, buckets=(1, 2, 4), widths=(1, 2), max_graphs=cap)
    scene.runner.warmup(scene.runner.keys[::-1])  # smallest first, though the largest is always captured first
    assert scene.runner.stats["captures"] == len(scene.runner.graphs) == cap
    assert scene.runner.stats["evictions"] == 0


def test_after_a_warmup_no_step_captures(kind):
    scene = Scene(kind, buckets=(1, 4), widths=(1, 2))
    scene.runner.warmup()
    captures, seconds = scene.runner.stats["captures"], scene.runner.stats["capture_seconds"]
    for inputs in scene.every_batch():
        scene.check(inputs)
    assert captures == 4 and scene.runner.stats["captures"] == 4
    assert scene.runner.stats["capture_seconds"] == seconds > 0


@pytest.mark.parametrize("logits", ["own", "direct"])
@pytest.mark.parametrize("shared_pool", [False, True])
def test_a_pool_of_its_own_comes_back_at_eviction_and_a_shared_one_does_not(kind, shared_pool, logits):
    rung = dataclasses.replace(find_rung("lru"), shared_pool=shared_pool, logits=logits, max_graphs=2)
    scene = Scene(kind, rung, buckets=(1, 2, 4), widths=(2,))
    for n in (4, 2, 1, 4, 2):
        scene.check(scene.batch(n, 2))
    gone = [change.before.reserved - change.after.reserved for change in scene.changes if change.what == "evicted"]
    assert gone == [0 if shared_pool else 2 << 20] * 3  # one small segment a graph
    assert scene.runner.pool_bytes.reserved == (2 << 20 if shared_pool else 4 << 20)
    if logits == "direct":
        assert {change.after.live for change in scene.changes} == {0}
    else:
        assert scene.runner.pool_bytes.live == rounded(4 * 512 * 4, 2 * 512 * 4)


@pytest.mark.parametrize("rung", RUNGS)
def test_dropped_graphs_give_their_memory_back_and_later_ones_tell_the_same(kind, rung):
    scene = Scene(kind, rung, buckets=(1, 4), widths=(1, 2))
    batches, cache = scene.every_batch(), scene.runner.cache.data.clone()
    before = [tokens(scene.runner.decode(inputs)) for inputs in batches]
    scene.runner.cache.data.copy_(cache)
    pool, warm = scene.runner.pool_bytes, kind == "tape" or scene.plan.rung.one_stream
    assert pool.reserved > 0
    device = reserved_on_device() if kind == "cuda" else 0
    scene.runner.drop()
    assert scene.runner.pool_bytes == (0, 0) and not len(scene.runner.graphs)
    if kind == "cuda" and warm:  # else a workspace in the pool outlives it
        assert reserved_on_device() <= device - pool.reserved
    for inputs, want in zip(batches, before, strict=True):
        assert tokens(scene.runner.decode(inputs)).equal(want)
    assert scene.runner.replays == 2 * len(batches) and (scene.runner.pool_bytes == pool or not warm)


def test_a_graph_captured_again_after_a_drop_was_not_evicted(kind, caplog):
    scene = Scene(kind, buckets=(1, 4), widths=(1, 2))
    for _ in range(3):
        scene.runner.warmup()
        scene.runner.drop()
    assert scene.runner.stats["captures"] == 12
    assert scene.runner.stats["recaptures"] == scene.runner.stats["evictions"] == 0
    assert not warnings_of(caplog), "the cap holds them all"


class Traffic:
    """Sequences that come, grow by a token a step and go at random, over a paged cache of one or more scenes."""

    def __init__(self, seed, most, most_blocks):
        self.random, self.most, self.most_tokens = random.Random(seed), most, most_blocks * BLOCK
        self.allocator = BlockAllocator(MOST_SEQS * MOST_WIDTH + 1)
        self.sequences, self.count = {}, 0  # by id, [blocks, tokens in the cache]

    def step(self):
        """Let some come and go, and one more token into each; their ids, tables and positions."""
        wanted = self.random.choice((-1, 0, 0, 0, 1)) + len(self.sequences)
        full = [i for i, (_, length) in self.sequences.items() if length == self.most_tokens]
        leaving = self.random.sample(sorted(self.sequences), 1) if 1 <= wanted < len(self.sequences) else []
        for i in {*full, *leaving}:
            self.allocator.free(self.sequences.pop(i)[0])
        while not self.sequences or len(self.sequences) < min(wanted, self.most):
            self.sequences[self.count] = [[], 0]
            self.count += 1
        for entry in self.sequences.values():
            entry[1] += 1
            entry[0] += self.allocator.allocate(blocks_needed(entry[1], BLOCK) - len(entry[0]))
        return list(self.sequences)

    def inputs(self, last):
        """The step of these sequences, each with its last token."""
        entries = self.sequences.values()
        positions = torch.tensor([length - 1 for _, length in entries])
        slots = [blocks[(length - 1) // BLOCK] * BLOCK + (length - 1) % BLOCK for blocks, length in entries]
        return DecodeInputs(
            input_ids=torch.tensor([last.get(i, i % CONFIG.vocab_size) for i in self.sequences]),
            positions=positions,
            slot_mapping=torch.tensor(slots),
            block_table=torch.from_numpy(pad_block_tables([blocks for blocks, _ in entries])),
            context_lens=(positions + 1).int(),
        )


@pytest.mark.parametrize("shared_pool, microbatches", [(True, 1), (True, 2), (False, 1)])
def test_in_500_steps_of_traffic_under_a_small_cap_every_token_is_eagers(kind, shared_pool, microbatches):
    """Each world feeds its own tokens back and reads its own cache: one wrong number, and they part for good."""
    rung = dataclasses.replace(find_rung("lru"), shared_pool=shared_pool, max_graphs=3)
    scene, eager = Scene(kind, rung, microbatches=microbatches), Scene(kind, "eager")
    traffic, mine, theirs, distinct = Traffic(5, 8, 4), {}, {}, set()
    for _ in range(500):
        ids = traffic.step()
        mine.update(zip(ids, tokens(scene.runner.decode(traffic.inputs(mine))).tolist(), strict=True))
        theirs.update(zip(ids, tokens(eager.runner.decode(traffic.inputs(theirs))).tolist(), strict=True))
        assert mine == theirs
        distinct.update(mine.values())
    stats = scene.runner.stats
    assert stats["replays"] == 500 and stats["working_set"] > 6 and stats["recaptures"] > 10
    assert len(distinct) > 100, "the model must have had something to say"


# ---- garbage ----


class Cycle:
    """Owns a graph and itself, so that only the collector can end it."""

    def __init__(self, graph):
        self.graph, self.me = graph, self


def test_a_garbage_cycle_that_owns_a_graph_does_no_harm_during_a_capture(kind, monkeypatch):
    scene = Scene(kind, widths=(2,))
    x = torch.ones(1000, device=scene.device)
    owned = [Cycle(scene.backend.capture(lambda: x + 1, scene.backend.new_pool(), scene.backend.stream(0))[0])]
    graph, collections, within = weakref.ref(owned[0].graph), [], [False]

    def lets_go(q):
        owned.clear()
        within[0] = True
        _ = [[] for _ in range(1000)]
        within[0] = False

    def collecting(phase, info):
        if phase == "start" and within[0]:
            collections.append(info)

    arm(scene, monkeypatch, lets_go)
    thresholds = gc.get_threshold()
    gc.callbacks.append(collecting)
    gc.set_threshold(1)
    try:
        captured = scene.runner.find(scene.runner.keys[0])
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collecting)
    assert captured is not None and gc.isenabled(), "serving keeps its collector"
    assert bool(collections) == (kind == "tape"), "on the device nothing is collected within a capture"
    gc.collect()
    assert graph() is None
    monkeypatch.undo()
    scene.check(scene.batch(8, 2))
    scene.check(scene.batch(3, 2))


# ---- two microbatches on two streams ----


def test_the_two_halves_lie_on_two_streams_between_fork_and_join():
    scene = Scene("tape", "largest-first", buckets=(5, 1), widths=(2,), microbatches=2)
    inputs = scene.batch(5, 2)
    scene.check(inputs)
    graph = scene.runner.find(scene.key_of(inputs)).step.graph
    before, forked, after = graph.sections
    assert not before and set(forked) == {branch_stream(0), branch_stream(1)} and set(after) == {0}
    operators = [[kernel.op for kernel in kernels] for kernels in forked.values()]
    assert operators[0] == operators[1] and len(operators[0]) > 20
    assert [kernel.op for kernel in after[0]] == [torch.ops.aten.cat.default]
    shared = Scene("tape", buckets=(5, 1), widths=(2,), microbatches=2)
    assert [len(section) for section in shared.runner.find(shared.runner.keys[0]).step.graph.sections] == [0, 2]
    scene.check(scene.batch(1, 2))
    (whole,) = scene.runner.find(scene.runner.key(1, 2)).step.graph.sections
    assert set(whole) == {0}, "one row has no halves"


@pytest.mark.parametrize("rung", ["largest-first", "direct-logits"])
def test_the_two_halves_may_run_in_any_order(rung):
    scene = Scene("tape", rung, buckets=(5,), widths=(2,), microbatches=2)
    inputs = scene.batch(5, 2)
    expected = scene.runner.decode(inputs).clone()
    graph = scene.runner.find(scene.key_of(inputs)).step.graph
    forked = graph.sections[1]
    graph.sections[1] = dict(reversed(list(forked.items())))
    scene.poison()
    assert scene.runner.decode(inputs).equal(expected)
    one, other = forked.values()
    assert len(one) == len(other)
    mixed = [kernel for pair in zip(one, other, strict=True) for kernel in pair]
    graph.sections[1] = {0: mixed}
    scene.poison()
    assert scene.runner.decode(inputs).equal(expected), "the halves share no memory that they write"


def missing_join(backend, x):
    one, two = backend.fork(2)
    with one:
        x + 1
    with two:
        x + 2


def nested_fork(backend, x):
    for branch in backend.fork(2):
        with branch:
            backend.fork(2)


def joined_twice(backend, x):
    for branch in backend.fork(2):
        with branch:
            x + 1
    backend.join()
    backend.join()


def reads_the_other_branch(backend, x):
    one, two = backend.fork(2)
    with one:
        y = x + 1
    with two:
        y * 2
    backend.join()


def reads_a_view_of_the_other_branch(backend, x):
    one, two = backend.fork(2)
    with one:
        y = x + 1
    with two:
        torch.cat([x[:2], y[:2]])
    backend.join()


def writes_into_the_other_branch(backend, x):
    one, two = backend.fork(2)
    with one:
        y = x + 1
    with two:
        torch.add(x, 2, out=y)
    backend.join()


def works_beside_the_branches(backend, x):
    one, two = backend.fork(2)
    with one:
        x + 1
    x + 2
    with two:
        x + 3
    backend.join()


REFUSED = {
    missing_join: "never joined",
    nested_fork: "a fork within a fork",
    joined_twice: "a join with nothing forked",
    reads_the_other_branch: "another one's output",
    reads_a_view_of_the_other_branch: "another one's output",
    writes_into_the_other_branch: "another one's output",
    works_beside_the_branches: "beside the branches",
}


def refusal(backend, pool, fault, x):
    """What a capture of the fault says; whatever its traceback holds is gone then."""
    with pytest.raises(CaptureError) as error:
        backend.capture(lambda: fault(backend, x), pool)
    return str(error.value)


@pytest.mark.parametrize("fault", REFUSED, ids=lambda f: f.__name__)
def test_a_race_between_branches_is_refused(fault):
    backend, pool, x = TapeBackend(), TapePool(), torch.ones(4)
    message = refusal(backend, pool, fault, x)
    assert REFUSED[fault] in message and (fault is missing_join or "test_runner.py" in message)
    gc.collect()
    assert backend.pool_bytes(pool) == (0, 0), "nothing is left behind"
    graph, result = backend.capture(lambda: well_joined(backend, x), pool)
    graph.replay()
    assert result.tolist() == [7] * 4


def well_joined(backend, x):
    """(x + 1) * 2 and x * 3 side by side, then their sum."""
    before = x + 1
    one, two = backend.fork(2)
    with one:
        y = before * 2
    with two:
        z = x * 3
    backend.join()
    return y + z


def test_outside_a_capture_branches_just_run():
    assert well_joined(TapeBackend(), torch.ones(4)).tolist() == [7] * 4


# ---- three more of what went wrong for others ----


def test_captures_on_streams_of_their_own_do_not_share_a_pool():
    """lightning-thunder #1790: "sharing the pool has no effect". Free blocks serve the stream that made them."""
    measures = dict(shared_pool=True, largest_first=True, shared_inputs=True, logits="shared")
    reserved = {}
    for one_stream in (False, True):
        rung = Rung("mixed", "", "", one_stream=one_stream, **measures)
        scene = Scene("tape", rung, buckets=(16, 32, 64), widths=(4,), config=LARGER)
        scene.runner.warmup()
        reserved[one_stream] = scene.changes[-1].after.reserved
    assert reserved[False] > reserved[True]


def test_graphs_that_are_dropped_and_captured_again_never_take_more_than_once():
    """Captured again while the old ones live, they would take twice as much."""
    scene = Scene("tape", buckets=(1, 8, 64), widths=(1, 4), config=LARGER)
    for _ in range(3):
        scene.runner.warmup()
        assert scene.runner.pool_bytes.reserved == scene.changes[0].after.reserved
        scene.runner.drop()
        assert scene.runner.pool_bytes.reserved == 0
    assert max(change.after.reserved for change in scene.changes) == scene.changes[0].after.reserved


def test_serving_keeps_its_garbage_collector():
    """vLLM #21146 and LightLLM #1382: a collection at each capture is slow, and one frozen for good never comes."""
    assert gc.isenabled()
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(info) if info["generation"] == 2 else None)
    try:
        scene = Scene("tape")
        gc.collect()
        del collections[:]
        scene.runner.warmup()
    finally:
        gc.callbacks.pop()
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert len(collections) < len(scene.runner.keys), "not one full collection for each capture"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_padding_that_overflows_harms_no_sequence(dtype):
    """A padded row is token 0, whose K and V may be no numbers: others must not read the null block, where they go."""
    scene = Scene("tape", dtype=dtype, buckets=(1, 2, 4, 8), widths=(1, 4))
    scene.runner.params.embed[0] = float("inf")
    for n in (3, 5, 7):
        inputs = scene.batch(n, 3)
        inputs.input_ids.clamp_(min=1)
        for _ in range(2):
            assert scene.runner.decode(inputs).isfinite().all()
    assert not scene.runner.cache.data[:, 0].isfinite().all(), "the padding must have overflowed"
