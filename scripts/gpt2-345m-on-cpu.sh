#!/usr/bin/env bash
# The true GPT-2 345M for a few iterations on two CPU ranks: what memory a rank needs against the estimate, and where the
# time of a step goes. Needs 16 GiB and minutes. Arguments go to the training program, like --engine or settings.
#
#   RANKS=2      processes on this machine
#   RUN=...      directory of the run (default: a new one in runs/)
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=setup.sh
source "$(dirname "$0")/setup.sh" deepspeed,pretrain
cd "$ROOT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
export ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_BF16} PYTHONWARNINGS=${PYTHONWARNINGS:-ignore::FutureWarning}
PATH=$(dirname "$PY"):$PATH
RUN=${RUN:-runs/345m-on-cpu-$(date +%Y%m%d-%H%M%S)}
RANKS=${RANKS:-2}
case $RANKS in *[!0-9]*) echo "RANKS must be a whole number, not $RANKS" >&2 && exit 2 ;; esac

"$PY" -m alto_distributed prepare --output data/stdlib --tokenizer bpe --vocabulary 1024
# In float32: few CPUs have bf16 products, and without them those take twelve times as long. Without dropout: with it,
# torch's attention on CPUs keeps its whole matrix. With recomputation, for two ranks to fit into 24 GiB.
job=(pretrain --config configs/gpt2-345m.yaml --into "$RUN" data.directory=data/stdlib training.precision=fp32
    model.dropout=0 training.recompute=true training.iterations=4 training.micro_batch=1 "training.global_batch=$((2 * RANKS))" schedule.warmup=1 logs.every=1
    logs.diagnostics_every=0 evaluation.samples="$RANKS" checkpoints.every=0 checkpoints.keep=1 "$@")
"$PY" -m alto_distributed "${job[@]}" --dry-run --world "$RANKS"
"$PY" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" -m alto_distributed "${job[@]}"
"$PY" - "$RUN/metrics.jsonl" <<'PYTHON'
import json, sys
steps = [r for r in map(json.loads, open(sys.argv[1])) if "loss" in r][1:]  # the first one also warms up
for name in [n for n in steps[0] if n.startswith("seconds_")]:
    print(f"{name.removeprefix('seconds_'):20} {sum(s[name] for s in steps) / len(steps):8.2f} s")
print(f"{'peak memory':20} {steps[-1]['peak_gib']:8.2f} GiB on rank 0, python and libraries included")
print("losses              ", *(f"{s['loss']:.4f}" for s in steps))
PYTHON
