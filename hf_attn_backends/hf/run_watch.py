"""Watches one rank's run: what was launched, step by step, and whether it fits the decision."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from hf_attn_backends import witness
from hf_attn_backends.hf.launch_facts import LaunchFacts
from hf_attn_backends.hf.observe import OperatorWatch
from hf_attn_backends.hf.verdict import Verdict, counted_by_witness, judge
from hf_attn_backends.witness import Launch

_log = logging.getLogger(__name__)
_MAX_WATCHES = 4  # steps under torch.profiler until one of them compiles nothing
_MAX_FAULTS = 20


class RunWatch:
    """What one rank sees of its run.

    Attributes:
        backend: What was decided.
        counted: Whether the witness counts it; else torch.profiler watches one micro-batch.
        verdict: What the first step (or a later watched one) proved.
        faults: What contradicted the decision after that.
        steps: Optimizer steps, or evaluation batches.
    """

    def __init__(self, facts: LaunchFacts, since: dict[Launch, int]) -> None:
        self.backend = facts.backend.removeprefix("paged|")
        self.counted = counted_by_witness(self.backend)
        self.verdict = Verdict("not_observed", "no step was run")
        self.faults: list[str] = []
        self.steps = 0
        self._facts = facts
        self._since = since
        self._step_since = since
        self._trained: Counter[Launch] = Counter()
        self._watch = OperatorWatch()
        self._watches = 0
        self._micro_batches = 0
        self._seen: dict[Launch, int] = {}

    def step_begins(self) -> None:
        """Before the first micro-batch of a step, or between two evaluation batches."""
        self._step_since = witness.snapshot()
        self._micro_batches = 0
        again = self._watches == 0 or (self._watch.compiled and self._watches < _MAX_WATCHES)
        if not self.counted and again:
            self._watch = OperatorWatch()
            self._watch.start()
            self._watches += 1

    def micro_batch_ends(self) -> None:
        """Stop the profiler, if it runs: one micro-batch is enough, and its events take memory."""
        self._micro_batches += 1
        if self._watch.running:
            self._seen = self._watch.stop()

    def step_ends(self, *, training: bool) -> Verdict:
        """After the backward pass of a step and before its weights change."""
        self.micro_batch_ends()
        new = witness.since(self._step_since)
        if training:
            self._trained.update(new)
        self.steps += 1
        verdict = self._judge(new, f"step {self.steps}" if training else f"batch {self.steps}")
        if self.steps == 1 or self.verdict.verdict == "not_observed":
            self.verdict = verdict
        if self.steps > 1 and verdict.verdict == "mismatch" and not self._facts.replays:
            self._fault(verdict.reason)
        self._check_live()
        return verdict

    def result(self) -> tuple[Verdict, list[dict[str, Any]]]:
        """The rank's verdict on the whole run, and its counts."""
        if self._watch.running:
            self._seen = self._watch.stop()
        self._check_live()
        verdict = self.verdict
        if self.faults:
            verdict = Verdict("mismatch", "; ".join(self.faults[:3]))
        elif verdict.verdict == "matched" and self.counted and self.steps > 1:
            rows = witness.since(self._since)
            self._micro_batches = self.steps
            verdict = self._judge(rows, f"{self.steps} steps")
        return verdict, self._rows()

    def _rows(self) -> list[dict[str, Any]]:
        whole = witness.since(self._since)
        rows = [
            {**launch._asdict(), "launches": n, "in_training_steps": self._trained[launch]}
            for launch, n in sorted(whole.items())
        ]
        if not self.counted:
            seen = sorted(self._seen.items()) if not self._watch.compiled else []
            rows += [
                {**launch._asdict(), "launches": n, "window": "one micro-batch"}
                for launch, n in seen
            ]
        return rows

    def _judge(self, new: dict[Launch, int], window: str) -> Verdict:
        counts, blind = new, None
        needed = self._facts.must_launch
        if self.counted:
            needed *= self._micro_batches if not self._facts.replays else 1
        else:
            counts, blind = self._seen, self._watch.blind
            window = f"one micro-batch of step {self._watches}"
            if self._watch.compiled:
                counts = {}
                blind = "each step that was watched compiled something, so none is evidence"
            elif self._watches == 0:
                blind = "an evaluation is heard of after its first batch, and no second one came"
        return judge(self.backend, needed, counts, window=window, blind=blind)

    def _check_live(self) -> None:
        """Note a backend that was switched while the run went on."""
        for layer in self._facts.layers:
            if layer.now() != layer.implementation:
                self._fault(
                    f"{layer.name} was switched from {layer.implementation} to {layer.now()} "
                    f"by step {self.steps}"
                )
                return

    def _fault(self, what: str) -> None:
        if not self.faults:
            _log.error("attention no longer runs as decided (%s): %s", self.backend, what)
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(what)
