"""The CPU's graphs: a capture computes nothing, a replay equals eager to the bit, and a pool is used again."""

import copy

import numpy as np
import pytest
import torch

from tinyengine.errors import CaptureError
from tinyengine.graphs.tape import TapeBackend, TapePool
from tinyengine.kv.cache import KVCache, KVLayout
from tinyengine.model.attention import GatherAttention
from tinyengine.model.checkpoint import random_params
from tinyengine.model.config import PRESETS
from tinyengine.model.inputs import DecodeInputs
from tinyengine.model.transformer import forward, lm_head

CONFIG = PRESETS["tiny"]
capture = TapeBackend().capture
HOST = torch.randn(4, 6)
ROWS, WIDTH, BLOCK = 5, 5, 16


class Scene:
    """A decode step over static inputs, and a way to fill them at random."""

    def __init__(self):
        self.params = random_params(CONFIG, "cpu", torch.float32, WIDTH * BLOCK)
        layout = KVLayout(CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, BLOCK, torch.float32)
        self.cache = KVCache(layout, ROWS * WIDTH + 1, "cpu")
        self.inputs = DecodeInputs.allocate(ROWS, WIDTH, "cpu")
        self.buffer = torch.full((ROWS, CONFIG.vocab_size), float("nan"))
        self.attention = GatherAttention()
        self.generator = torch.Generator().manual_seed(0)

    def step(self, rows=ROWS, width=WIDTH):
        hidden = forward(self.params, self.inputs.view(rows, width), self.attention, self.cache)
        return self.buffer[:rows].copy_(lm_head(self.params, hidden))

    def shuffle(self):
        g, i = self.generator, self.inputs
        lens = torch.randint(1, WIDTH * BLOCK + 1, (ROWS,), generator=g)
        i.block_table.copy_((torch.randperm(ROWS * WIDTH, generator=g) + 1).view(ROWS, WIDTH))
        i.context_lens.copy_(lens)
        i.positions.copy_(lens - 1)
        i.input_ids.copy_(torch.randint(0, CONFIG.vocab_size, (ROWS,), generator=g))
        block = i.block_table.gather(1, ((lens - 1) // BLOCK).unsqueeze(1))[:, 0]
        i.slot_mapping.copy_(block * BLOCK + (lens - 1) % BLOCK)


def test_a_capture_computes_nothing_and_a_replay_equals_eager_to_the_bit():
    scene = Scene()
    graph, _ = capture(scene.step, TapePool())
    assert scene.buffer.isnan().all() and not scene.cache.data.any()
    for _ in range(10):
        scene.shuffle()
        before = scene.cache.data.clone()
        scene.buffer.fill_(float("nan"))  # a replay that writes nothing would leave this
        graph.replay()
        replayed, cache = scene.buffer.clone(), scene.cache.data.clone()
        scene.cache.data.copy_(before)
        with torch.inference_mode():
            eager = scene.step()
        assert replayed.equal(eager) and cache.equal(scene.cache.data)


def test_weights_changed_in_place_are_seen():
    scene = Scene()
    graph, _ = capture(scene.step, TapePool())
    graph.replay()
    first = scene.buffer.clone()
    scene.params.final_norm.mul_(2)
    graph.replay()
    assert torch.allclose(scene.buffer, 2 * first, rtol=1e-5)


def test_graphs_of_one_pool_share_its_memory_and_any_order_of_replay_is_right():
    scene, pool, views = Scene(), TapePool(), [(5, 5), (3, 5), (1, 2), (4, 1)]
    graphs = [capture(lambda v=view: scene.step(*v), pool)[0] for view in views]
    alone = TapePool()
    capture(scene.step, alone)
    assert pool.arena.bytes == alone.arena.bytes, "largest first: the later ones fit into what the first left"
    for i in (2, 0, 3, 1, 0, 2, 1, 3):
        scene.shuffle()
        scene.inputs.context_lens.clamp_(max=views[i][1] * BLOCK)
        scene.buffer.fill_(float("nan"))
        graphs[i].replay()
        replayed = scene.buffer[: views[i][0]].clone()
        with torch.inference_mode():
            assert replayed.equal(scene.step(*views[i]))


def test_an_output_that_is_kept_stays_live_and_one_that_is_dropped_is_used_again():
    x, pool = torch.randn(1000), TapePool()
    _, kept = capture(lambda: x + 1, pool)
    assert kept.isnan().all(), "nothing has written it yet"
    _, second = capture(lambda: x + 2, pool)
    assert pool.arena.bytes.live == 2 * 4096 and kept.data_ptr() != second.data_ptr()
    address = kept.data_ptr()
    del kept
    _, third = capture(lambda: x + 3, pool)
    assert third.data_ptr() == address and pool.arena.bytes.live == 2 * 4096


def test_a_kept_output_changes_with_a_later_replay():
    """What a graph hands out is a view of its memory: whoever keeps it clones it."""
    x = torch.zeros(3)
    graph, out = capture(lambda: x + 1, TapePool())
    graph.replay()
    kept, cloned = out, out.clone()
    x.fill_(5)
    graph.replay()
    assert kept.tolist() == [6, 6, 6] and cloned.tolist() == [1, 1, 1]


def test_a_number_of_python_is_baked_in_and_a_tensor_is_not():
    x, scale = torch.ones(2), {"python": 2, "tensor": torch.tensor(2.0)}
    baked, _ = capture(lambda: x.mul_(scale["python"]), TapePool())
    read, _ = capture(lambda: x.mul_(scale["tensor"]), TapePool())
    scale["python"] = 10
    scale["tensor"].fill_(10)
    baked.replay()
    assert x.tolist() == [2, 2]
    read.replay()
    assert x.tolist() == [20, 20]


def test_a_capture_that_raises_leaves_the_pool_as_it_was():
    x, pool = torch.randn(1000), TapePool()
    capture(lambda: x + 1, pool)
    before = pool.arena.bytes

    def fails():
        y = x * 2
        return y.sum().item()

    with pytest.raises(CaptureError):
        capture(fails, pool)
    capture(lambda: None, pool)
    assert pool.arena.bytes == before._replace(live=0)


def test_a_graph_prints_its_kernels_with_shapes_and_addresses():
    x = torch.ones(2, 3)
    graph, _ = capture(lambda: torch.relu(x + 1).mul_(2), TapePool())
    lines = str(graph).splitlines()
    assert [line.split()[1].split("(")[0] for line in lines] == [
        "aten.add.Tensor",
        "aten.relu.default",
        "aten.mul_.Tensor",
    ]
    assert "float32[2, 3]@host" in lines[0] and "-> float32[2, 3]@0:0x0" in lines[0]
    assert "float32[2, 3]@0:0x0" in lines[1] and lines[2].endswith("in place")


def test_an_in_place_view_is_a_view():
    a = torch.randn(4, 6)
    graph, out = capture(lambda: a @ (a + 1).t_(), TapePool())
    graph.replay()
    assert out.equal(a @ (a + 1).t())
    graph, out = capture(lambda: (a + 1).swapaxes_(0, 1).unsqueeze_(0) * 2, TapePool())
    graph.replay()
    assert out.equal((a + 1).t()[None] * 2)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a: (a + 1).set_(a) * 2,
        lambda a: (a + 1).resize_(2, 2) * 2,
        lambda a: copy.deepcopy(a + 1) * 2,
        lambda a: (a.to(torch.complex64) * 1j).conj() * 2j,
        lambda a: torch._neg_view(a + 0) + 1,
        lambda a: torch.linalg.inv(a[:, :4]),
        lambda a: a * float(np.from_dlpack(a + 1)[0, 0]),
        lambda a: print(a + 1),
        lambda a: capture(lambda: a + 1, TapePool()),
    ],
)
def test_what_a_recording_by_address_would_get_wrong_is_refused(fn):
    with pytest.raises(CaptureError):
        capture(lambda: fn(HOST), TapePool())


def test_a_graph_that_was_reset_is_not_replayed_and_a_second_reset_does_nothing():
    pool = TapePool()
    graph, _ = capture(lambda: HOST + 1, pool)
    graph.reset()
    graph.reset()
    assert pool.graphs == 0
    with pytest.raises(CaptureError, match="capture it again"):
        graph.replay()


def test_a_printed_graph_shows_the_addresses_of_lists_too():
    graph, _ = capture(lambda: torch.cat([HOST, HOST * 2]), TapePool())
    assert "aten.cat.default([float32[4, 6]@host, float32[4, 6]@0:0x0]) -> float32[8, 6]@0:0x200" in str(graph)
