"""tinyengine: a reference inference engine in pure PyTorch, small enough to read in an evening.

What is named here is imported when it is first used: PyTorch takes seconds, and `--help` should not.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyengine.engine import Engine, StepOutput
    from tinyengine.errors import TinyEngineError
    from tinyengine.request import Completion
    from tinyengine.sampling import SamplingParams

__all__ = ["Completion", "Engine", "SamplingParams", "StepOutput", "TinyEngineError"]

_HOMES = {"Engine": "engine", "StepOutput": "engine", "TinyEngineError": "errors", "Completion": "request"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tinyengine' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tinyengine.{_HOMES.get(name, 'sampling')}"), name)
