"""Weights: read from a Hugging Face safetensors checkpoint, or random ones of the same shapes.

One table says which stored tensor goes where. Files are memory-mapped and each tensor is copied once, to its
place in the fused matrices, so a load needs the memory of the weights and no more. Pickles stay shut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tinyengine.device import free_bytes
from tinyengine.errors import CheckpointError
from tinyengine.model.config import ModelConfig, read_json
from tinyengine.model.transformer import LayerParams, Params, rope_table

_FLOAT_TYPES = ("F64", "F32", "BF16", "F16")
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CONVERT = "AutoModelForCausalLM.from_pretrained({source}).save_pretrained(new_folder) of transformers"


def load_params(
    folder: str | Path, config: ModelConfig, device: torch.device | str, dtype: torch.dtype, max_len: int
) -> Params:
    """Read `model.safetensors`, or the shards of `model.safetensors.index.json`, onto a device.

    dtype: what every weight is converted to; max_len: positions in the rotary table. Raises CheckpointError,
    which names the file or the tensor, if anything is missing, unexpected, misshaped, quantised or damaged.
    """
    files = _weight_files(Path(folder))
    params = _allocate(config, torch.device(device), dtype, max_len)
    places = destinations(params)
    stored: dict[str, Path] = {}
    for path in files:
        with _opened(path) as handle:
            for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                if name in stored:
                    raise CheckpointError(f"{name} is stored twice: in {stored[name]} and in {path}")
                stored[name] = path
                if name in places:
                    _copy(handle, name, places[name], path)
    _check_complete(places, stored, Path(folder), config)
    if _HEAD in stored and _HEAD not in places:
        _check_tied_head(stored[_HEAD], params)
    return params


def random_params(
    config: ModelConfig, device: torch.device | str, dtype: torch.dtype, max_len: int, seed: int = 0
) -> Params:
    """Normally distributed weights of deviation 0.02, and norms of 1, made on the device (`meta` too)."""
    device = torch.device(device)
    params = _allocate(config, device, dtype, max_len)
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    for name, place in destinations(params).items():
        if name.endswith("norm.weight"):
            place.fill_(1.0)
        else:
            place.normal_(0.0, 0.02, generator=generator)
    return params


def destinations(params: Params) -> dict[str, Tensor]:
    """Where each stored tensor goes: Hugging Face name -> a view of the weights.

    Q, K and V are parts of one matrix, gate and up of another; all are stored as `[out, in]`, so these views are
    transposed. A place has the stored shape, except that of `q_norm` and `k_norm`, whose `[head_dim]` fills every row.
    A tied LM head has no place of its own.
    """
    places = {_EMBED: params.embed, "model.norm.weight": params.final_norm}
    if params.lm_head is not params.embed:
        places[_HEAD] = params.lm_head
    for i, layer in enumerate(params.layers):
        for name, place in _layer_destinations(params.config, layer).items():
            places[f"model.layers.{i}.{name}"] = place
    return places


def _layer_destinations(config: ModelConfig, layer: LayerParams) -> dict[str, Tensor]:
    rows = [config.num_heads * config.head_dim] + 2 * [config.num_kv_heads * config.head_dim]
    gate, up = layer.gate_up.t().chunk(2)
    places = {
        "input_layernorm.weight": layer.attn_norm,
        "self_attn.o_proj.weight": layer.o_proj.t(),
        "post_attention_layernorm.weight": layer.mlp_norm,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": layer.down.t(),
    }
    for kind, fused in (("weight", layer.qkv.t()), ("bias", layer.qkv_bias)):
        if fused is not None:
            for letter, part in zip("qkv", torch.split(fused, rows), strict=True):
                places[f"self_attn.{letter}_proj.{kind}"] = part
    if layer.qk_norm is not None:
        places["self_attn.q_norm.weight"] = layer.qk_norm[: config.num_heads]
        places["self_attn.k_norm.weight"] = layer.qk_norm[config.num_heads :]
    return places


def _lie_as_stored(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrices lie as `[out, in]` in memory, as in a checkpoint, or as they are used.

    As used, cuBLAS takes half the time for o_proj of one row (Qwen3-0.6B on an H200: 5.9 us, 12.7 as stored), and a
    CPU 0.6 to 0.9 of it for 8 rows or more of small float32 matrices. Large ones, and half precision, take up
    to 2.4 times as long on a CPU that way, and 5 times with one thread.
    """
    return device.type == "cpu" and (dtype != torch.float32 or config.hidden_size > 512)


@torch.inference_mode(False)  # weights may be updated in place later, wherever this is called from
def _allocate(config: ModelConfig, device: torch.device, dtype: torch.dtype, max_len: int) -> Params:
    """Every weight, uninitialised, and the rotary table. Raises CheckpointError if there is no room for them.

    Asked beforehand: a host often promises memory that it does not have, and kills who then uses it.
    """
    size = config.num_params * dtype.itemsize + 2 * max_len * config.head_dim * dtype.itemsize
    if device.type != "meta" and size > (free := free_bytes(device)):
        problem = f"weights and rotary table need {size:,} bytes, and {device} has {free:,} free"
        raise CheckpointError(f"{problem}: take a smaller model, dtype or max_model_len")

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    def matrix(rows: int, columns: int) -> Tensor:
        return empty(columns, rows).t() if _lie_as_stored(config, device, dtype) else empty(rows, columns)

    hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    qk_heads, qkv = heads + config.num_kv_heads, (heads + 2 * config.num_kv_heads) * dim
    layers = tuple(
        LayerParams(
            attn_norm=empty(hidden),
            qkv=matrix(hidden, qkv),
            qkv_bias=empty(qkv) if config.qkv_bias else None,
            qk_norm=empty(qk_heads, dim) if config.qk_norm else None,
            o_proj=matrix(heads * dim, hidden),
            mlp_norm=empty(hidden),
            gate_up=matrix(hidden, 2 * config.intermediate_size),
            down=matrix(config.intermediate_size, hidden),
        )
        for _ in range(config.num_layers)
    )
    embed = empty(config.vocab_size, hidden)
    lm_head = embed if config.tie_embeddings else empty(config.vocab_size, hidden)
    return Params(config, embed, layers, empty(hidden), lm_head, rope_table(config, max_len, device, dtype))


def _weight_files(folder: Path) -> list[Path]:
    """The single file or, as in transformers where that is missing, the shards that the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(_why_no_weights(folder))
    shards = read_json(index, CheckpointError).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
        raise CheckpointError(f"{index}: weight_map must be an object of tensor names and file names")
    files = [folder / name for name in sorted(set(shards.values()))]
    for path in files:
        if path.parent != folder or not path.is_file():
            raise CheckpointError(f"{index} names the shard {path.name}, which is not in the folder; download it again")
    return files


def _why_no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}; give the path of a downloaded model"
    start = f"{folder} has no model.safetensors and no model.safetensors.index.json"
    if pickles := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
        how = _CONVERT.format(source="folder")
        return f"{start}; {pickles[0].name} is a pickle, which may run code when read: convert it with {how}"
    if ggufs := sorted(folder.glob("*.gguf")):
        how = _CONVERT.format(source=f'folder, gguf_file="{ggufs[0].name}"')
        return f"{start}; {ggufs[0].name} is not read here: convert it with {how}"
    return f"{start}; download the weights in safetensors form"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A memory-mapped safetensors file; damage, whenever it shows, is a CheckpointError naming the file."""
    try:
        with safe_open(path, framework="pt", device="cpu") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); if it is cut short, download it again") from None


def _copy(handle: Any, name: str, place: Tensor, path: Path) -> None:
    """Copy one stored tensor to its place, converted on the way."""
    stored = handle.get_slice(name)
    if stored.get_dtype() not in _FLOAT_TYPES:
        kinds = ", ".join(_FLOAT_TYPES)
        problem = f"has dtype {stored.get_dtype()}, not one of {kinds}"
        raise CheckpointError(f"{path}: {name} {problem}; quantised weights are not implemented")
    expected = list(place.shape[-1:] if name.endswith("norm.weight") else place.shape)
    if stored.get_shape() != expected:
        problem = f"has shape {stored.get_shape()}, and config.json asks for {expected}"
        raise CheckpointError(f"{path}: {name} {problem}; are the two of one model?")
    place.copy_(handle.get_tensor(name))


def _check_complete(places: dict[str, Tensor], stored: dict[str, Path], folder: Path, config: ModelConfig) -> None:
    """Every place filled, and nothing stored that has no place and is no known leftover."""
    if missing := places.keys() - stored.keys():
        hint = "; is tie_word_embeddings wrong in config.json?" if missing == {_HEAD} else ""
        raise CheckpointError(f"{folder} lacks {_listed(missing)}, which config.json asks for{hint}")
    leftovers = {_HEAD} if config.tie_embeddings else set()
    unexpected = {n for n in stored.keys() - places.keys() - leftovers if not n.endswith("rotary_emb.inv_freq")}
    if unexpected:
        raise CheckpointError(f"{folder} stores {_listed(unexpected)}, for which config.json has no use")


def _listed(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return first + (f" and {len(rest)} more ({', '.join(rest[:3])}{' ...' if rest[3:] else ''})" if rest else "")


def _check_tied_head(path: Path, params: Params, rows: int = 4096) -> None:
    """A tied model may store its LM head as well, if it is the embedding; compared some rows at a time."""
    with _opened(path) as handle:
        stored = handle.get_slice(_HEAD)
        same = stored.get_shape() == list(params.embed.shape)
        for start in range(0, params.embed.shape[0] if same and params.device.type != "meta" else 0, rows):
            part = stored[start : start + rows].to(params.device, params.dtype)
            same = same and torch.equal(part, params.embed[start : start + rows])
    if not same:
        problem = f"differs from {_EMBED}, and config.json says that they are tied"
        raise CheckpointError(f"{path}: {_HEAD} {problem}; set tie_word_embeddings to false to use it")
