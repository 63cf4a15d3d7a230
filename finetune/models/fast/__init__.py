"""The fast block: LLaMA-shaped decoder layers of transformers run through this toolkit's own operations."""
