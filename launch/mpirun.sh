#!/usr/bin/env bash
# Pretrain under mpirun; rank, world size and master address come from mpi4py: pip install '.[mpi]'
#
#   RANKS=8 launch/mpirun.sh --config configs/gpt2-345m.yaml
#   RANKS=32 HOSTS=node0:8,node1:8,node2:8,node3:8 launch/mpirun.sh --config configs/gpt2-345m.yaml --engine megatron
#
#   RANKS=2      processes in all
#   HOSTS=...    machines with their slots, as mpirun's --host takes them (default: this one)
#   MPIRUN=...   the mpirun to use, with options of your own
#   DRY_RUN=1    print the command, the batch arithmetic and the memory, and stop
set -euo pipefail
PY=${PY:-python}
RANKS=${RANKS:-2}
case $RANKS in *[!0-9]*) echo "RANKS must be a whole number, not $RANKS" >&2 && exit 2 ;; esac
commas=${HOSTS:-} && commas=${commas//[!,]/}
# Its share of the cores for each rank, if all machines have as many ranks.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) * (${#commas} + 1) + RANKS - 1) / RANKS))}
read -r -a command <<<"${MPIRUN:-mpirun}"
command+=(-n "$RANKS" ${HOSTS:+--host "$HOSTS"} "$PY" -m alto_distributed pretrain "$@")
if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${command[@]}" && echo
    exec "$PY" -m alto_distributed pretrain "$@" --dry-run --world "$RANKS"
fi
if ! command -v "${command[0]}" >/dev/null; then
    echo "there is no ${command[0]}: pip install 'alto-distributed[mpi]'" >&2
    exit 127
fi
# A launcher would bury what is wrong in its own words.
"$PY" -m alto_distributed pretrain "$@" --check --world "$RANKS"
exec "${command[@]}"
