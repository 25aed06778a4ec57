#!/usr/bin/env bash
# The CPU tests, from a fresh checkout, in one command:
#
#   bash scripts/test.sh [pytest arguments]
#
# Makes .venv, installs the package with its test requirements, runs every test that needs no GPU.
# Tests that need one: .venv/bin/python -m pytest -m gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/make_venv.sh

make_venv demo,plot,peft test
say "tests"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest -q -n 2 -m "not gpu and not multigpu" "$@"
