# Sourced by quickstart.sh and test.sh: a .venv of this checkout with the package in it.
#
#   PYTHON             the interpreter (default: python3), 3.11 or newer
#   HF_ATTN_TORCH      what to hand pip for torch instead of the choice made below
#   pip's own variables (PIP_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX ...) work as always.
#
# torch comes first and alone: whatever depends on it then takes the one that is there, and does
# not bring a build for other hardware. The choice:
#   1. python3 already has torch >= 2.11, and it sees the GPU (or there is none): it is used as it
#      is, by --system-site-packages;
#   2. a GPU, and no such torch: the newest torch;
#   3. no GPU: torch 2.13.0, the version that the CPU tests are run with.

say() { printf '\n== %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# Whether an interpreter's torch can be kept. 0: yes.
torch_suits() {
    "$1" - "$2" <<'PY' >/dev/null 2>&1
import sys
import torch
release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
sys.exit(not (release >= (2, 11) and (sys.argv[1] == "cpu" or torch.cuda.is_available())))
PY
}

# Where an interpreter is itself one of a venv, --system-site-packages shows the packages of that
# venv's base only: show the venv's own, too.
share_packages() {
    local theirs ours
    theirs=$("$1" -c 'import sys, sysconfig
if sys.prefix != sys.base_prefix: print(sysconfig.get_path("purelib"))')
    ours=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    [ -z "$theirs" ] || echo "$theirs" >"$ours/_shared_packages.pth"
}

# make_venv EXTRAS [GROUP]: .venv with torch, the package (editable) with EXTRAS, and the
# requirements of the dependency group GROUP.
make_venv() {
    local extras="$1" group="${2:-}" python="${PYTHON:-python3}" kind=cpu options=()
    command -v "$python" >/dev/null 2>&1 || fail "no $python here; set PYTHON to Python 3.11 or newer"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "Python 3.11 or newer is needed, $python is $("$python" -V); set PYTHON"
    has_gpu && kind=gpu
    if [ ! -x .venv/bin/python ]; then
        if torch_suits "$python" "$kind"; then
            say "using the torch that $python has"
            options=(--system-site-packages)
        fi
        say "making .venv ($("$python" -V), for a ${kind^^})"
        "$python" -m venv "${options[@]}" .venv ||
            fail "no venv could be made; on Debian and Ubuntu: apt-get install python3-venv"
        [ "${#options[@]}" = 0 ] || share_packages "$python"
    fi
    if ! torch_suits .venv/bin/python "$kind"; then
        local torch="torch>=2.11"
        [ "$kind" = cpu ] && torch="torch==2.13.0"
        say "installing ${HF_ATTN_TORCH:-$torch}"
        .venv/bin/python -m pip install -q "${HF_ATTN_TORCH:-$torch}"
        torch_suits .venv/bin/python "$kind" ||
            fail "the installed torch is older than 2.11 or does not see the GPU; HF_ATTN_TORCH names another"
    fi
    local more=()
    if [ -n "$group" ]; then
        mapfile -t more < <(.venv/bin/python - "$group" <<'PY'
import sys, tomllib
groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]
print(*(item for item in groups[sys.argv[1]] if isinstance(item, str)), sep="\n")
PY
        )
    fi
    say "installing the package"
    .venv/bin/python -m pip install -q -e ".[$extras]" "${more[@]}"
    .venv/bin/python - <<'PY'
import torch, transformers, triton
print(f"torch {torch.__version__}, triton {triton.__version__}, transformers {transformers.__version__}")
PY
}
