"""The engine's own part."""

from tinyengine.kv.blocks import BlockAllocator as BlockAllocator
