"""From the names that a user gives (model, device, dtype) to a configuration, a tokenizer and a place to run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from tinyengine.errors import ConfigError
from tinyengine.model.checkpoint import load_params, random_params
from tinyengine.model.config import DTYPES, PRESETS, ModelConfig
from tinyengine.model.tokenizer import ByteTokenizer, TextTokenizer, Tokenizer
from tinyengine.model.transformer import Params

EMBEDDED_MODEL = "stories-7m"


def embedded_folder() -> Path:
    """Where the embedded model lies: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "weights" / EMBEDDED_MODEL
    return installed if installed.is_dir() else package.parent / "weights" / EMBEDDED_MODEL


@dataclass(frozen=True)
class ModelSource:
    """A model that was found but not loaded: its shape, its tokenizer, and its folder (None for a preset)."""

    config: ModelConfig
    tokenizer: TextTokenizer
    folder: Path | None

    @classmethod
    def find(cls, model: str | Path) -> ModelSource:
        """A folder in Hugging Face layout, the embedded model's name, or a preset's. ConfigError if none of these."""
        if not isinstance(model, str | Path):
            raise ConfigError(f"a model is a folder or a name; got {model!r}")
        if str(model) in PRESETS:
            return cls(PRESETS[str(model)], ByteTokenizer(), None)
        folder = embedded_folder() if str(model) == EMBEDDED_MODEL else Path(model)
        if not os.path.isdir(folder):  # Path.is_dir raises where a name is too long
            known = ", ".join([EMBEDDED_MODEL, *PRESETS])
            raise ConfigError(
                f"there is no model folder {str(model)!r}: give a folder with a config.json, or one of {known}"
            )
        return cls(ModelConfig.from_folder(folder), Tokenizer.from_folder(folder), folder)

    def load(self, device: torch.device, dtype: torch.dtype, max_len: int) -> Params:
        """The weights on the device; a preset's are random. A rotary table for `max_len` positions."""
        if self.folder is None:
            return random_params(self.config, device, dtype, max_len)
        return load_params(self.folder, self.config, device, dtype, max_len)


def pick_dtype(name: str, device: torch.device, config: ModelConfig) -> torch.dtype:
    """The dtype called `name`; `auto` is float32 on the CPU and the checkpoint's own elsewhere.

    A GPU older than sm80 has no fast bfloat16, so `auto` takes float16 there.
    """
    name = str(name).removeprefix("torch.")  # a torch.dtype says its name so
    if name == "auto":
        name = "float32" if device.type == "cpu" else config.dtype
        old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
        name = "float16" if name == "bfloat16" and old else name
    if name not in DTYPES:
        raise ConfigError(f"there is no dtype {name!r}: choose auto, {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
