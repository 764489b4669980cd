#!/usr/bin/env bash
# The main job in small, on a CPU: import SmolLM2-135M, continue its pretraining on Python's standard library, once
# dense and once with All-or-Here Attention, export both, compare them in plain transformers.
#
#   bash launch/quickstart.sh                       results in runs/quickstart; finished steps are not repeated
#   QUICKSTART_STEPS=3 bash launch/quickstart.sh    a shorter training
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup_env.sh

STEPS="${QUICKSTART_STEPS:-20}"
[[ "$STEPS" =~ ^[1-9][0-9]*$ ]] || die "QUICKSTART_STEPS is '$STEPS', not a whole number above 0"
OUT=runs/quickstart
RUN="$OUT/$STEPS-steps"

# step NAME OUTPUT COMMAND...: runs the command unless it, with the same files of configuration, has made OUTPUT.
step() {
    local name="$1" output="$2" stamp started now
    shift 2
    stamp="$OUT/.done/${output//\//-}"
    now="$* $(cat launch/quickstart/*.yaml | cksum)"
    if [ -e "$output" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$now" ]; then
        say "$name: done before ($output)"
        return
    fi
    say "$name"
    mkdir -p "$OUT/.done" "$(dirname "$output")"
    rm -f "$stamp"
    started=$SECONDS
    "$@" || die "'$name' failed, see above; mend that and run this again: finished steps are kept"
    [ -e "$output" ] || die "'$name' ended without writing $output"
    printf '%s' "$now" >"$stamp"
    printf '   %s s\n' $((SECONDS - started))
}
