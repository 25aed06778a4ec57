"""`AttentionBackendCallback`: puts a Trainer's run on record, and stops one that is not as decided.

    trainer = Trainer(..., callbacks=[AttentionBackendCallback()])

It needs nothing else. Every rank runs it; rank 0 prints and writes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_attn_backends import registry as registries
from hf_attn_backends import witness
from hf_attn_backends.hf.session import Opening, RunSession
from hf_attn_backends.record import RunRecord


class AttentionBackendCallback(TrainerCallback, ExportableState):
    """Verifies, announces, records and judges the attention of a Trainer's runs.

    At train begin the live attention modules are compared with the decision of the selector, over
    all ranks, and one banner is printed to standard error. Before the first optimizer step changes
    a weight, the decided backend must have been seen to run. At the end the counts of every rank
    and the verdict are recorded. `evaluate()` and `predict()` outside training are runs as well.

    Args:
        allow_backend_change: Let a resumed run continue under another backend; the change is
            recorded.
        registry: The registry's file; default `<home>/runs/registry.jsonl`.

    Attributes:
        run_id: The run's id, stable over resumes; None before the first run.
        attempt: 1 for its first launch, one more for each resume.
        backend: The backend that was resolved.

    Raises:
        ExecutionMismatchError: At train begin or at the first step, on every rank.
        BackendChangedError: At train begin of a resumed run.
        RecordError: When the launch cannot be recorded.
    """

    def __init__(
        self,
        allow_backend_change: bool = False,
        registry: str | os.PathLike[str] | None = None,
    ) -> None:
        self.allow_backend_change = allow_backend_change
        self.registry = None if registry is None else os.fspath(registry)
        self.run_id: str | None = None
        self.attempt: int | None = None
        self.backend: str | None = None
        self._training: RunSession | None = None
        self._evaluating: RunSession | None = None
        self._announced = False
        self._idle_since = witness.snapshot()
        self._record: RunRecord | None = None

    @property
    def record(self) -> RunRecord | None:
        """The newest row of the newest run."""
        session = self._training or self._evaluating
        return session.record if session is not None else self._record

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; plain JSON."""
        return {
            "args": {"registry": self.registry},
            "attributes": {
                "run_id": self.run_id,
                "attempt": self.attempt,
                "backend": self.backend,
            },
        }

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember what was launched before the Trainer was made."""
        self._idle_since = witness.snapshot()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Verify, compare the ranks, record the launch, print the banner."""
        self._drop("a new run was begun in the same process")
        name = type(self).__name__
        saved = state.stateful_callbacks.get(name)
        # A checkpoint that was written without this callback has no entry, and the Trainer's next
        # save would raise KeyError on it.
        state.stateful_callbacks.setdefault(name, self.state())
        opening = Opening(
            registry=self._registry(),
            since=witness.snapshot(),
            saved=saved,
            resumed=state.global_step > 0,
            allow_change=self.allow_backend_change,
            collator=getattr(kwargs.get("train_dataloader"), "collate_fn", None),
        )
        self._training = self._begin(kwargs["model"], args, opening)
        self.run_id = self._training.record.run_id
        self.attempt = self._training.record.attempt
        self.backend = self._training.record.attention_backend

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to count a step; watch the first one."""
        if self._training is not None:
            self._training.watch.step_begins()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch that is followed by others of the same step."""
        if self._training is not None:
            self._training.watch.micro_batch_ends()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Confirm the first step before it changes a weight; count the others."""
        if self._training is not None:
            self._step(self._training, training=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record what ran, on every rank, and say the verdict."""
        if self._training is not None:
            self._training.finish()
            self._record, self._training = self._training.record, None
        self._idle_since = witness.snapshot()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Outside training: the first batch begins a run of its own."""
        if self._training is not None:
            return
        if self._evaluating is None:
            opening = Opening(
                registry=self._registry(),
                since=self._idle_since,
                mode="evaluation",
                collator=getattr(kwargs.get("eval_dataloader"), "collate_fn", None),
                announce=not self._announced,
            )
            self._evaluating = self._begin(kwargs["model"], args, opening)
        self._step(self._evaluating, training=False)
        self._evaluating.watch.step_begins()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Outside training: the end of the run."""
        if self._training is None and self._evaluating is not None:
            self._evaluating.finish()
            self._record, self._evaluating = self._evaluating.record, None
            self._idle_since = witness.snapshot()

    def on_predict(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        """As `on_evaluate`."""
        self.on_evaluate(args, state, control, **kwargs)

    def _registry(self) -> Path:
        return registries.registry_path() if self.registry is None else Path(self.registry)

    def _begin(self, model: Any, args: Any, opening: Opening) -> RunSession:
        session = RunSession(model, args, opening)
        self._announced = True
        return session

    def _step(self, session: RunSession, *, training: bool) -> None:
        verdict = session.watch.step_ends(training=training)
        if session.watch.steps == 1:
            try:
                session.first_step(verdict)
            except Exception:
                self._record, self._training, self._evaluating = session.record, None, None
                raise

    def _drop(self, why: str) -> None:
        """Close runs that an exception left open; only this rank is known to be here."""
        for session in (self._training, self._evaluating):
            if session is not None:
                session.interrupted(why)
        self._training = self._evaluating = None
