"""Device functions: what is done to scores and weights beside scale and mask.

Softcap (Gemma 2, arXiv 2408.00118, section 2): scores become `c * tanh(scores / c)`, after the
scale and before the mask. Dropout (arXiv 1207.0580): a weight is kept with probability `1 - p`.
Both are compiled in only where a call asks for them.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """Hyperbolic tangent by one exp2.

    `1 - 2 / (1 + exp(2x))` is right to a rounding of 1, also where exp overflows. `EXACT` adds a
    polynomial about 0 (Cephes' tanhf), so that small results keep their relative precision: fp32
    inputs show the difference, 16-bit ones cannot.
    """
    TWO_LOG2E: tl.constexpr = 2.8853900817779268
    result = 1.0 - 2.0 / (1.0 + tl.math.exp2(x * TWO_LOG2E))
    if EXACT:
        z = x * x
        series = -5.70498872745e-3 * z + 2.06390887954e-2
        series = (series * z - 5.37397155531e-2) * z + 1.33314422036e-1
        series = (series * z - 3.33332819422e-1) * z
        result = tl.where(tl.abs(x) < 0.625, series * x + x, result)
    return result


@triton.jit
def kept(seed_ptr, head, rows, cols, dropout_p):
    """Which weights dropout keeps, by Philox4x32-7 (Salmon et al., SC 2011, table 2).

    A function of (seed, head, row, column) alone, `head` counting through the batch: the forward
    kernel and both backward kernels draw the same mask, whatever their tiles.
    """
    seed = tl.load(seed_ptr)
    zero = rows * 0 + cols * 0
    random, _, _, _ = tl.philox(seed, cols + zero, rows + zero, head + zero, zero, 7)
    # 24 bits, so that the number is exact in fp32.
    return (random >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08 >= dropout_p
