"""The engine's own parts."""

from tinyengine.scheduler import admit as admit
from tinyengine.scheduler import preempt as preempt
