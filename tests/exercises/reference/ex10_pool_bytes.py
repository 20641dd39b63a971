"""The engine's own parts."""

from tinyengine.graphs.arena import round_size as round_size
from tinyengine.graphs.arena import segment_size as segment_size
from tinyengine.graphs.rungs import capture_order as capture_order
