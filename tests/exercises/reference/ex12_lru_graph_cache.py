"""The engine's own part."""

from tinyengine.graphs.lru import GraphCache as GraphCache
