"""Who runs, and what may be written down about it.

A record is read by people other than the one who launched the run: command lines and environments
hold tokens. What is written is therefore an allow-list; everything else becomes `<redacted>`.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

REDACTED = "<redacted>"

#: Command-line options whose values are written down; other values are only when plain numbers.
SAFE_OPTIONS = frozenset(
    [
        "attn_implementation",
        "backend",
        "bf16",
        "config",
        "config_file",
        "corpus",
        "dataset_name",
        "device",
        "do_eval",
        "do_train",
        "dtype",
        "eval_strategy",
        "fp16",
        "gate",
        "gradient_checkpointing",
        "learning_rate",
        "logging_steps",
        "lr_scheduler_type",
        "max_steps",
        "model",
        "model_name_or_path",
        "num_train_epochs",
        "optim",
        "output_dir",
        "per_device_eval_batch_size",
        "per_device_train_batch_size",
        "report_to",
        "resume_from_checkpoint",
        "save_strategy",
        "seed",
        "task",
        "torch_compile",
        "torch_dtype",
        "use_cpu",
    ]
)

#: Environment variables that are written down, with their values.
SAFE_VARIABLES = (
    "ACCELERATE_MIXED_PRECISION",
    "CUDA_VISIBLE_DEVICES",
    "HF_ATTN_BACKEND",
    "HF_ATTN_HOME",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "SLURM_JOB_ID",
    "TORCHELASTIC_RUN_ID",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
    "TRITON_INTERPRET",
    "WORLD_SIZE",
)

_PLAIN = re.compile(r"[-+]?\d*\.?\d+(e[-+]?\d+)?|true|false|none|yes|no", re.IGNORECASE)
_SECRET = re.compile(r"://[^/\s]*@|(?:hf|sk|ghp|github_pat|xox[a-z])[_-]\w{8,}", re.IGNORECASE)


def redacted_argv(argv: Sequence[str] | None = None) -> list[str]:
    """The command line with every value that is not allowed by name replaced.

    The program is its file name; option names stay; a value stays when its option is in
    `SAFE_OPTIONS` (and it does not look like a credential) or when it is a plain number or boolean.
    """
    words = list(sys.argv if argv is None else argv)
    kept = [PurePath(words[0]).name] if words else []
    option = ""
    for word in words[1:]:
        if word.startswith("-") and not _PLAIN.fullmatch(word):
            name, equals, value = word.partition("=")
            option = name.lstrip("-").replace("-", "_")
            # `-pSECRET` glues the value to a short option.
            shown = name if name.startswith("--") or len(name) == 2 else f"{name[:2]}{REDACTED}"
            kept.append(f"{shown}={_shown(option, value)}" if equals else shown)
            option = "" if equals else option
        else:
            kept.append(_shown(option, word))
    return kept


def _shown(option: str, value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    if option in SAFE_OPTIONS and not _SECRET.search(value):
        return value
    # A positional configuration file says much about a run and is no secret; its folder may be.
    if not option and PurePath(value).suffix in {".yaml", ".yml"}:
        return PurePath(value).name
    return REDACTED


def safe_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of `SAFE_VARIABLES` that are set."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in SAFE_VARIABLES if environ.get(name)}


def process_identity() -> dict[str, Any]:
    """What says later whether this process still lives: pid, start time, host, boot id."""
    pid = os.getpid()
    return {
        "pid": pid,
        "started": _start_ticks(pid) or "unknown: no /proc on this system",
        "host": socket.gethostname() or "unknown: the host has no name",
        "boot_id": _boot_id(),
    }


def liveness(identity: Mapping[str, Any]) -> str:
    """`alive`, `dead`, or `unknown: <why>` for a recorded process identity."""
    host, boot = socket.gethostname(), _boot_id()
    if identity.get("host") != host:
        return f"unknown: it ran on {identity.get('host')}, this is {host}"
    recorded = str(identity.get("boot_id", "unknown: not recorded"))
    if not recorded.startswith("unknown") and not boot.startswith("unknown") and recorded != boot:
        return "dead"
    pid = identity.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return "unknown: no process id was recorded"
    started = identity.get("started")
    if isinstance(started, int):  # the same id with another start time was given away again
        return "alive" if _start_ticks(pid) == started else "dead"
    return "alive" if _exists(pid) else "dead"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat (clock ticks since boot); None for no such or a dead process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command's name may hold spaces and brackets
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        return f"unknown: {error.strerror or error}"
