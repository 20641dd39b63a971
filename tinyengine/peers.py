"""transformers on the same weights or the same shape, for the benchmarks to compare with.

Ways to decode there: `generate` with a cache that grows or with a static one, which on CUDA compiles the forward pass,
that compiled pass alone, and continuous batching.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tinyengine.errors import ConfigError
from tinyengine.loading import ModelSource
from tinyengine.model.config import ModelConfig


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError("this comparison needs transformers: install it with pip install transformers") from None
    return transformers


def as_transformers(config: ModelConfig) -> dict[str, Any]:
    """A shape as the keys of transformers' configuration, `model_type` among them. Rope scaling costs no time."""
    return {
        "model_type": "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


def load_peer(model: str, device: torch.device, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    """A folder's weights, or a preset's shape with random ones, as a transformers model. ConfigError without it."""
    source = ModelSource.find(model)
    if device.type == "cuda":
        torch.compiler.reset()  # else a second batch size is compiled for any size, into slower kernels
    if source.folder is None:
        return shaped_peer(source.config, device, dtype, attention)
    options = dict(dtype=dtype, attn_implementation=attention)
    return _transformers().AutoModelForCausalLM.from_pretrained(source.folder, **options).to(device)  # in eval mode


def shaped_peer(config: ModelConfig, device: torch.device, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    """A transformers model of this shape with random weights."""
    library, keys = _transformers(), as_transformers(config)
    theirs = library.AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device(device):
        return library.AutoModelForCausalLM.from_config(theirs, dtype=dtype, attn_implementation=attention).eval()


def peer_generate(peer: Any, prompts: list[list[int]], static: bool = False) -> Callable[[int], object]:
    """Greedy `generate` for so many tokens, eos ignored; with a static cache, which is compiled on CUDA, if wanted."""
    ids = torch.tensor(prompts, device=peer.device)
    options: dict[str, Any] = dict(
        do_sample=False, eos_token_id=None, pad_token_id=0, attention_mask=torch.ones_like(ids)
    )
    options |= dict(cache_implementation="static") if static else {}
    return lambda count: peer.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)


def static_step(peer: Any, batch: int, context: int) -> Callable[[], object]:
    """One greedy decode step at `context` tokens over a static cache; on CUDA its forward pass is compiled.

    `reduce-overhead` captures CUDA graphs. What stands in the cache changes no time.
    """
    cache = _transformers().StaticCache(config=peer.config, max_cache_len=context)
    where = dict(device=peer.device)
    prompt = torch.ones(batch, 1, dtype=torch.int64, **where)
    with torch.no_grad():
        peer(prompt, past_key_values=cache, position_ids=torch.zeros_like(prompt), use_cache=True)  # makes its tensors
    forward = peer.forward
    if peer.device.type == "cuda":
        forward = torch.compile(forward, mode="reduce-overhead", fullgraph=True)
    position = torch.full((batch, 1), context - 1, **where)
    mask = torch.ones(batch, context, dtype=torch.int64, **where)
    token = prompt.clone()

    @torch.no_grad()
    def step() -> None:
        for layer in cache.layers:  # each step writes to the last place again
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(context - 1)
        options = dict(past_key_values=cache, position_ids=position, attention_mask=mask, use_cache=True)
        logits = forward(input_ids=token, **options).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    return step


def continuous_batching(
    peer: Any, prompts: Sequence[list[int]], lengths: Sequence[int], temperature: float, graphs: bool
) -> tuple[float, int]:
    """Serve the prompts, each for its own number of tokens, eos ignored; seconds, after a warm-up, and tokens."""
    generation = _transformers().generation
    sampling = dict(do_sample=True, temperature=temperature, eos_token_id=-1, pad_token_id=0)
    config = generation.GenerationConfig(max_new_tokens=max(lengths), **sampling)
    options = generation.ContinuousBatchingConfig(use_cuda_graph=graphs)
    manager = peer.init_continuous_batching(generation_config=config, continuous_batching_config=options)
    manager.start()
    try:
        _serve(manager, prompts[:4], [8] * len(prompts[:4]))
        begun = time.perf_counter()
        tokens = _serve(manager, prompts, lengths)
        return time.perf_counter() - begun, tokens
    finally:
        manager.stop(block=True)


def _serve(manager: Any, prompts: Sequence[list[int]], lengths: Sequence[int]) -> int:
    """Add all, wait for all; the tokens that came."""
    for prompt, length in zip(prompts, lengths, strict=True):
        manager.add_request(prompt, max_new_tokens=length)
    open_requests, tokens = len(prompts), 0
    while open_requests:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            open_requests -= 1
            tokens += len(result.generated_tokens)
        elif result is None and not manager.is_running():
            raise ConfigError("transformers' continuous batching stopped by itself: its log says why")
    return tokens
