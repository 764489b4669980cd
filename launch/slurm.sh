#!/usr/bin/env bash
# Continued pretraining as a SLURM job, one task per GPU. From the repository's root, in the environment to train in:
#
#   sbatch --nodes 4 launch/slurm.sh --config configs/parallel/tp8_zero1.yaml --config ... --training.lr 1e-4
#
# SLURM starts the ranks itself: no hostfile, no ssh between nodes. State --parallel.nodes and
# --parallel.ranks_per_node (the files in configs/parallel do): the run stops when the job has others.
#SBATCH --job-name=megatron-aha
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --output=slurm-%j.log
set -euo pipefail

if [ -z "${SLURM_JOB_NODELIST:-}" ]; then
    echo "error: start this with sbatch, or use launch/pretrain.sh outside SLURM" >&2
    exit 2
fi
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# The first rank that fails ends the job: the others would wait for it.
# shellcheck disable=SC2016  # each task reads its own variables
exec srun --kill-on-bad-exit=1 bash -c '
    export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
    exec python3 -u launch/pretrain.sh "$@"
' rank "$@"
