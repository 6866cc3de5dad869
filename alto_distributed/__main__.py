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

from .errors import MissingExtra, Refused, UnsupportedVersion, did_you_mean, named, refused
from .extras import explained
from .import_hooks import register
from .sharding.shutdown import end, leave, worker_threads
from .version import __version__

#: Ours, in alto_distributed.pretrain; anything else is a script.
COMMANDS = {
    "prepare": "turn text into data to train on",
    "pretrain": "train, or go on training",
    "compare": "train with several optimizers from the same weights and data",
    "sweep": "find the best rate of each optimizer, and compare them at these",
    "report": "table and figures of runs",
    "export": "write a trained model for Hugging Face transformers",
    "generate": "continue a text with a trained model",
    "eval": "loss and perplexity of a trained model on other data",
    "estimate": "memory on each rank, and of a checkpoint",
}
_ALL = {**COMMANDS, "doctor": "check this machine: versions, kernels, engines"}
_LINES = "\n".join(f"  {name:10}{what}" for name, what in _ALL.items())
USAGE = f"""usage: {{0}} SCRIPT [arguments of the script ...]
       {{0}} COMMAND [--help]
       {{0}} --version

commands:
{_LINES}"""


def main() -> None:
    # DeepSpeed's launcher (--module) puts the rank between the module and its arguments; it is meant for the script.
    rank = [sys.argv.pop(1)] if sys.argv[1:] and sys.argv[1].startswith("--local_rank=") else []
    program = "alto" if Path(sys.argv[0]).stem == "alto" else "python -m alto_distributed"
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(USAGE.format(program))
        return
    if sys.argv[1:2] == ["--version"]:
        print(f"alto_distributed {__version__}")
        return
    if len(sys.argv) < 2:
        print(USAGE.format(program), file=sys.stderr)
        raise SystemExit(2)
    if sys.argv[1] == "doctor" and not Path(sys.argv[1]).is_file():
        from .doctor import main as doctor

        raise SystemExit(doctor(sys.argv[2:]))
    if sys.argv[1] in COMMANDS and not Path(sys.argv[1]).is_file():
        register()
        try:
            from .pretrain.cli import main as command

            command([sys.argv[1], *rank, *sys.argv[2:]], program)
        except Refused as ended:
            if worker_threads():
                end(ended.code)  # of process groups; the interpreter's own end would now and then be a SIGABRT
            raise
        except ImportError as error:
            reason = str(error) if isinstance(error, MissingExtra | UnsupportedVersion) else explained(error)
            if reason is None:
                raise
            raise refused(sys.argv[1], ImportError(reason)) from error
        leave()
        return
    script = Path(sys.argv[1])
    if not script.is_file():
        hint = did_you_mean(sys.argv[1], list(_ALL), cutoff=0.6)
        kind = "script" if script.suffix else "command or script"
        raise refused("", f"there is no {kind} {named(str(script))}{hint or f'; see {program} --help'}")
    register()
    sys.argv = [sys.argv[1], *rank, *sys.argv[2:]]
    sys.path[0] = str(script.resolve().parent)  # as "python script.py" would have it
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
