"""The engine's own part."""

from tinyengine.sampling import sampling_weights as sampling_weights
