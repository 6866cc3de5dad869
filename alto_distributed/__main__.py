"""Register ALTO with the frameworks, then run the user's own script unchanged.

torchrun --nproc-per-node 8 -m alto_distributed train.py --deepspeed --deepspeed_config ds.json
torchrun --nproc-per-node 8 -m alto_distributed Megatron-LM/pretrain_gpt.py --optimizer alto --alto-alpha -5 ...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from .registration import register


def main() -> None:
    # DeepSpeed's launcher (--module) puts the rank between the module and its arguments; it is meant for the script.
    rank = [sys.argv.pop(1)] if sys.argv[1:] and sys.argv[1].startswith("--local_rank=") else []
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        raise SystemExit("usage: python -m alto_distributed SCRIPT [arguments of the script ...]")
    script = Path(sys.argv[1])
    if not script.is_file():
        raise SystemExit(f"alto_distributed: there is no script {script}")
    register()
    sys.argv = [sys.argv[1], *rank, *sys.argv[2:]]
    sys.path[0] = str(script.resolve().parent)  # as "python script.py" would have it
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
