"""What a capture sees: events in order, what is refused, and on a GPU the same events as the device's allocator."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tinyengine.errors import CaptureError
from tinyengine.graphs.arena import Arena, Event
from tinyengine.graphs.recorder import trace
from tinyengine.kv.cache import KVCache, KVLayout
from tinyengine.model.attention import FlashAttention, GatherAttention
from tinyengine.model.checkpoint import random_params
from tinyengine.model.config import PRESETS
from tinyengine.model.inputs import DecodeInputs
from tinyengine.model.transformer import forward, lm_head


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_outputs_are_allocated_and_freed_when_nobody_holds_them():
    x = meta(4, 8)

    def fn():
        y = x + 1  # 128 bytes
        z = y.view(8, 4).t() * 2  # a view takes nothing, the product 128
        del y
        return torch.cat([z, z])  # 256

    assert trace(fn) == [Event(1, 128), Event(2, 128), Event(1, 0), Event(3, 256), Event(2, 0), Event(3, 0)]


def test_writing_in_place_takes_nothing():
    x, out = meta(4, 8), meta(4, 8)
    assert trace(lambda: torch.mul(x, 2, out=out).add_(1)) == []


def test_a_copying_reshape_is_no_view():
    x = meta(4, 8)
    assert trace(lambda: x.t().reshape(-1)) == [Event(1, 128), Event(1, 0)]
    assert trace(lambda: x.reshape(-1)) == []


def test_rms_norm_is_one_kernel_with_a_float32_for_each_row():
    x, w = meta(4, 8, dtype=torch.bfloat16), meta(8, dtype=torch.bfloat16)
    assert trace(lambda: F.rms_norm(x, (8,), w)) == [Event(1, 64), Event(2, 16), Event(2, 0), Event(1, 0)]
    strided = meta(4, 16, dtype=torch.bfloat16)[:, :8]
    events = trace(lambda: F.rms_norm(strided, (8,), w))
    assert events[:3] == [Event(1, 64), Event(2, 64), Event(3, 16)] and set(events[3:5]) == {Event(1, 0), Event(3, 0)}


def test_roll_copies_an_input_that_is_not_contiguous():
    assert trace(lambda: torch.roll(meta(4, 8), 4, -1))[1:] == [Event(2, 128), Event(1, 0), Event(2, 0)]
    strided = meta(4, 16)[:, :8]
    assert trace(lambda: torch.roll(strided, 4, -1)) == [Event(1, 128), Event(2, 128), Event(1, 0), Event(2, 0)]


REFUSED = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x[0] > 1),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: torch.unique(x),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
    "tensor of a list": lambda x: torch.tensor([1, 2]) + x[:2],
}


@pytest.mark.parametrize("name", REFUSED)
def test_reading_a_value_is_refused_with_the_line_that_did_it(name):
    x = torch.arange(4)
    with pytest.raises(CaptureError, match="cannot be captured") as error:
        trace(lambda: REFUSED[name](x))
    assert "test_recorder.py" in str(error.value)


def test_an_index_of_integers_is_not_a_mask():
    assert len(trace(lambda: meta(4, 8)[meta(3, dtype=torch.int64)])) == 6


def decode_step(config, device, batch, width, block_size=256, dtype=torch.bfloat16, attention=None):
    """A decode step of the product, its logits copied into a shared buffer."""
    params = random_params(config, device, dtype, 2048)
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)
    cache = KVCache(layout, batch * width + 1, device)
    inputs = DecodeInputs.allocate(batch, width, device)
    buffer = torch.empty(batch, config.vocab_size, device=device)
    attention = attention or FlashAttention(config)

    def step():
        buffer.copy_(lm_head(params, forward(params, inputs, attention, cache)))

    return step


def test_a_step_of_many_layers_costs_its_intermediates_once():
    """Each layer's outputs reuse what the last layer freed: the pool does not grow with depth."""
    pools = []
    for layers in (2, 8):
        config = replace(PRESETS["qwen3-0.6b"], num_layers=layers, vocab_size=1000)
        pools.append(Arena().play(trace(decode_step(config, "meta", 64, 4))))
    assert pools[0] == pools[1] and pools[0].live == 0


def numbered(events):
    """Events with ids in the order of allocation, and each run of frees sorted: its order has no effect."""
    ids, out, run = {}, [], []
    for event in events:
        if event.nbytes:
            out += sorted(run)
            run = []
            ids[event.id] = len(ids)
            out.append((ids[event.id], event.nbytes))
        else:
            run.append((ids[event.id], 0))
    return out + sorted(run)


def device_events(step):
    """The allocator's own record of a capture of `step` on a warmed-up side stream.

    Another graph lives meanwhile: the random generator's seed and offset, 8 bytes each, belong to the first of all.
    """
    first = torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        torch.zeros(1, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs are still being filled there
    with torch.inference_mode(), torch.cuda.stream(stream):
        step()
    stream.synchronize()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph, stream=stream):
        step()
    entries = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(None)
    events, ids = [], {}
    for entry in entries:
        if entry["stream"] != stream.cuda_stream:
            continue
        if entry["action"] == "alloc":
            ids[entry["addr"]] = len(events)
            events.append(Event(len(events), entry["size"]))
        elif entry["action"] == "free_completed" and entry["addr"] in ids:
            events.append(Event(ids.pop(entry["addr"]), 0))
    return events


@pytest.mark.cuda
@pytest.mark.parametrize("preset", ["qwen3-0.6b", "llama-3.2-1b"])
@pytest.mark.parametrize("batch, width", [(1, 4), (1, 8), (2, 4), (8, 1), (8, 4), (64, 4), (256, 1), (256, 4)])
def test_the_prediction_is_the_devices_own_trace_event_for_event(preset, batch, width):
    config = PRESETS[preset]
    predicted = trace(decode_step(config, "meta", batch, width))
    measured = device_events(decode_step(config, "cuda", batch, width))
    assert len(predicted) > 400
    assert numbered(predicted) == numbered(measured)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 2, 64])
def test_the_gather_path_too_is_predicted_event_for_event_in_half_precision(dtype, batch):
    """SDPA, here cuDNN's, has a seed, an offset and a workspace of its own."""
    config = replace(PRESETS["llama-3.2-1b"], num_layers=2, vocab_size=1000)
    steps = [decode_step(config, device, batch, 4, 256, dtype, GatherAttention()) for device in ("meta", "cuda")]
    assert numbered(trace(steps[0])) == numbered(device_events(steps[1]))


def test_a_repeated_operator_is_not_mistaken_for_another():
    """Shapes of repeated operators are remembered: 1, 1.0 and True are equal, but make different dtypes."""
    x = meta(4, dtype=torch.int64)
    sizes = [e.nbytes for e in trace(lambda: (x * True, x * 1, x * 1.0, x * 1)) if e.nbytes]
    assert sizes == [32, 32, 16, 32]


@pytest.mark.cuda
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(8, 1, 64), (32, 16, 256), (64, 32, 128), (12, 3, 96), (4, 4, 64)]
)
@pytest.mark.parametrize("batch, width", [(1, 8), (2, 4), (8, 1), (3, 4)])
def test_other_shapes_of_heads_too_are_predicted_event_for_event(heads, kv_heads, head_dim, batch, width):
    """Where the flash kernel splits the keys of a small batch by itself, and how often, depends on these."""
    config = replace(PRESETS["llama-3.2-1b"], num_layers=2, vocab_size=1000)
    config = replace(config, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    predicted = trace(decode_step(config, "meta", batch, width))
    assert numbered(predicted) == numbered(device_events(decode_step(config, "cuda", batch, width)))
