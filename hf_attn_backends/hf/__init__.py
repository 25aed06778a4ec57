"""Everything that knows transformers; it knows nothing of Triton."""
