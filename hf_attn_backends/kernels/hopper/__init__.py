"""Attention for sm_90 (H100, H200) in Gluon: TMA, wgmma, warp specialisation.

Importing this package imports nothing; `forward` and `backward` import Triton.
"""
