"""The engine's own parts."""

from tinyengine.graphs.rungs import choose_bucket as choose_bucket
from tinyengine.graphs.static import pad as pad
