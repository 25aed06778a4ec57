#!/usr/bin/env bash
# The CPU tests, from a fresh checkout, in one command:
#
#   bash scripts/test.sh [pytest arguments]
#
# Makes .venv, installs the package with its test requirements, runs the tests that need no GPU.
# The longest of them are marked slow and run by: bash scripts/test.sh -m "slow and not gpu and not multigpu"
# Tests that need a GPU: .venv/bin/python -m pytest -m gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/make_venv.sh

make_venv demo,plot,peft test
say "tests"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest -q -n 2 -m "not gpu and not multigpu and not slow" "$@"
