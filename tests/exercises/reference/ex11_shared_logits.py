"""The engine's own part."""

from tinyengine.graphs.static import LogitsBuffer as LogitsBuffer
