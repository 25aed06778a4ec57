"""What is tried of a call class: shapes, layouts and masks, small enough to try all of it.

Shapes: `B` batch, `H` query heads, `G` key/value heads, `M` query length, `N` key length, `D`
head dim. Lengths are multiples of a tile `t` (32 in Triton's interpreter, 128 on a GPU) and a bit,
so that every case has a ragged last tile and most have several tiles both ways. Between them the
cases of a class have GQA ratios 1, 3 and 4, lengths of 1, M < N, M = N and M > N, rows that see
nothing, strided inputs and outputs' gradients without memory of their own (zero strides).
"""

from __future__ import annotations

from dataclasses import dataclass

INTERPRETER_TILE, GPU_TILE = 32, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call that is measured.

    Attributes:
        name: Unique within its class.
        batch, heads, kv_heads, q_len, k_len: `B, H, G, M, N`.
        mask: How visibility is built (`inputs.py`): `full`, `causal`, `window`, or one of the
            named interval and dense masks.
        window: Keys a row sees, for `window`.
        layout: Memory of query, key and value: `plain` `[B, H, M, D]`; `strided`, heads inside
            rows and rows apart, as projections give them; `skewed`, likewise, with rows that begin
            at odd multiples of 16 bytes (fewer cases of it, for Triton compiles them apart);
            `copied`, whose last dimension is not contiguous.
        grad: `random`, or `ones`: one number with zero strides, the gradient of a sum.
        steepness: Factor of the default scale; a large one makes the softmax nearly one-hot and
            its scores large enough to overflow without the running maximum.
        repeat: Whether the kernel runs twice and must give the same bits.
    """

    name: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    mask: str
    window: int | None = None
    layout: str = "plain"
    grad: str = "random"
    steepness: float = 1.0
    repeat: bool = False


def _case(name: str, b: int, h: int, g: int, m: int, n: int, mask: str, **kwargs: object) -> Case:
    return Case(
        name=name, batch=b, heads=h, kv_heads=g, q_len=m, k_len=n, mask=mask,
        **kwargs,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def _small(kind: str, t: int) -> list[Case]:
    """The cases of a visibility kind, for both devices."""
    if kind == "full":
        return [
            _case("odd", 1, 6, 2, t + 5, 2 * t + 3, "full", layout="strided"),
            _case("tall", 1, 2, 2, 2 * t + 1, t - 1, "full"),
            _case("decode", 2, 4, 1, 1, t + 1, "full", grad="ones", steepness=30.0, repeat=True),
            _case("single", 1, 2, 2, 1, 1, "full", layout="copied"),
        ]
    if kind == "causal":
        return [
            _case("square", 1, 2, 2, 2 * t + 3, 2 * t + 3, "causal", repeat=True),
            _case("chunk", 1, 6, 2, t + 5, 2 * t + 3, "causal", layout="skewed"),
            _case("tall", 1, 4, 1, t + 9, 5, "causal", grad="ones"),
            _case("few", 2, 4, 1, 5, t + 1, "causal", layout="strided"),
            _case("single", 1, 2, 2, 1, 1, "causal", layout="copied"),
        ]
    if kind == "window":
        n = t + 3
        return [
            _case("narrow", 1, 2, 2, 2 * t + 3, 2 * t + 3, "window", window=t // 2 + 1),
            _case("chunk", 1, 6, 2, t + 5, 2 * t + 3, "window", window=t + 1, layout="strided"),
            _case("tall", 1, 4, 1, t + 9, 5, "window", window=2, grad="ones"),
            _case("one", 1, 2, 2, 7, 7, "window", window=1, layout="copied"),
            _case("decode", 2, 4, 1, 1, t + 3, "window", window=t // 2 + 1, repeat=True),
            _case("few", 1, 6, 2, 5, t + 1, "window", window=t // 2, layout="strided"),
            _case("edge - 1", 1, 1, 1, n, n, "window", window=n - 1, repeat=True),
            _case("edge", 1, 1, 1, n, n, "window", window=n),
            _case("edge + 1", 1, 1, 1, n, n, "window", window=n + 1),
        ]  # fmt: skip
    if kind == "intervals":
        return [
            _case("packed", 1, 4, 2, 2 * t + 3, 2 * t + 3, "packed"),
            _case("left padding", 2, 4, 1, t + 5, t + 5, "left_padding", layout="strided"),
            _case("scattered", 1, 3, 1, t + 5, 2 * t + 3, "scattered", grad="ones"),
            _case("decode", 2, 2, 2, 1, t + 1, "left_padding", layout="copied", repeat=True),
        ]
    if kind == "dense":
        return [
            _case("holes", 1, 6, 2, t + 5, 2 * t + 3, "holes_per_head", layout="strided"),
            _case("broadcast", 2, 3, 1, t + 1, t + 1, "holes_broadcast", grad="ones"),
            _case("decode", 2, 4, 1, 1, t + 1, "holes_per_head", layout="copied",
                  repeat=True),
        ]  # fmt: skip
    raise ValueError(f"no cases for visibility {kind!r}")


# A GPU also gets lengths at which the pipelined and warp-specialised loops are in their steady
# state, aligned to the tiles and not.
_LONG_MASK = {"intervals": "packed", "dense": "holes_per_head"}


def _long(kind: str) -> list[Case]:
    mask, window = _LONG_MASK.get(kind, kind), 300 if kind == "window" else None
    return [
        _case("long", 2, 8, 2, 1024, 1024, mask, window=window, layout="strided", repeat=True),
        _case("long odd", 1, 4, 1, 1031, 1031, mask, window=window, repeat=True),
        _case("long chunk", 1, 8, 2, 520, 2051, mask if kind != "intervals" else "scattered",
              window=window, steepness=8.0),
    ]  # fmt: skip


def cases_for(visibility: str, device_type: str) -> list[Case]:
    """The cases of one visibility kind.

    Args:
        visibility: One of `kernels.visibility.KINDS`.
        device_type: `cpu` (Triton's interpreter, where a tile costs milliseconds) or `cuda`.
    """
    if device_type == "cpu":
        return _small(visibility, INTERPRETER_TILE)
    return _small(visibility, GPU_TILE) + _long(visibility)
