"""Probing: a row and a reason for every backend, no CUDA context, no triton, no exception."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_attn_backends.backends import AttentionBackend, AttentionBackendFactory
from hf_attn_backends.selection import ALL_BACKENDS, BackendReport, probe_backends


@pytest.mark.parametrize("device", ["cpu", "cuda", None])
def test_every_backend_has_a_row_with_a_reason(device, gate_dir):
    rows = probe_backends(device, gate_dir)
    assert set(ALL_BACKENDS) <= set(rows)
    for name, report in rows.items():
        assert isinstance(report, BackendReport)
        assert report.name == name
        assert report.reason.strip()
        assert report.available == (not report.refusals)
        assert report.available or report.reason == report.refusals[0]


def test_on_a_cpu_pytorch_serves_and_gpu_packages_do_not(gate_dir):
    rows = probe_backends("cpu", gate_dir)
    available = {name for name, report in rows.items() if report.available}
    assert {"eager", "sdpa", "flex_attention"} <= available
    assert not available & {"flash_attention_2", "flash_attention_3", "triton_fa2", "flashmla"}
    assert "forward only" in rows["flex_attention"].reason
    assert "cpu" in rows["flash_attention_2"].reason
    assert rows["flash_attention_2"].fix is None  # no command turns a CPU into a GPU
    assert rows["triton_fa2"].fix.startswith("hf-attn gate --device cpu")


def test_a_device_that_torch_does_not_know_is_a_reason_and_no_exception(gate_dir):
    rows = probe_backends("toaster", gate_dir)
    assert not any(report.available for report in rows.values())
    assert "toaster" in rows["sdpa"].reason


def test_a_probe_that_raises_is_a_reason(gate_dir):
    class Angry(AttentionBackend):
        name = "angry"

        def probe(self, context):
            raise KeyError("no luck")

        def forward(self, query, key, value, call, **kwargs):
            return query

    AttentionBackendFactory.register("angry", Angry)
    try:
        report = probe_backends("cpu", gate_dir)["angry"]
    finally:
        AttentionBackendFactory.unregister("angry")
    assert not report.available
    assert "KeyError" in report.reason
    assert "no luck" in report.reason


def test_a_missing_package_is_named(monkeypatch, gate_dir):
    monkeypatch.setitem(sys.modules, "triton", None)
    report = probe_backends("cpu", gate_dir)["triton_fa2"]
    assert any("package triton" in reason for reason in report.refusals)
    assert any("equivalence gate" in reason for reason in report.refusals)
    assert report.fix == "pip install triton"


def test_cpu_probing_starts_no_cuda_and_imports_no_triton(tmp_path):
    code = (
        "import sys, torch\n"
        "from hf_attn_backends import selection\n"
        f"rows = selection.probe_backends('cpu', {str(tmp_path)!r})\n"
        "selection.select_attn_implementation(None, device='cpu')\n"
        "assert rows['sdpa'].available\n"
        "assert not torch.cuda.is_initialized(), 'a CUDA context was created'\n"
        "assert 'triton' not in sys.modules, 'triton was imported'\n"
        "assert 'transformers' not in sys.modules, 'transformers was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
