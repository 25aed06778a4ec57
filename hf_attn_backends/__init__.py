"""Attention for Hugging Face transformers that carries its own proof."""
