"""A run under `auto`: the record and the verdict say who served, with what share, and why."""

from __future__ import annotations

from hf_attn_backends import AttentionBackendCallback, attn_backend
from hf_attn_backends.hf.shares import served_by
from hf_attn_backends.hf.verdict import judge
from hf_attn_backends.witness import Launch


def test_each_backend_that_served_is_on_record(make_model, make_trainer, events, capsys) -> None:
    model = make_model("auto")
    layer = model.model.layers[1].self_attn
    forward = layer.forward

    def steered(*args, **kwargs):
        with attn_backend("eager"):
            return forward(*args, **kwargs)

    layer.forward = steered
    callback = AttentionBackendCallback()
    make_trainer(model, [callback]).train()
    assert events()[-1] == ("end", "matched")
    executed = callback.record.attention_executed
    served = {row["backend"]: row for row in executed["served_by"]}
    assert set(served) == {"sdpa", "eager"}
    assert served["sdpa"]["launches"] == served["eager"]["launches"] > 0
    assert served["sdpa"]["share"] == served["eager"]["share"] == 0.5
    assert served["sdpa"]["why"] == "the default order"
    assert served["eager"]["why"] == "asked for explicitly"
    count = served["sdpa"]["launches"]
    said = capsys.readouterr().err
    assert f"matched ({2 * count} forward launches of auto (eager {count}, sdpa {count})" in said


def test_shares_are_of_the_forward_launches_of_all_ranks() -> None:
    def row(backend, launches, phase="forward"):
        return {"backend": backend, "call_class": "c", "phase": phase, "launches": launches}

    rows = served_by([[row("sdpa", 5), row("sdpa", 99, "backward")], [row("sdpa", 1), row("x", 2)]])
    assert [(r["backend"], r["launches"], r["share"]) for r in rows] == [
        ("sdpa", 6, 0.75), ("x", 2, 0.25),
    ]  # fmt: skip
    assert all(r["why"].startswith("unknown: ") for r in rows)
    assert served_by([[], []]) == []


def test_the_verdict_names_who_served() -> None:
    seen = {Launch("sdpa", "torch", "forward", "c"): 3, Launch("eager", "torch", "forward", "c"): 1}
    assert judge("auto", 2, seen, window="step 1").reason == (
        "4 forward launches of auto (eager 1, sdpa 3) in step 1"
    )
    assert "auto" not in judge("sdpa", 2, {next(iter(seen)): 3}, window="step 1").reason
