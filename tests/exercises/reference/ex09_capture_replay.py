"""The engine's own part."""

from tinyengine.graphs.static import CapturedStep as CapturedStep
