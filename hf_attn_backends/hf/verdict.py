"""Judges what was observed against what was decided; nothing here infers an execution.

`matched`: launches of the decided backend were seen, one or more for each of its layers.
`mismatch`: they were looked for in the right place and were not there, or too few were.
`not_observed`: nobody could look, or what was seen proves neither; always with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_attn_backends.witness import Launch

#: Backends that run outside this package: seen through torch.profiler, not through the witness.
TORCH_BACKENDS = frozenset({"eager", "sdpa", "flash_attention_2", "flash_attention_3"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict, and the observation that it rests on."""

    verdict: str
    reason: str


def counted_by_witness(backend: str) -> bool:
    """Whether this package launches the backend itself and so counts it."""
    return backend in ("auto", "triton_fa2", "triton_decode")


def same_backend(decided: str, seen: str) -> bool:
    """Whether launches under the name `seen` are what `decided` asks for."""
    if decided in ("auto", seen):
        return True
    hub = decided.lower().replace("_", "-")  # kernels-community/flash-attn2 and the like
    return "/" in hub and seen == f"flash_attention_{'3' if 'attn3' in hub else '2'}"


def judge(
    decided: str,
    needed: int,
    counts: Mapping[Launch, int],
    *,
    window: str,
    blind: str | None = None,
) -> Verdict:
    """Judge one window of observation.

    Args:
        decided: The resolved backend.
        needed: Forward launches that the window cannot do without: one a layer and micro-batch,
            or 0 where a model may leave modules out (a vision tower without an image).
        counts: Launches seen in the window.
        window: What was watched, for the reason: `the first micro-batch`.
        blind: Why nothing could be seen, or None.
    """
    forward: dict[str, int] = {}
    for launch, n in counts.items():
        if launch.phase == "forward":
            forward[launch.backend] = forward.get(launch.backend, 0) + n
    served = sum(n for name, n in forward.items() if same_backend(decided, name))
    others = {name: n for name, n in forward.items() if not same_backend(decided, name)}
    besides = "".join(f"; {name} launched {n}" for name, n in sorted(others.items()))
    if served and served >= needed:
        if decided == "auto":
            listed = ", ".join(f"{name} {n}" for name, n in sorted(forward.items()))
            decided = f"auto ({listed})"
        return Verdict("matched", f"{served} forward launches of {decided} in {window}{besides}")
    if blind is not None:
        return Verdict("not_observed", blind)
    if served:
        return Verdict(
            "mismatch",
            f"only {served} forward launches of {decided} in {window}, which needs {needed}"
            + besides,
        )
    if others or counted_by_witness(decided):
        return Verdict("mismatch", f"no launch of {decided} in {window}{besides}")
    return Verdict(
        "not_observed",
        f"torch.profiler saw no attention operator in {window}, neither of {decided} nor another",
    )


def merge(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of all ranks: the worst, with the ranks that gave it."""
    for worst in ("mismatch", "not_observed", "matched"):
        reasons: dict[str, list[int]] = {}
        for rank, each in enumerate(verdicts):
            if each.verdict == worst:
                reasons.setdefault(each.reason, []).append(rank)
        if reasons:
            break
    if len(verdicts) == 1 or (len(reasons) == 1 and worst == "matched"):
        return Verdict(worst, next(iter(reasons)))
    said = (f"rank {', '.join(map(str, r))}: {reason}" for reason, r in reasons.items())
    return Verdict(worst, "; ".join(said))
