#!/usr/bin/env bash
# Prepare data, pretrain configs/gpt2-tiny.yaml with ALTO under ZeRO-2 in bf16 on CPU ranks by torchrun,
# stop half-way, resume from the sharded checkpoint, report. Arguments go to the training program, so another engine,
# optimizer or setting is:  launch/tiny.sh --optimizer adamw optimizer.lr=1e-3
#
#   RANKS=2      processes on this machine
#   RUN=...      directory of the run (default: a new one in runs/)
#   DRY_RUN=1    print the commands, the batch arithmetic and the memory, and stop
set -euo pipefail
needs=deepspeed,pretrain
case " $* " in *" --engine megatron "* | *" --engine=megatron "* | *" engine=megatron "*) needs=megatron,pretrain ;; esac
# shellcheck source-path=SCRIPTDIR source=../scripts/setup.sh
source "$(dirname "$0")/../scripts/setup.sh" "$needs"
cd "$ROOT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
# bf16 products die with SIGILL on hosts that advertise AMX without letting it be used.
export ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_BF16}
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore::FutureWarning} # of torch, about DeepSpeed
PATH=$(dirname "$PY"):$PATH # DeepSpeed looks for ninja there
RUN=${RUN:-runs/tiny-$(date +%Y%m%d-%H%M%S)}

prepare=("$PY" -m alto_distributed prepare --output data/stdlib --tokenizer bpe --vocabulary 1024)
train=("$PY" -m torch.distributed.run --standalone --nproc-per-node "${RANKS:-2}"
    -m alto_distributed pretrain --config configs/gpt2-tiny.yaml --into "$RUN" "$@")
# torchrun would bury what is wrong in its own words, and end with 1. The first command makes the data, so it is no
# error here that there are none.
check=("$PY" -m alto_distributed pretrain --config configs/gpt2-tiny.yaml --into "$RUN" "$@" --world "${RANKS:-2}")
[ -z "${DRY_RUN:-}" ] && check+=(--check) || check+=(--dry-run)
said=$("${check[@]}" 2>&1) || case $said in
*"holds no prepared data"*) ;;
*) status=$? && echo "$said" >&2 && exit "$status" ;;
esac
if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${prepare[@]}" && echo
    printf '%q ' "${train[@]}" && echo
    echo "$said"
    exit
fi
"${prepare[@]}"
"${train[@]}" --stop-at 100
"${train[@]}"
