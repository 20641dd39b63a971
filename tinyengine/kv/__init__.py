"""The paged KV cache: which blocks belong to which sequence (blocks), and the tensors behind them (cache)."""
