"""The engine's own part."""

from tinyengine.model.transformer import rotations as rotations
