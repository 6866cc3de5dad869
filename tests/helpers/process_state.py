"""What DeepSpeed changes in the whole process and never changes back. Put back after each case, so that no case depends
on those before it."""

import contextlib
import sys
import types

import torch


@contextlib.contextmanager
def restored():
    """Leave the process as it was, as far as engines that come later can tell."""
    linear = torch.nn.functional.linear  # stage 3 replaces it by one that rounds otherwise
    kept = [
        # Once it was asked for float16 autocast, later engines have a GradScaler, which skips steps on one rank alone.
        _variables("deepspeed.runtime.torch_autocast"),
        # Groups for experts and tensor parallelism; those of all ranks are the same for every engine.
        _variables("deepspeed.utils.groups", but=("_WORLD_GROUP",)),
        _variables("deepspeed.runtime.sequence_parallel.parallel_state_sp"),
    ]
    try:
        yield
    finally:
        torch.nn.functional.linear = linear
        for variables, values in kept:
            variables.update(values)


def _variables(name, but=()):
    """A module's variables, if it is imported, and their values now."""
    variables = vars(sys.modules[name]) if name in sys.modules else {}
    code = (types.ModuleType, types.FunctionType, type)
    values = {key: value for key, value in variables.items() if not isinstance(value, code) and key not in but}
    return variables, {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
