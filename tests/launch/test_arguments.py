"""`finetune.py`'s arguments: YAML gives defaults, the command line wins, typos are refused."""

from __future__ import annotations

import pytest
import yaml
from finetune_arguments import parse

from hf_attn_backends.errors import LaunchError

MODEL = {"hidden_size": 16}
CONFIGS = ("cpu_tiny", "cpu_interpreter", "h200_mistral_8layers")


@pytest.fixture
def config(tmp_path):
    def write(**keys):
        path = tmp_path / "config.yaml"
        base = {"model": MODEL, "output_dir": str(tmp_path / "out"), "use_cpu": True}
        path.write_text(yaml.safe_dump({**base, **keys}))
        return str(path)

    return write


def test_yaml_gives_defaults_and_the_command_line_wins(config):
    path = config(max_steps=7, attn_implementation="sdpa", corpus="python-stdlib")
    ours, training = parse(["--config", path, "--max_steps", "3"])
    assert training.max_steps == 3
    assert (ours.attn_implementation, ours.corpus) == ("sdpa", "python-stdlib")
    assert ours.model == MODEL
    assert ours.tokenizer == "mistral-v1"
    _, training = parse(["--max_steps=4", f"--config={path}"])  # the order does not matter
    assert training.max_steps == 4


def test_yaml_texts_become_numbers(config, tmp_path):
    path = config()
    with open(path, "a") as file:
        file.write("learning_rate: 3e-4\n")  # YAML 1.1: a text
    with open(path) as file:
        assert isinstance(yaml.safe_load(file)["learning_rate"], str)
    _, training = parse(["--config", path])
    assert training.learning_rate == pytest.approx(3e-4)


def test_a_model_comes_as_json_on_the_command_line(config):
    ours, _ = parse(["--config", config(), "--model", '{"hidden_size": 32}'])
    assert ours.model == {"hidden_size": 32}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"max_step": 3}, "unknown key 'max_step'; did you mean 'max_steps'?"),
        ({"config": "x"}, "unknown key 'config'"),
        ({"gate": "skip"}, "gate must be one of require, run, got 'skip'"),
        ({"sdpa_kernel": "fast"}, "sdpa_kernel must be one of auto, flash"),
        ({"model_name_or_path": "x"}, "exclude each other"),
        ({"model": None}, "model or model_name_or_path must be given"),
        ({"model": [1]}, "model must be a mapping"),
        ({"sequence_length": 1}, "sequence_length must be at least 2, got 1"),
        (
            {"sdpa_kernel": "math", "attn_implementation": "triton_fa2"},
            "pins a kernel of attn_implementation=sdpa, got attn_implementation=triton_fa2",
        ),
    ],
)
def test_bad_configurations_are_refused(config, keys, says):
    with pytest.raises(LaunchError) as caught:
        parse(["--config", config(**keys)])
    assert says in str(caught.value)


def test_every_problem_of_a_file_is_named_at_once(config):
    with pytest.raises(LaunchError) as caught:
        parse(["--config", config(gate="skip", colour="red")])
    assert "gate must be" in str(caught.value)
    assert "unknown key 'colour'" in str(caught.value)


def test_unknown_flags_and_missing_files_are_refused(config, tmp_path):
    with pytest.raises(LaunchError, match="--colour"):
        parse(["--config", config(), "--colour", "red"])
    with pytest.raises(LaunchError, match="No such file"):
        parse(["--config", str(tmp_path / "absent.yaml")])
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(LaunchError, match="must hold keys and values, got list"):
        parse(["--config", str(tmp_path / "list.yaml")])
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(LaunchError, match="is not YAML"):
        parse(["--config", str(tmp_path / "broken.yaml")])


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configurations_parse(root, name, tmp_path):
    path = root / "configs" / "finetune" / f"{name}.yaml"
    extra = ["--use_cpu", "true", "--bf16", "false"]  # no GPU is needed to read one
    ours, training = parse(["--config", str(path), *extra, "--output_dir", str(tmp_path)])
    assert ours.attn_implementation == ("sdpa" if name == "cpu_tiny" else "triton_fa2")
    assert ours.interpreter == (name == "cpu_interpreter")
    assert ours.gate == "require"
    # the last has been calmed: a hot one makes the first steps chaotic, and no comparison holds
    assert training.learning_rate == pytest.approx(3e-5 if name.startswith("h200") else 3e-3)
    assert training.logging_steps == 1
    assert training.save_strategy == "no"


def test_the_h200_configuration_has_mistrals_real_widths(root):
    from finetune_model import read_config

    path = root / "configs" / "finetune" / "h200_mistral_8layers.yaml"
    ours, _ = parse(["--config", str(path), "--use_cpu", "true", "--bf16", "false"])
    config = read_config(ours, 32_000)
    assert (config.hidden_size, config.intermediate_size) == (4096, 14336)
    assert (config.num_attention_heads, config.num_key_value_heads) == (32, 8)
    assert config.hidden_size // config.num_attention_heads == 128
    assert (config.num_hidden_layers, config.sliding_window) == (8, None)
    assert config.vocab_size == 32_000
    assert ours.sequence_length == 4096


def test_unknown_model_keys_are_refused(config):
    from finetune_model import read_config

    ours, _ = parse(["--config", config(model={"hiden_size": 16})])
    with pytest.raises(LaunchError, match="got hiden_size"):
        read_config(ours, 32_000)
