"""Graph capture without a GPU: the allocator's rules (arena), what a capture sees (recorder), a CPU graph (tape)."""
