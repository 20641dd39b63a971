"""The engine's own part."""

from tinyengine.model.attention import decode_attention as decode_attention
