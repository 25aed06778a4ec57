"""A training that raises in its first micro-batch does not blind the next one's observer."""

from __future__ import annotations

import pytest
import torch

from hf_attn_backends.hf.callback import AttentionBackendCallback


def test_the_next_run_is_observed_again(make_model, make_trainer, monkeypatch) -> None:
    first = make_trainer(make_model("sdpa"), [AttentionBackendCallback()])

    def broken(*_args, **_kwargs):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(first.model, "forward", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        first.train()
    assert torch.autograd._profiler_enabled()

    callback = AttentionBackendCallback()
    make_trainer(make_model("sdpa"), [callback]).train()
    assert callback.record.attention_verdict == "matched"
    assert not torch.autograd._profiler_enabled()
