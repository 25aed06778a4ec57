"""The script that runs transformers' tests, on a checkout with a test for each verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

CHECKOUT = """
    import os, unittest
    import datasets
    import torch
    from transformers import LlamaConfig, LlamaModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.testing_utils import require_flash_attn, require_torch_accelerator, slow

    def run(heads=2, **kwargs):
        config = LlamaConfig(hidden_size=32, intermediate_size=8, num_hidden_layers=1,
                             num_attention_heads=heads, vocab_size=9)
        model = LlamaModel._from_config(config, **kwargs)
        model(torch.arange(5)[None], use_cache=False)
        return model.config._attn_implementation

    class TinyTest(unittest.TestCase):
        all_model_classes = (LlamaModel,)

        def test_passed(self):
            self.assertEqual(run(), "sdpa")

        @require_flash_attn
        @require_torch_accelerator
        @slow
        def test_passed_flash_attn_2(self):
            loaded = run(attn_implementation="flash_attention_2")
            ours = os.environ["PEER_SUITE_ROLE"] == "ours"
            self.assertEqual(loaded, "triton_fa2" if ours else "sdpa")

        def test_failed(self):
            run()
            self.assertEqual(ALL_ATTENTION_FUNCTIONS["sdpa"].__name__, "sdpa_attention_forward")

        def test_refused(self):
            run(heads=1)

        def test_not_exercised(self):
            run(attn_implementation="eager")

        def setUp(self):
            self.model_tester = self

        def prepare_config_and_inputs_for_common(self):
            return LlamaConfig(hidden_size=32, num_attention_heads=4), None

        def _prepare_config_headdim(self, config, width):
            config.head_dim = width
            return config

        def test_passed_widened(self):
            config, _ = self.model_tester.prepare_config_and_inputs_for_common()
            self.assertEqual(config.head_dim, 16)
            run()

        def test_passed_assisted_decoding_matches(self):
            run(attn_implementation="eager")

        def test_fails_alone(self):
            self.fail("whatever runs")

        def test_skipped(self):
            datasets.load_dataset("none")

    class IntegrationTest(unittest.TestCase):
        def test_passed_with_weights_of_the_hub(self):
            self.fail("must not be run")
"""
DYING = """
    import os, unittest

    class DyingTest(unittest.TestCase):
        all_model_classes = ()

        def test_stopped(self):
            os.environ["PEER_SUITE_ROLE"] == "control" or os._exit(3)

        def test_the_next(self):
            pass
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout with one family, and a gate that covers float32 causal calls of head_dim 16."""
    folder = tmp_path_factory.mktemp("checkout")
    family = folder / "tests" / "models" / "tiny"
    family.mkdir(parents=True)
    (family / "test_modeling_tiny.py").write_text(textwrap.dedent(CHECKOUT))
    (family / "test_modeling_tiny_dying.py").write_text(textwrap.dedent(DYING))
    (family.parent / "empty").mkdir()
    (family.parent / "empty" / "test_modeling_empty.py").touch()
    (family / "test_modeling_tiny_broken.py").write_text("import nothing_of_that_name")
    (folder / "setup.py").write_text('setup(\n    version="9.8.7",\n)\n')
    return folder


@pytest.mark.slow
def test_every_verdict_from_a_checkout(root, checkout, tmp_path):
    """Both roles, under the interpreter; the last test takes its process down with ours only."""
    variables = {**os.environ, "HF_ATTN_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    gate = ["-m", "hf_attn_backends.cli", "gate", "--device", "cpu", "--head-dim", "16",
            "--dtype", "float32", "--visibility", "causal"]  # fmt: skip
    subprocess.run([sys.executable, *gate], env=variables, check=True, capture_output=True)
    result = tmp_path / "found.json"
    command = [sys.executable, str(root / "scripts" / "peer_suite.py"), "-k", "test",
               "--transformers", str(checkout), "--families", "tiny", "empty"]  # fmt: skip
    done = subprocess.run(
        [*command, "--json", str(result)],
        env=variables, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert found["tests"] == "transformers 9.8.7"
    assert found["families"]["tiny"] == {
        "passed": 4, "failed": 1, "stopped": 1, "refused": 1, "not exercised": 1,
        "fails alone": 2, "skipped": 1, "not run": 1,
    }, done.stdout  # fmt: skip
    assert set(found["families"]["empty"].values()) == {0}
    assert any("nothing_of_that_name" in one["reason"] for one in found["reasons"]["fails alone"])
    to_fix = {one["test"].rpartition("::")[2]: one for one in found["to_fix"]}
    assert {name: one["verdict"] for name, one in to_fix.items()} == {
        "test_failed": "failed", "test_stopped": "stopped",
    }  # fmt: skip
    assert "AssertionError" in to_fix["test_failed"]["reasons"][0]
    (refused,) = found["reasons"]["refused"]
    assert "does not cover CLASS" in refused["reason"]
    assert refused["tests"] == 1
    assert found["reasons"]["skipped"][0]["reason"].endswith("datasets is not installed")
    assert found["launches"] >= 5
