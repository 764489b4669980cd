#!/usr/bin/env bash
""":"
# Continued pretraining. One file, two readers:
#
#   deepspeed --num_gpus 8 launch/pretrain.sh --config A.yaml --training.lr 1e-4
#   bash launch/pretrain.sh --num_gpus 8 -- --config A.yaml --training.lr 1e-4
#   bash launch/pretrain.sh --config A.yaml --dry-run
#
# With bash, what stands before a lone -- goes to the deepspeed launcher (--hostfile, --num_nodes, --num_gpus
# ...), what stands behind it to the run; without -- everything goes to the run, which then takes every GPU of
# this machine, or one rank on a CPU. --dry-run, --print_config and --help need neither launcher nor GPU.
#
# For bash the line above is a no-op and the last line of this part is never reached; for Python, which the
# launcher starts on this same file on every rank, all of this part is a string.
set -euo pipefail

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

launcher=()
for word in "$@"; do
    if [ "$word" = -- ]; then
        while [ "$1" != -- ]; do
            launcher+=("$1")
            shift
        done
        shift
        break
    fi
done

for word in "$@"; do
    case "$word" in
    --dry-run | --dry_run | --print_config | --help | -h) exec python3 "$0" "$@" ;;
    esac
done

# The launcher trains on one machine when the hostfile is missing or names no host: stop instead.
expect_hostfile=no
for word in ${launcher[@]+"${launcher[@]}"}; do
    hostfile=""
    case "$word" in
    --hostfile=*) hostfile="${word#--hostfile=}" ;;
    -H | --hostfile)
        expect_hostfile=yes
        continue
        ;;
    *) [ $expect_hostfile = no ] || hostfile="$word" ;;
    esac
    expect_hostfile=no
    if [ -n "$hostfile" ]; then
        [ -r "$hostfile" ] && [ -f "$hostfile" ] || fail "--hostfile $hostfile: no such file, or not readable"
        grep -q '^[[:space:]]*[^#[:space:]]' "$hostfile" || fail "--hostfile $hostfile names no host"
    fi
done

command -v deepspeed >/dev/null ||
    fail "deepspeed is not installed, and training needs it: pip install deepspeed, or activate its environment"
exec deepspeed ${launcher[@]+"${launcher[@]}"} "$0" "$@"
":"""

import sys

try:
    from megatron_aha.entry import run_and_exit
    from megatron_aha.training.pretrain import main
except ModuleNotFoundError as missing:
    if missing.name != "megatron_aha":
        raise
    print(f"error: megatron_aha is not installed in {sys.executable}: pip install -e . here", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
