"""The model: configuration, weights, tokenizer, and the transformer itself. Nothing here knows of graphs."""
