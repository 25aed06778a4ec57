"""One run on record: verified, compared over ranks, written down, announced, closed.

The order is fixed: every rank verifies its live model and the ranks compare; the launch row is on
the disk; only then the banner is printed. Nothing after that stops training, except a first step
that proves the decision wrong.
"""

from __future__ import annotations

import atexit
import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from hf_attn_backends import record as records
from hf_attn_backends import registry, report, witness
from hf_attn_backends.errors import ExecutionMismatchError, RecordError, compose
from hf_attn_backends.hf import lineage, ranks, shares, trackers
from hf_attn_backends.hf.launch_facts import collect, reading
from hf_attn_backends.hf.run_watch import RunWatch
from hf_attn_backends.hf.verdict import Verdict, merge
from hf_attn_backends.record import RunRecord
from hf_attn_backends.witness import Launch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a session begins.

    Attributes:
        registry: The registry's path.
        since: The witness's counts that are not this run's.
        saved: What the checkpoint keeps of the callback, or None.
        resumed: Whether training continues from a checkpoint.
        allow_change: Whether a resumed run may change its backend.
        mode: `train` or `evaluation`.
        collator: The data collator, if it is visible.
        announce: Whether the banner is printed.
    """

    registry: Path
    since: dict[Launch, int]
    saved: Any = None
    resumed: bool = False
    allow_change: bool = False
    mode: str = "train"
    collator: Any = None
    announce: bool = True


class RunSession:
    """A run from its launch to its end.

    Attributes:
        record: The newest row (written by rank 0, the same on all).
        watch: What this rank sees.
    """

    def __init__(self, model: nn.Module, args: Any, opening: Opening) -> None:
        """Verify on every rank, compare, record, announce.

        Raises:
            ExecutionMismatchError: The live model or another rank contradicts the decision.
            BackendChangedError: A resumed run would change its backend.
            RecordError: The launch cannot be recorded.
        """
        facts = ranks.all_or_none(lambda: collect(model, args, opening.collator, opening.mode))
        digests = ranks.gather(facts.digest)
        if reasons := ranks.disagreements(digests):
            raise ExecutionMismatchError(
                compose("the ranks do not run the same attention", reasons,
                        fix="the same attn_implementation, packages and gate for every rank")
            )  # fmt: skip
        self._rank, self._size = ranks.world()
        self._args = args
        folder = getattr(args, "output_dir", None)
        copy = Path(folder) / registry.COPY_NAME if folder else None
        self._paths = (opening.registry, copy) if copy else (opening.registry,)
        mine = ranks.all_or_none(
            lambda: lineage.trace(opening.saved, opening.resumed, copy, opening.registry)
        )
        line = ranks.gather(mine)[0]
        changed = lineage.check_backend(line, facts.backend, opening.allow_change)
        fields = dict(facts.fields)
        if changed:
            fields["attention_reason"] += f"; {changed}"
        dist = {"rank": 0, "world_size": self._size, "launcher": ranks.launcher(), "agree": True}
        dist["digests"] = digests if self._size > 1 else "one process"
        self.record = RunRecord(
            run_id=line.run_id,
            attempt=line.attempt,
            event=line.event,
            seq=0,
            attention_executed="unknown: no step has run yet",
            attention_verdict="not_observed",
            dist=dist,
            **fields,
        )
        self.watch = RunWatch(facts, opening.since)
        self._reading = reading(facts, self.watch.counted)
        self._layers = len(facts.layers)
        ranks.all_or_none(lambda: self._append(self.record))
        if self._rank == 0:
            atexit.register(self.interrupted, "the process ended before the run did")
            if opening.announce:
                self._say(report.banner(self.record, opening.registry, self._reading))
            trackers.mirror(self.record, args)

    def first_step(self, mine: Verdict) -> None:
        """Confirm, on every rank, that the decided backend really ran.

        Raises:
            ExecutionMismatchError: On every rank, when any of them saw something else.
        """
        merged = merge(ranks.gather(mine))
        stopped = merged.verdict == "mismatch"
        self._write("interrupted" if stopped else "first_step", merged, [self.watch.result()[1]])
        if not stopped:
            if self._rank == 0:  # trackers close their runs before the end row is written
                trackers.mirror(self.record, self._args)
            return
        atexit.unregister(self.interrupted)
        raise ExecutionMismatchError(
            compose(
                f"attention was decided to run {self.watch.backend!r}, and the first step did not",
                [merged.reason],
                works="the decision as it was made at loading",
                fix="take away what steers the model elsewhere: attn_backend(...) contexts, "
                "HF_ATTN_BACKEND, writes to config._attn_implementation",
            )
        )

    def finish(self) -> None:
        """Gather every rank's counts, write the end row, say the verdict."""
        everyone = ranks.gather(self.watch.result())
        atexit.unregister(self.interrupted)
        self._write("end", merge([verdict for verdict, _ in everyone]), [c for _, c in everyone])
        if self._rank == 0:
            self._say(report.verdict_text(self.record))
            trackers.mirror(self.record, self._args)

    def interrupted(self, why: str) -> None:
        """Write the end of a run that did not reach it, with this rank's counts alone."""
        atexit.unregister(self.interrupted)
        kind = getattr(sys, "last_type", None)
        verdict, counts = self.watch.result()
        reason = f"{why}{f' ({kind.__name__})' if kind else ''}; until then: {verdict.reason}"
        self._write("interrupted", Verdict(verdict.verdict, reason), [counts])

    def _write(self, event: str, verdict: Verdict, by_rank: list[list[dict[str, Any]]]) -> None:
        """Write a later row; a failure is said and does not stop training."""
        executed = {
            "witness": "counter" if self.watch.counted else "torch.profiler",
            "reason": verdict.reason,
            "reading": self._reading,
            "layers": self._layers,
            "steps": self.watch.steps,
            "by_rank": by_rank,
            "served_by": shares.served_by(by_rank),
            "ranks_counted": f"{len(by_rank)} of {self._size}",
            "substitutions": [[*key, n] for key, n in sorted(witness.substitutions().items())],
        }
        fresh = RunRecord(**{f: getattr(self.record, f) for f in _CARRIED})
        self.record = replace(
            fresh,
            event=event,
            seq=self.record.seq + 1,
            attention_executed=executed,
            attention_verdict=verdict.verdict,
        )
        try:
            self._append(self.record)
        except (RecordError, OSError) as error:
            _log.error("the %s of run %s is not on record: %s", event, self.record.run_id, error)

    def _append(self, record: RunRecord) -> None:
        if self._rank == 0:
            registry.append(record, paths=self._paths)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201  the banner's place is stderr


_CARRIED = tuple(
    name for name in records.RunRecord.__dataclass_fields__ if name not in ("record_id", "time_utc")
)
