"""The decoder as a function: what a decode step may not do, since a later graph capture could not."""

import pytest
import torch

from tinyengine.kv.cache import KVCache, KVLayout
from tinyengine.model.attention import FlashAttention, GatherAttention
from tinyengine.model.checkpoint import random_params
from tinyengine.model.config import PRESETS
from tinyengine.model.inputs import DecodeInputs
from tinyengine.model.transformer import float_logits, forward, lm_head

CONFIG = PRESETS["tiny"]


def scene(device, dtype=torch.float32, rows=4, width=3, block_size=16):
    params = random_params(CONFIG, device, dtype, max_len=64)
    layout = KVLayout(CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, block_size, dtype)
    return params, KVCache(layout, 1 + rows * width, device), DecodeInputs.allocate(rows, width, device)


@pytest.mark.parametrize("attention", [GatherAttention(), FlashAttention(CONFIG)], ids=lambda a: a.name)
def test_a_decode_step_reads_no_value_back_to_the_host(attention):
    """On meta tensors there are no values: whatever asked for one would raise."""
    params, cache, inputs = scene("meta", torch.bfloat16)
    with torch.inference_mode():
        hidden = forward(params, inputs, attention, cache)
    assert hidden.shape == (4, CONFIG.hidden_size) and hidden.dtype == torch.bfloat16
    logits = lm_head(params, hidden)
    assert logits.shape == (4, CONFIG.vocab_size) and logits.dtype == torch.bfloat16


def test_padding_rows_touch_the_null_block_alone():
    params, cache, inputs = scene("cpu")
    cache.data[:, 1:].normal_()
    before = cache.data.clone()
    with torch.inference_mode():
        hidden = forward(params, inputs, GatherAttention(), cache)
    assert cache.data[:, 1:].equal(before[:, 1:]) and not cache.data[:, 0].equal(before[:, 0])
    assert hidden.isfinite().all()


def test_a_narrower_view_of_the_static_inputs_computes_the_same():
    params, cache, inputs = scene("cpu", rows=4, width=3)
    cache.data.normal_()
    inputs.block_table.copy_(torch.arange(1, 13).view(4, 3))
    inputs.slot_mapping.copy_(inputs.block_table[:, 0] * 16 + 5)
    inputs.positions.fill_(5)
    inputs.context_lens.fill_(6)  # the first block is enough
    with torch.inference_mode():
        wide = forward(params, inputs, GatherAttention(), cache)
        view = inputs.view(2, 1)
        narrow = forward(params, view, GatherAttention(), cache)
    assert view.block_table.untyped_storage().data_ptr() == inputs.block_table.untyped_storage().data_ptr()
    assert torch.allclose(narrow, wide[:2], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_float32_and_may_be_written_into_a_buffer(dtype):
    params, _, _ = scene("cpu", dtype)
    hidden = torch.randn(3, CONFIG.hidden_size).to(dtype)
    buffer = torch.full((4, CONFIG.vocab_size), float("nan"))
    logits = float_logits(params, hidden)
    written = lm_head(params, hidden, out=buffer[:3])
    assert logits.dtype == torch.float32 and written.data_ptr() == buffer.data_ptr()
    assert buffer[:3].equal(logits) and buffer[3].isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_on_cuda_are_not_rounded_to_half(dtype):
    params, _, _ = scene("cuda", dtype)
    hidden = torch.randn(3, CONFIG.hidden_size, device="cuda").to(dtype)
    buffer = torch.empty(4, CONFIG.vocab_size, device="cuda")
    exact = hidden.double() @ params.lm_head.double().t()
    for logits in (float_logits(params, hidden), lm_head(params, hidden, out=buffer[:3])):
        assert (logits - exact).abs().max() / exact.abs().max() < 1e-5
