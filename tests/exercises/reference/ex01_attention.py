"""The engine's own part."""

from tinyengine.model.attention import causal_attention as causal_attention
