"""The portable kernel: FlashAttention-2 in Triton."""
