"""The engine's own parts."""

from tinyengine.kv.blocks import pad_block_tables as pad_block_tables
from tinyengine.kv.blocks import slot_mapping as slot_mapping
