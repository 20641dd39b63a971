"""What a model looks like: read from a Hugging Face `config.json`, or one of the named presets.

Anything the engine does not implement is refused by its name: a model that runs wrong is worse than none.
Keys and defaults are those of `transformers` and its `configuration_*.py`, in the spelling of version 4
(`rope_theta`, `rope_scaling`, `torch_dtype`) and of version 5 (`rope_parameters`, `dtype`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyengine.errors import ConfigError, TinyEngineError

SIZE_KEYS = {  # field of ModelConfig: key in config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position": "max_position_embeddings",
}
ROPE_KINDS = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16")


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value}; it must be positive")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: `kind` is `default`, `linear` or `llama3`."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ConfigError(f"rope type {self.kind!r} is not implemented; this engine has {', '.join(ROPE_KINDS)}")
        for name in ("theta", "factor", "original_max_position"):
            _check_positive(f"rope {name}", getattr(self, name))
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError("llama3 rope needs 0 < low_freq_factor < high_freq_factor")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-family decoder, in the field's names. Raises ConfigError if sizes do not fit."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, key in SIZE_KEYS.items():
            _check_positive(key if name == key else f"{name} ({key} in config.json)", getattr(self, name))
        _check_positive("rms_norm_eps", self.rms_norm_eps)
        if self.num_heads % self.num_kv_heads:
            problem = f"is not a multiple of num_key_value_heads {self.num_kv_heads}"
            raise ConfigError(f"num_attention_heads {self.num_heads} {problem}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; rotary positions turn pairs of dimensions")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")

    @property
    def num_params(self) -> int:
        """Number of weights, as `transformers` counts them: a tied LM head is counted once."""
        hidden, heads, kv_heads = self.hidden_size, self.num_heads, self.num_kv_heads
        qkv = (heads + 2 * kv_heads) * self.head_dim
        layer = hidden * (qkv + heads * self.head_dim + 3 * self.intermediate_size + 2)
        layer += qkv * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        embeddings = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * layer + hidden

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read a folder's `config.json`, and `generation_config.json`, if any, for its end-of-sequence ids.

        Raises ConfigError, which names the file and the key: missing, malformed or not implemented.
        """
        folder, generation = Path(path), Path(path) / "generation_config.json"
        source = _Source(folder / "config.json", read_json(folder / "config.json", ConfigError))
        family = _family(source)
        source = _Source(source.path, {**family.defaults, **source.data})
        ends = _Source(generation, read_json(generation, ConfigError) if generation.exists() else {})
        _refuse_unimplemented(source, family)
        eos = ends.token_ids("eos_token_id") or source.token_ids("eos_token_id")
        try:
            config = _build(source, family, eos)
        except ConfigError as error:
            prefix = "" if str(source.path) in str(error) else f"{source.path}: "
            raise ConfigError(f"{prefix}{error}") from None
        _refuse_sliding_window(source, family, config)
        return config


@dataclass(frozen=True)
class _Family:
    """What sets one architecture apart; `defaults` are its config class's values for keys not stored."""

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)


_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", defaults={"eos_token_id": 2}),
    "MistralForCausalLM": _Family(
        "mistral",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
    ),
    "Qwen2ForCausalLM": _Family("qwen2", qkv_bias=True, defaults=_QWEN_DEFAULTS),
    "Qwen3ForCausalLM": _Family("qwen3", qk_norm=True, defaults={**_QWEN_DEFAULTS, "head_dim": 128}),
}


def read_json(path: Path, error: type[TinyEngineError]) -> dict[str, Any]:
    """The JSON object in a file. Raises `error`, with what to do, if there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "is missing" if path.parent.is_dir() else "cannot be read: there is no such folder"
        raise error(f"{path} {what}; give the folder of a downloaded Hugging Face model") from None
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is not valid JSON ({problem}); download or write it again") from None
    if not isinstance(data, dict):
        raise error(f"{path} holds a JSON {type(data).__name__}, not an object; download or write it again")
    return data


@dataclass(frozen=True)
class _Source:
    """Typed reading of one JSON object. A key that holds null reads as missing."""

    path: Path
    data: dict[str, Any]
    prefix: str = ""

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._typed(key, default, (int,), "an integer"))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._typed(key, default, (int, float), "a number"))

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self._typed(key, default, (bool,), "true or false"))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._typed(key, default, (str,), "a string"))

    def texts(self, key: str) -> list[str]:
        values = self._typed(key, [], (list,), "a list of strings")
        if not all(isinstance(value, str) for value in values):
            raise self.error(key, "must be a list of strings")
        return list(values)

    def section(self, key: str) -> _Source:
        return _Source(self.path, dict(self._typed(key, {}, (dict,), "an object")), f"{self.prefix}{key}.")

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.data.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise self.error(key, "must be a token id or a list of token ids")
        return tuple(ids)

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}: {self.prefix}{key} {problem}")

    def _typed(self, key: str, default: object, kinds: tuple[type, ...], words: str) -> Any:
        value = default if self.data.get(key) is None else self.data[key]
        if value is None:
            raise self.error(key, f"is missing; it must be {words}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.error(key, f"is {json.dumps(value)}; it must be {words}")
        if isinstance(value, (int, float)) and not abs(value) < 2**63:  # infinity and NaN are in Python's JSON
            raise self.error(key, "is out of range")
        return value


def _family(source: _Source) -> _Family:
    """The architecture that the file names, by `architectures` or, where that is missing, by `model_type`."""
    model_type = source.data.get("model_type")
    names = source.texts("architectures") or [n for n, f in _FAMILIES.items() if f.model_type == model_type]
    if names and names[0] in _FAMILIES:
        return _FAMILIES[names[0]]
    found = names[0] if names else f"of model_type {model_type}"
    raise source.error("architectures", f"{found} is not implemented, only {', '.join(_FAMILIES)}")


def _refuse_unimplemented(source: _Source, family: _Family) -> None:
    """Everything in the file that would change the numbers and that this engine does not do."""
    for key in ("quantization_config", "compression_config"):
        if source.data.get(key) is not None:
            method = source.section(key).text("quant_method", "unknown")
            raise source.error(key, f"asks for {method} weights; only unquantised checkpoints are implemented")
    for key in ("attention_bias", "mlp_bias"):
        if source.flag(key) and not (key == "attention_bias" and family.qkv_bias):
            raise source.error(key, f"true is not implemented for {family.model_type}")
    if source.text("hidden_act", "silu") not in ("silu", "swish"):
        raise source.error("hidden_act", f"{source.text('hidden_act')!r} is not implemented; only silu is")


def _refuse_sliding_window(source: _Source, family: _Family, config: ModelConfig) -> None:
    """A window as long as the longest sequence changes nothing; a shorter one, if used, is refused."""
    kinds = source.texts("layer_types")
    if other := set(kinds) - {"full_attention", "sliding_attention"}:
        raise source.error("layer_types", f"{', '.join(sorted(other))} is not implemented; only full_attention is")
    used = family.model_type == "mistral"
    if family.model_type in ("qwen2", "qwen3"):
        used = source.flag("use_sliding_window") and config.num_layers > source.integer("max_window_layers", 28)
        used = "sliding_attention" in kinds if kinds else used
    if not used or source.data.get("sliding_window") is None:
        return
    if (window := source.integer("sliding_window")) < config.max_position:
        problem = f"{window} is shorter than max_position_embeddings {config.max_position}"
        raise source.error("sliding_window", f"{problem}; sliding-window attention is not implemented")


def _build(source: _Source, family: _Family, eos: tuple[int, ...]) -> ModelConfig:
    num_heads, hidden_size = source.integer("num_attention_heads"), source.integer("hidden_size")
    _check_positive("num_attention_heads", num_heads)
    max_position = source.integer("max_position_embeddings")
    return ModelConfig(
        vocab_size=source.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=source.integer("intermediate_size"),
        num_layers=source.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=source.integer("num_key_value_heads", num_heads),
        head_dim=_head_dim(source, hidden_size, num_heads),
        max_position=max_position,
        rms_norm_eps=source.number("rms_norm_eps", 1e-6),
        rope=_rope(source, max_position),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tie_embeddings=source.flag("tie_word_embeddings"),  # false in all four families where it is missing
        dtype=_dtype(source),
        eos_token_ids=eos,
    )


def _head_dim(source: _Source, hidden_size: int, num_heads: int) -> int:
    if source.data.get("head_dim") is None and hidden_size % num_heads:
        problem = f"is missing, and hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}"
        raise source.error("head_dim", problem)
    return source.integer("head_dim", hidden_size // num_heads)


def _dtype(source: _Source) -> str:
    """The dtype that the weights were saved in; float32, which loses nothing, where the file does not say."""
    return source.text("dtype", source.text("torch_dtype", "float32")).removeprefix("torch.")


def _rope(source: _Source, max_position: int) -> RopeConfig:
    """Both spellings; where both are there, `rope_scaling` comes first, as in transformers."""
    rope = source.section("rope_scaling" if source.data.get("rope_scaling") else "rope_parameters")
    if "full_attention" in rope.data:  # one set a kind of layer, and full attention is the only kind here
        rope = rope.section("full_attention")
    for section in (rope, source):
        if section.number("partial_rotary_factor", 1.0) != 1.0:
            raise section.error("partial_rotary_factor", "other than 1 is not implemented")
    kind = rope.text("rope_type", rope.text("type", "default"))
    theta = rope.number("rope_theta", source.number("rope_theta", 10000.0))
    if kind not in ROPE_KINDS or kind == "default":
        return RopeConfig(theta, kind)
    if kind == "linear":
        return RopeConfig(theta, kind, rope.number("factor"))
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.integer("original_max_position_embeddings", max_position),
    )


PRESETS: dict[str, ModelConfig] = {
    "qwen3-0.6b": ModelConfig(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_position=40960,
        rope=RopeConfig(theta=1e6),
        qk_norm=True,
        tie_embeddings=True,
    ),
    "llama-3.2-1b": ModelConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position=131072,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=5e5, kind="llama3", factor=32.0),
        tie_embeddings=True,
    ),
    "glm-4.5-air-vocab": ModelConfig(  # the vocabulary and the context of SGLang #8579, on a small body
        vocab_size=151552,
        hidden_size=256,
        intermediate_size=512,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_position=131072,
    ),
    "tiny": ModelConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=512,
        dtype="float32",
    ),
}
"""Shapes by name, for runs with random weights: no end-of-sequence id, which would mean nothing there."""
