#!/usr/bin/env bash
# The main job in small, on a CPU: import SmolLM2-135M, continue its pretraining on Python's standard library, once
# dense and once with All-or-Here Attention, export both, compare them in plain transformers.
#
#   bash launch/quickstart.sh                       results in runs/quickstart; finished steps are not repeated,
#                                                   unless you remove that folder
#   QUICKSTART_STEPS=3 bash launch/quickstart.sh    a shorter training
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup_env.sh

STEPS="${QUICKSTART_STEPS:-20}"
[[ "$STEPS" =~ ^[1-9][0-9]*$ ]] || die "QUICKSTART_STEPS is '$STEPS', not a whole number above 0"
OUT=runs/quickstart
RUN="$OUT/steps-$STEPS"
CONFIGS=(configs/parallel/tp3_cpu.yaml configs/run/quickstart.yaml)

# step NAME OUTPUT COMMAND...: runs the command, unless the same one has made OUTPUT with the same SETTINGS.
SETTINGS=""
step() {
    local name="$1" output="$2" stamp now started=$SECONDS
    shift 2
    stamp="$OUT/.done/${output//\//-}"
    now="$* $SETTINGS"
    if [ -e "$output" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$now" ]; then
        say "$name: done before ($output)"
        return
    fi
    say "$name"
    mkdir -p "$OUT/.done" "$(dirname "$output")"
    rm -f "$stamp"
    "$@" || die "'$name' failed, see above; mend that and run this again: finished steps are kept"
    [ -e "$output" ] || die "'$name' ended without writing $output"
    printf '%s' "$now" >"$stamp"
    printf '   took %s s\n' $((SECONDS - started))
}

# train NAME OPTION...: three processes with tensor and sequence parallelism; goes on where it was stopped, unless the
# configuration is another now.
train() {
    local name="$1" port configuration
    shift
    configuration="$* $SETTINGS"
    if [ "$(cat "$RUN/$name/configuration" 2>/dev/null)" != "$configuration" ]; then
        rm -rf "${RUN:?}/$name"
        mkdir -p "$RUN/$name"
        printf '%s' "$configuration" >"$RUN/$name/configuration"
    fi
    # The launcher's fixed default would collide with any other run on this machine.
    port="$("$PY" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
    deepspeed --num_gpus 3 --master_port "$port" launch/pretrain.sh "${CONFIGS[@]/#/--config=}" \
        --checkpoint.init_from "$OUT/imported" --checkpoint.directory "$RUN/$name/checkpoint" \
        --logging.directory "$RUN/$name/log" --data.blend "[$OUT/data/train]" \
        --data.split 97,3,0 --training.train_steps "$STEPS" --training.warmup_steps $((STEPS / 5)) \
        --training.eval_interval "$STEPS" --training.eval_steps 2 \
        --checkpoint.save_interval $(((STEPS + 1) / 2)) "$@"
}

# beside COMMAND...: runs it in the background, on the second core, until `joined` shows what it printed.
beside() {
    "$@" >"$OUT/beside.log" 2>&1 &
    BESIDE=$!
}
joined() {
    local rc=0
    wait "$BESIDE" || rc=$?
    cat "$OUT/beside.log"
    [ "$rc" -eq 0 ] || exit "$rc"
}
trap 'jobs -p | xargs -r kill 2>/dev/null || true' EXIT

# prepare_data: text and token files.
prepare_data() {
    step "collecting Python's standard library as text" "$OUT/text/held_out.jsonl" \
        "$PY" -m megatron_aha.data.stdlib_corpus --output "$OUT/text/train.jsonl" \
        --held-out-output "$OUT/text/held_out.jsonl"
    step "tokenizing it" "$OUT/data/train.json" \
        "$PY" tools/preprocess_data.py --input "$OUT/text/train.jsonl" --output "$OUT/data/train" --overwrite \
        --tokenizer "$OUT/original" --eod '<|endoftext|>'
}

# export_model CHECKPOINT FOLDER: for transformers, with tokenizer and modelling code.
export_model() { "$PY" tools/convert_to_hf.py --checkpoint "$1" --output "$2" --overwrite; }

# compare: in a fresh process that knows transformers only; the exported folder brings its own code.
compare() {
    (cd "$RUN" && env -u PYTHONPATH HF_HUB_OFFLINE=1 HF_HOME="$REPO/$RUN/hf-home" \
        "$PY" "$REPO/launch/quickstart/compare.py" --original "$REPO/$OUT/original" --imported "$REPO/$OUT/imported-hf" \
        --dense dense/hf --aha aha/hf --text "$REPO/$OUT/text/held_out.jsonl" --output results.json)
}

use_environment
install_project gguf plots
install_smollm2
[ -e "$RUN/results.json" ] || need_disk 10 . "the quickstart"

export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES="" TOKENIZERS_PARALLELISM=false
# A bar in a log, not on a terminal, moves every 5 seconds.
[ -t 2 ] || export TQDM_MININTERVAL=5
# Said by Megatron-core at every import; neither is wanted on a CPU.
export PYTHONWARNINGS="ignore:Transformer Engine and Apex are not installed,ignore:Apex is not installed"

last="step_$(printf '%08d' "$STEPS")"
mkdir -p "$OUT"
step "unpacking SmolLM2-135M as a Hugging Face folder" "$OUT/original/tokenizer.json" \
    "$PY" launch/quickstart/unpack.py --gguf "$GGUF" --output "$OUT/original"
beside prepare_data
step "importing it" "$OUT/imported/latest" \
    "$PY" tools/convert_from_hf.py --source "$OUT/original" --output "$OUT/imported"
step "exporting it again, untrained" "$OUT/imported-hf/config.json" export_model "$OUT/imported" "$OUT/imported-hf"
joined
SETTINGS="$(cat "${CONFIGS[@]}" | cksum)"
step "training dense, $STEPS steps" "$RUN/dense/checkpoint/$last/index.json" train dense --aha.enabled false
step "training with All-or-Here Attention, $STEPS steps" "$RUN/aha/checkpoint/$last/index.json" train aha
beside step "exporting the dense model" "$RUN/dense/hf/config.json" export_model "$RUN/dense/checkpoint" "$RUN/dense/hf"
step "exporting the model with All-or-Here Attention" "$RUN/aha/hf/config.json" \
    export_model "$RUN/aha/checkpoint" "$RUN/aha/hf"
joined
step "drawing the usage of full attention" "$RUN/aha/plots/heatmap.png" \
    "$PY" tools/plot_router.py "$RUN/aha/log" --output "$RUN/aha/plots"
step "comparing in plain transformers" "$RUN/results.json" compare

cat "$RUN/results.txt"
say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s"
printf 'exported model:  %s\n' "$REPO/$RUN/aha/hf"
printf 'heat map:        %s\n' "$REPO/$RUN/aha/plots/heatmap.png"
printf 'TensorBoard:     %s\n' "$VIRTUAL_ENV/bin/tensorboard --logdir $REPO/$RUN"
