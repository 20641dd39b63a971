"""tinyengine: a reference inference engine in pure PyTorch, small enough to read in an evening."""

from tinyengine.engine import Engine, StepOutput
from tinyengine.errors import TinyEngineError
from tinyengine.request import Completion
from tinyengine.sampling import SamplingParams

__all__ = ["Completion", "Engine", "SamplingParams", "StepOutput", "TinyEngineError"]
