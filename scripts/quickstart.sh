#!/usr/bin/env bash
# From a fresh checkout to a fine-tuned model and its record, in one command:
#
#   bash scripts/quickstart.sh
#
# Makes .venv, installs, looks at the backends (doctor), proves the kernel on this machine (gate),
# fine-tunes (on a GPU: Mistral's real widths under triton_fa2; on a CPU: a small model under sdpa
# and a very small one under triton_fa2 in Triton's interpreter), and prints the records.
# Gate and records go below the Hugging Face cache; $HF_ATTN_HOME moves them. Safe to run again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/make_venv.sh

make_venv demo,plot
PATH="$PWD/.venv/bin:$PATH"

say "doctor: which backend can serve here, and why not"
hf-attn doctor || true   # a refused backend is news, not a failure; the gate is run next

say "gate: the kernel against SDPA and a float64 oracle, on this machine"
hf-attn gate

if has_gpu; then
    say "fine-tune: 8 layers of Mistral's real widths under triton_fa2"
    python scripts/finetune.py --config configs/finetune/h200_mistral_8layers.yaml "$@"
else
    say "fine-tune: a small Mistral under sdpa"
    python scripts/finetune.py --config configs/finetune/cpu_tiny.yaml "$@"
    say "fine-tune: a very small Mistral under triton_fa2, in Triton's interpreter"
    python scripts/finetune.py --config configs/finetune/cpu_interpreter.yaml
fi

say "records: what ran, and under which attention"
hf-attn runs
