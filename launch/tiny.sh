#!/usr/bin/env bash
# The main job: a small GPT pretrained with ALTO by torchrun, its parameters sharded over CPU ranks.
# Arguments go to the training script: launch/tiny.sh --steps 20 --lr 0.01
#
#   RANKS=2      processes on this machine
#   DRY_RUN=1    print the command and stop
set -euo pipefail
source "$(dirname "$0")/../scripts/setup.sh"
cd "$ROOT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# bf16 products die with SIGILL on hosts that advertise AMX without letting it be used.
export ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_BF16}
command=("$PY" -m torch.distributed.run --standalone --nproc-per-node "${RANKS:-2}" scripts/pretrain_tiny.py "$@")
if [ -n "${DRY_RUN:-}" ]; then
    echo "${command[@]}"
else
    exec "${command[@]}"
fi
