"""The command: run what is left of the study, or say how far it is."""

from __future__ import annotations

import argparse
import os

import torch

from .ledger import Ledger, OutOfTime
from .queue import parts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.evidence.recipes", description=__doc__)
    parser.add_argument("what", choices=["run", "status"])
    parser.add_argument("--seconds", type=float, help="start no run after so many seconds; without: until all is done")
    parser.add_argument("--nice", type=int, default=0, help="how much to give way to other processes, to 19")
    options = parser.parse_args()
    os.nice(options.nice)
    torch.set_num_threads(1)
    ledger = Ledger(seconds=options.seconds if options.what == "run" else 0)
    for name, part in parts():
        try:
            part(ledger)
            print(f"done: {name}", flush=True)
        except OutOfTime:
            print(f"not finished: {name}", flush=True)
    print(f"{len(ledger)} runs, {ledger.seconds() / 3600:.2f} core-hours")


if __name__ == "__main__":
    main()
