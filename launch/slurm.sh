#!/usr/bin/env bash
# Pretrain under Slurm: one torchrun on each node, which meet at the first.
#
#   sbatch --nodes 4 --gpus-per-node 8 launch/slurm.sh --config configs/gpt2-345m.yaml
#
# Slurm sends SIGUSR1 before the time is up (--signal below): the run saves a checkpoint and ends; the same command goes
# on from there. Not SIGTERM: torchrun would hand it on and kill its ranks 30 seconds later, in the middle of a large
# checkpoint; SIGUSR1 it is made to ignore.
#
#   GPUS=8       processes on each node (default: what Slurm gave)
#   PORT=29500   where the first node listens
#   IMAGE=...    run in this container, by pyxis and enroot: registry/name:tag or a .sqsh file
#   MOUNTS=...   what it sees of the host: from:to,from:to (default: this directory, under its own name)
#   DRY_RUN=1    print the command, the batch arithmetic and the memory, and stop (also outside Slurm)
#SBATCH --job-name=alto
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=USR1@300
set -euo pipefail
PY=${PY:-python}
GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}
NODES=${SLURM_NNODES:-1}
# bash would run what stands in $(( )), if it is no number: PATH[$(command)].
case $NODES$GPUS in *[!0-9]*) echo "NODES and GPUS must be whole numbers, not $NODES and $GPUS" >&2 && exit 2 ;; esac
# Its share of the cores for each rank: torchrun would give one to each, which is slow where states are offloaded.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + GPUS - 1) / GPUS))}
if command -v scontrol >/dev/null && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
else
    first=localhost
fi
# Python is the container's.
inside=()
if [ -n "${IMAGE:-}" ]; then
    inside=(--container-image "$IMAGE" --container-mounts "${MOUNTS:-$PWD:$PWD}" --container-workdir "$PWD")
fi
# A launcher would bury what is wrong in its own words, and end with 1.
checking=("$PY" -m alto_distributed pretrain "$@" --check --world $((NODES * GPUS)))
if [ -n "${IMAGE:-}" ]; then
    checking=(srun --nodes 1 --ntasks 1 "${inside[@]}" "${checking[@]}")
fi
ignoring=(bash -c 'trap "" USR1; exec "$@"' ignoring)
command=(srun ${inside[@]+"${inside[@]}"} "${ignoring[@]}" "$PY" -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$GPUS" --rdzv-backend c10d
    --rdzv-endpoint "$first:${PORT:-29500}" --rdzv-id "${SLURM_JOB_ID:-0}" -m alto_distributed pretrain "$@")
if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${command[@]}" && echo
    exec "$PY" -m alto_distributed pretrain "$@" --dry-run --world $((NODES * GPUS))
fi
"${checking[@]}"
exec "${command[@]}"
