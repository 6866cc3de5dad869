#!/usr/bin/env bash
# Pretrain on the GPUs of one machine or of several, by torchrun. On every machine:
#
#   launch/torchrun.sh --config configs/gpt2-345m.yaml
#   NODES=4 NODE=0 MASTER=node0:29500 launch/torchrun.sh --config configs/gpt2-345m.yaml --engine megatron
#
#   GPUS=8           processes on this machine (default: its GPUs)
#   NODES=1          machines, and NODE, the number of this one
#   MASTER=host:port where the first machine listens
#   RESTARTS=0       times that the job may start again from its newest checkpoint after a failure
#   DRY_RUN=1        print the command, the batch arithmetic and the memory, and stop
set -euo pipefail
PY=${PY:-python}
GPUS=${GPUS:-$("$PY" -c 'import torch; print(torch.cuda.device_count() or 1)')}
NODES=${NODES:-1}
# bash would run what stands in $(( )), if it is no number: PATH[$(command)].
case $NODES$GPUS in *[!0-9]*) echo "NODES and GPUS must be whole numbers, not $NODES and $GPUS" >&2 && exit 2 ;; esac
# Its share of the cores for each rank: torchrun would give one to each, which is slow where states are offloaded.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + GPUS - 1) / GPUS))}
if [ "$NODES" -gt 1 ]; then
    where=(--nnodes "$NODES" --node-rank "${NODE:?number of this machine, from 0}"
        --rdzv-backend c10d --rdzv-endpoint "${MASTER:?host:port of the first machine}")
else
    where=(--standalone)
fi
command=("$PY" -m torch.distributed.run "${where[@]}" --nproc-per-node "$GPUS" --max-restarts "${RESTARTS:-0}"
    -m alto_distributed pretrain "$@")
if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${command[@]}" && echo
    exec "$PY" -m alto_distributed pretrain "$@" --dry-run --world $((NODES * GPUS))
fi
# A launcher would bury what is wrong in its own words, and end with 1.
"$PY" -m alto_distributed pretrain "$@" --check --world $((NODES * GPUS))
exec "${command[@]}"
