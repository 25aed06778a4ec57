"""Mirrors in trackers: what they get, and that their failures stop nothing."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from hf_attn_backends.hf import trackers
from hf_attn_backends.hf.callback import AttentionBackendCallback


@pytest.fixture(autouse=True)
def forget() -> None:
    trackers._said.clear()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    def put(name: str, **attributes: object) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return put


class Config(dict):
    """A tracker's configuration: a key that changes has to be allowed to."""

    def update(self, values: dict, allow_val_change: bool = False) -> None:
        assert allow_val_change
        super().update(values)


def arguments(*names: str, output_dir: str = ".") -> SimpleNamespace:
    return SimpleNamespace(report_to=list(names), output_dir=output_dir)


def test_wandb_and_trackio_get_configuration_values(fake, make_record) -> None:
    wandb, trackio = Config(), Config()
    fake("wandb", run=SimpleNamespace(config=wandb))
    fake("trackio", config=trackio)
    trackers.mirror(make_record(), arguments("wandb"))
    assert trackio == {}  # the run does not report to it
    assert wandb["attention/backend"] == "sdpa"
    assert wandb["attention/verdict"] == "not_observed"
    trackers.mirror(make_record(attention_verdict="matched"), arguments("trackio"))
    assert trackio["attention/verdict"] == "matched"


def test_mlflow_gets_tags_that_it_takes(fake, make_record) -> None:
    tags: dict[str, str] = {}
    fake("mlflow", active_run=lambda: object(), set_tags=tags.update)
    trackers.mirror(make_record(attention_reason="r" * 9000), arguments("mlflow"))
    assert tags["attention/run_id"] == "run-1"
    assert len(tags["attention/reason"]) == 5000


def test_tensorboard_gets_text_in_the_trainers_folder(fake, make_record, tmp_path: Path) -> None:
    written = {}

    class SummaryWriter:
        def __init__(self, log_dir: str, filename_suffix: str) -> None:
            written["folder"] = log_dir

        def add_text(self, key: str, value: str) -> None:
            written[key] = value

        def close(self) -> None:
            written["closed"] = True

    fake("torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    for age, name in ((100, "old"), (0, "new")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        os.utime(tmp_path / "runs" / name, (1e9 - age, 1e9 - age))
    trackers.mirror(make_record(), arguments("tensorboard", output_dir=str(tmp_path)))
    assert written["folder"] == str(tmp_path / "runs" / "new")
    assert written["attention/backend"] == "sdpa"
    assert written["closed"]


def test_nothing_local_leaves_the_machine(make_record) -> None:
    values = trackers.mirrored_values(
        make_record(gate={"artifact_sha256": "ab", "path": "/home/me"}, code={"argv": ["x"]})
    )
    assert not any("/home" in value or "argv" in key for key, value in values.items())


def test_a_tracker_without_a_live_run_is_left_alone(fake, make_record) -> None:
    fake("wandb", run=None)
    fake("mlflow", active_run=lambda: None)
    trackers.mirror(make_record(), arguments("wandb", "mlflow", "trackio", "comet_ml"))
    trackers.mirror(make_record(), SimpleNamespace(report_to=None))


def test_a_run_mirrors_its_launch_its_first_step_and_its_end(
    fake, make_model, make_trainer
) -> None:
    said = []

    class Run(Config):
        def update(self, values: dict, allow_val_change: bool = False) -> None:
            said.append(values["attention/verdict"])

    fake("wandb", run=SimpleNamespace(config=Run()))
    trainer = make_trainer(make_model("sdpa"), [AttentionBackendCallback()])
    trainer.args.report_to = ["wandb"]
    trainer.train()
    assert said == ["not_observed", "matched", "matched"]


def test_a_failing_tracker_is_said_once_and_training_goes_on(
    fake, make_model, make_trainer, caplog
) -> None:
    class Broken(dict):
        def update(self, *_: object, **__: object) -> None:
            raise ConnectionError("the server is gone")

    fake("wandb", run=SimpleNamespace(config=Broken()))
    callback = AttentionBackendCallback()
    trainer = make_trainer(make_model("sdpa"), [callback])
    trainer.args.report_to = ["wandb"]
    with caplog.at_level(logging.WARNING, "hf_attn_backends"):
        trainer.train()
    assert callback.record.attention_verdict == "matched"
    assert caplog.text.count("wandb did not take the attention record") == 1
    assert "ConnectionError: the server is gone" in caplog.text
