"""Resumed runs keep their id, count their attempts and keep their backend, or are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hf_attn_backends import registry
from hf_attn_backends.errors import BackendChangedError
from hf_attn_backends.hf.callback import AttentionBackendCallback
from hf_attn_backends.hf.lineage import trace

STEPS = {"save_strategy": "steps", "save_steps": 1, "save_only_model": False}


@pytest.fixture
def train(make_model, make_trainer, tmp_path: Path):
    def run(callbacks: list, name: str = "sdpa", *, steps: int, resume: int | None = None, **more):
        trainer = make_trainer(make_model(name), callbacks, max_steps=steps, **STEPS, **more)
        checkpoint = None if resume is None else str(tmp_path / "out" / f"checkpoint-{resume}")
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    return run


def saved_state(tmp_path: Path, step: int) -> dict:
    path = tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json"
    return json.loads(path.read_text())["stateful_callbacks"]


def test_a_resume_keeps_the_run_and_counts_the_attempt(train, tmp_path: Path) -> None:
    first = AttentionBackendCallback()
    train([first], steps=2)
    kept = saved_state(tmp_path, 1)["AttentionBackendCallback"]["attributes"]
    assert kept == {"run_id": first.run_id, "attempt": 1, "backend": "sdpa"}
    for attempt in (2, 3):  # twice from the same checkpoint: still another attempt
        again = AttentionBackendCallback()
        train([again], steps=2, resume=1)
        assert (again.run_id, again.attempt) == (first.run_id, attempt)
    rows, _ = registry.read()
    launches = [(row.event, row.attempt) for row in rows if row.seq == 0]
    assert launches == [("launch", 1), ("resume", 2), ("resume", 3)]
    assert rows[-1].attention_verdict == "matched"


def test_a_new_training_is_a_new_run(train) -> None:
    callback = AttentionBackendCallback()
    trainer = train([callback], steps=1)
    first = callback.run_id
    trainer.train()
    assert callback.run_id != first
    assert callback.attempt == 1


def test_a_changed_backend_is_refused_before_the_first_step(train, tmp_path: Path) -> None:
    train([AttentionBackendCallback()], steps=1)
    rows = len(registry.read()[0])
    with pytest.raises(BackendChangedError) as caught:
        train([AttentionBackendCallback()], "eager", steps=2, resume=1)
    for part in ("'eager'", "its attempt 1 ran under 'sdpa'", "allow_backend_change=True"):
        assert part in str(caught.value)
    assert len(registry.read()[0]) == rows
    assert not (tmp_path / "out" / "checkpoint-2").exists()


def test_an_allowed_change_is_recorded(train) -> None:
    train([AttentionBackendCallback()], steps=1)
    callback = AttentionBackendCallback(allow_backend_change=True)
    train([callback], "eager", steps=2, resume=1)
    assert callback.attempt == 2
    assert "under another backend than before (sdpa)" in callback.record.attention_reason
    assert callback.record.attention_backend == "eager"


def test_a_checkpoint_of_a_run_without_the_callback(train, tmp_path: Path) -> None:
    """The Trainer's next save would raise KeyError for a callback that the checkpoint misses."""
    train([], steps=1)
    assert "AttentionBackendCallback" not in saved_state(tmp_path, 1)
    callback = AttentionBackendCallback()
    train([callback], steps=2, resume=1)
    kept = saved_state(tmp_path, 2)["AttentionBackendCallback"]["attributes"]
    assert kept["run_id"] == callback.run_id
    assert (callback.attempt, callback.record.event) == (1, "end")
    assert registry.read()[0][0].event == "resume"


def test_a_subclass_has_its_own_entry(train, tmp_path: Path) -> None:
    class Mine(AttentionBackendCallback):
        pass

    train([AttentionBackendCallback()], steps=1)
    callback = Mine()
    train([callback], steps=2, resume=1)
    assert saved_state(tmp_path, 2)["Mine"]["attributes"]["attempt"] == callback.attempt == 2


def test_without_state_or_registry_the_runs_own_copy_is_read(train, home: Path, tmp_path) -> None:
    first = AttentionBackendCallback()
    train([first], steps=1)
    shutil.rmtree(home)
    state = tmp_path / "out" / "checkpoint-1" / "trainer_state.json"
    content = json.loads(state.read_text())
    del content["stateful_callbacks"]["AttentionBackendCallback"]
    state.write_text(json.dumps(content))
    again = AttentionBackendCallback()
    train([again], steps=2, resume=1)
    assert (again.run_id, again.attempt) == (first.run_id, 2)
    with pytest.raises(BackendChangedError):
        train([AttentionBackendCallback()], "eager", steps=2, resume=1)


def test_the_trainer_restores_the_callback_itself(train) -> None:
    first = AttentionBackendCallback()
    train([first], steps=1)
    trainer = train(
        [AttentionBackendCallback()], steps=2, resume=1,
        restore_callback_states_from_checkpoint=True,
    )  # fmt: skip
    restored = [
        each for each in trainer.callback_handler.callbacks
        if isinstance(each, AttentionBackendCallback)
    ]  # fmt: skip
    assert [(each.run_id, each.attempt) for each in restored] == [(first.run_id, 2)]


def test_a_list_of_saved_states_and_a_broken_copy(tmp_path: Path, caplog) -> None:
    saved = [{"attributes": {"run_id": "r", "attempt": 4, "backend": "sdpa"}}, {}]
    (tmp_path / "copy").write_text("no registry\n")
    found = trace(saved, True, tmp_path / "copy", tmp_path / "none")
    assert (found.run_id, found.attempt, found.previous) == ("r", 5, "sdpa")
    assert "earlier attempts are not looked up" in caplog.text
