"""Programs of checks: functions that raise, run one after the other, with what each has raised in a file."""

import json
import sys
import traceback
import warnings

import torch


def run(checks):
    """Run functions by name, and write {name: "" or a traceback} to the file that the command line names."""
    outcomes = {}
    for name, check in checks.items():
        torch.manual_seed(1234)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    with open(sys.argv[1], "w") as file:
        json.dump(outcomes, file)
