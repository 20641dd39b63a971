"""The Llama-family decoder, as a function of its weights, one step's inputs, an attention path and the KV cache.

Pre-norm RMSNorm (Zhang & Sennrich 2019), rotary positions (Su et al. 2021), grouped-query attention (Ainslie et
al. 2023), SwiGLU (Shazeer 2020). The options are Qwen2's QKV bias and Qwen3's QK-norm. Tokens of all sequences lie
in one flat batch `[n, hidden]`; only attention knows where one sequence ends and the next begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyengine.model.config import ModelConfig, RopeConfig
from tinyengine.model.inputs import DecodeInputs, PrefillInputs

if TYPE_CHECKING:
    from tinyengine.kv.cache import KVCache
    from tinyengine.model.attention import Attention


@dataclass(frozen=True)
class LayerParams:
    """Weights of one decoder layer. Q, K and V are one matrix, gate and up are one matrix: two launches saved.

    Matrices are `[in, out]`, for `x @ matrix`; how they lie in memory is for checkpoint.py to choose.
    """

    attn_norm: Tensor  # [hidden]
    qkv: Tensor  # [hidden, (heads + 2 * kv_heads) * head_dim]: all of Q, then K, then V
    qkv_bias: Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]: q_norm's weight for each Q head, k_norm's for each K head
    o_proj: Tensor  # [heads * head_dim, hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [hidden, 2 * intermediate]: gate, then up
    down: Tensor  # [intermediate, hidden]


@dataclass(frozen=True)
class Params:
    """All weights, and the rotary table made from the configuration."""

    config: ModelConfig
    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerParams, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]; the embedding itself where the two are tied
    rope: Tensor  # [max_len, 2, 2, head_dim / 2]: see rope_table()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of the hidden states."""
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.embed.device

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor once: a tied LM head is the embedding."""
        layers = [t for layer in self.layers for t in vars(layer).values() if t is not None]
        head = [] if self.lm_head is self.embed else [self.lm_head]
        return [self.embed, *layers, self.final_norm, *head, self.rope]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions, float32 `[head_dim / 2]`.

    `linear` stretches every wavelength by `factor`. `llama3` (Llama 3.1) stretches only the long ones, and blends
    between `original_max_position / high_freq_factor` and `original_max_position / low_freq_factor`.
    """
    freq = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * freq / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)
        return freq * keep + freq / rope.factor * (1 - keep)
    return freq


def rope_table(config: ModelConfig, max_len: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What turns each pair of dimensions at each position: `[[cos, sin], [-sin, cos]]`, `[max_len, 2, 2, pairs]`."""
    angle = torch.outer(torch.arange(max_len, dtype=torch.float32), rope_frequencies(config.rope, config.head_dim))
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([cos, sin, -sin, cos], 1).view(max_len, 2, 2, -1).to(device, dtype)


def rotations(rope: Tensor, positions: Tensor) -> Tensor:
    """The rotary embedding as one matrix for each token, `[n, head_dim, head_dim]`: `x @ matrix` turns a head's x.

    Dimensions i and i + head_dim / 2 make a pair (the Hugging Face pairing), so the matrix has four diagonals. Made
    once a step, it turns all Q and K heads of a layer with one product, where slices, products and sums take four
    kernels and round twice. rope: from `rope_table`; positions: int64 `[n]`.
    """
    n, pairs = len(positions), rope.shape[-1]
    matrices = torch.zeros(n, 2, pairs, 2, pairs, dtype=rope.dtype, device=rope.device)
    matrices.diagonal(0, 2, 4).copy_(rope[positions])
    return matrices.view(n, 2 * pairs, 2 * pairs)


def forward(
    params: Params,
    inputs: DecodeInputs | PrefillInputs,
    attention: Attention,
    cache: KVCache,
    rotations: Callable[[Tensor, Tensor], Tensor] = rotations,
) -> Tensor:
    """Run every layer over the step's tokens; K and V of each token are written to its slot. Returns `[n, hidden]`.

    x is the residual stream, and is added to where it lies: no layer allocates another one.
    """
    config, eps = params.config, params.config.rms_norm_eps
    attend = attention.decode if isinstance(inputs, DecodeInputs) else attention.prefill
    plan = attention.plan(inputs, cache)
    rotation = rotations(params.rope, inputs.positions)
    x = F.embedding(inputs.input_ids, params.embed)
    for layer, layer_cache in zip(params.layers, cache.layers, strict=True):
        h = F.rms_norm(x, x.shape[-1:], layer.attn_norm, eps)
        qkv = _rotated_qkv(config, layer, h, rotation)
        cache.write(layer_cache, inputs.slot_mapping, qkv[:, config.num_heads :])
        attended = attend(qkv[:, : config.num_heads], layer_cache, plan)
        x.addmm_(attended.flatten(1), layer.o_proj)
        h = F.rms_norm(x, x.shape[-1:], layer.mlp_norm, eps)
        gate, up = torch.mm(h, layer.gate_up).chunk(2, -1)
        x.addmm_(F.silu(gate).mul_(up), layer.down)
    return F.rms_norm(x, x.shape[-1:], params.final_norm, eps)


def _rotated_qkv(config: ModelConfig, layer: LayerParams, h: Tensor, rotation: Tensor) -> Tensor:
    """Q, K and V of every token, Q and K normalised (Qwen3) and rotated: `[n, heads + 2 * kv_heads, head_dim]`."""
    product = torch.mm(h, layer.qkv) if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, h, layer.qkv)
    qkv = product.view(len(h), -1, config.head_dim)
    heads = config.num_heads + config.num_kv_heads  # Q and K are treated alike
    qk = qkv[:, :heads]
    turned = qk
    if layer.qk_norm is not None:  # over V too: a slice would be copied first
        turned = F.rms_norm(qkv, (config.head_dim,), None, config.rms_norm_eps)[:, :heads] * layer.qk_norm
    qk.copy_(torch.bmm(turned, rotation))
    return qkv


def lm_head(params: Params, hidden: Tensor, out: Tensor | None = None) -> Tensor:
    """Logits `[n, vocab]` of hidden states `[n, hidden]`: in the weights' dtype, or in float32 written into `out`.

    On CUDA a half-precision product accumulates in float32 anyway, and `out_dtype` stores that sum unrounded.
    """
    weight = params.lm_head.t()
    if out is None or weight.dtype == torch.float32:
        return torch.mm(hidden, weight, out=out)
    if hidden.device.type in ("cuda", "meta"):
        return torch.mm(hidden, weight, out_dtype=torch.float32, out=out)
    return out.copy_(torch.mm(hidden, weight))


def float_logits(params: Params, hidden: Tensor) -> Tensor:
    """Logits `[n, vocab]` in float32, as exact as the device gives them."""
    out = torch.empty(len(hidden), params.config.vocab_size, device=hidden.device)
    return lm_head(params, hidden, out=out)
