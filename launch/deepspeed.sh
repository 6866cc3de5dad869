#!/usr/bin/env bash
# Pretrain by DeepSpeed's own launcher (--engine deepspeed).
#
#   GPUS=8 launch/deepspeed.sh --config configs/gpt2-345m.yaml
#   HOSTFILE=hosts launch/deepspeed.sh --config configs/gpt2-345m.yaml
#
#   GPUS=2           processes on this machine
#   HOSTFILE=...     several machines: "host slots=8" a line
#   DRY_RUN=1        print the command, the batch arithmetic and the memory, and stop
set -euo pipefail
PY=${PY:-python}
if [ -n "${HOSTFILE:-}" ]; then
    # DeepSpeed hands names of hosts to shells, here and there.
    while read -r line || [ -n "$line" ]; do
        if ! [[ $line =~ ^([A-Za-z0-9._:-]+[[:space:]]+slots=[0-9]+[[:space:]]*)?(#.*)?$ ]]; then
            printf '%s has the line "%s", and a line is "host slots=8"\n' "$HOSTFILE" "$line" >&2
            exit 2
        fi
    done <"$HOSTFILE"
    where=(--hostfile "$HOSTFILE")
    world=$(awk -F 'slots=' '{ n += $2 } END { print n + 0 }' <"$HOSTFILE") # as an argument, "a=b" would be an assignment
else
    world=${GPUS:-2}
    where=(--num_gpus "$world")
    case $world in *[!0-9]*) echo "GPUS must be a whole number, not $world" >&2 && exit 2 ;; esac
    # Its share of the cores for each rank. With HOSTFILE: set it in .deepspeed_env.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + world - 1) / world))}
fi
command=(deepspeed "${where[@]}" --module alto_distributed pretrain "$@")
if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${command[@]}" && echo
    exec "$PY" -m alto_distributed pretrain "$@" --dry-run --world "$world"
fi
if ! command -v deepspeed >/dev/null; then
    echo "there is no deepspeed: pip install 'alto-distributed[deepspeed,pretrain]'" >&2
    exit 127
fi
# A launcher would bury what is wrong in its own words.
"$PY" -m alto_distributed pretrain "$@" --check --world "$world"
exec "${command[@]}"
