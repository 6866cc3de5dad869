"""Register ALTO with the frameworks, then run the user's own script unchanged; or one of our own commands.

torchrun --nproc-per-node 8 -m alto_distributed train.py --deepspeed --deepspeed_config ds.json
torchrun --nproc-per-node 8 -m alto_distributed Megatron-LM/pretrain_gpt.py --optimizer alto --alto-alpha -5 ...
torchrun --nproc-per-node 8 -m alto_distributed pretrain --config configs/gpt2-345m.yaml

The console script ``alto`` is the same as ``python -m alto_distributed``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from .errors import MissingExtra, UnsupportedVersion
from .extras import explained
from .import_hooks import register
from .sharding.shutdown import leave

#: Ours, in alto_distributed.pretrain; anything else is a script.
COMMANDS = ("prepare", "pretrain", "compare", "report", "estimate")
USAGE = f"""usage: {{0}} SCRIPT [arguments of the script ...]
       {{0}} {{{{{",".join(COMMANDS)}}}}} [--help]
       {{0}} doctor [--json]"""


def main() -> None:
    # DeepSpeed's launcher (--module) puts the rank between the module and its arguments; it is meant for the script.
    rank = [sys.argv.pop(1)] if sys.argv[1:] and sys.argv[1].startswith("--local_rank=") else []
    program = "alto" if Path(sys.argv[0]).stem == "alto" else "python -m alto_distributed"
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(USAGE.format(program))
        return
    if len(sys.argv) < 2:
        raise SystemExit(USAGE.format(program))
    if sys.argv[1] == "doctor" and not Path(sys.argv[1]).is_file():
        from .doctor import main as doctor

        raise SystemExit(doctor(sys.argv[2:]))
    if sys.argv[1] in COMMANDS and not Path(sys.argv[1]).is_file():
        register()
        try:
            from .pretrain.cli import main as command

            command([sys.argv[1], *rank, *sys.argv[2:]], program)
        except ImportError as error:
            reason = str(error) if isinstance(error, MissingExtra | UnsupportedVersion) else explained(error)
            if reason is None:
                raise
            raise SystemExit(f"alto_distributed {sys.argv[1]}: {reason}") from error
        leave()
        return
    script = Path(sys.argv[1])
    if not script.is_file():
        raise SystemExit(f"alto_distributed: there is no script {script}")
    register()
    sys.argv = [sys.argv[1], *rank, *sys.argv[2:]]
    sys.path[0] = str(script.resolve().parent)  # as "python script.py" would have it
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
