"""The attention kernels; they know nothing of transformers."""
