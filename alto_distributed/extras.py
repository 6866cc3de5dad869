"""The extras of pyproject.toml: which one installs a module that is missing."""

from __future__ import annotations

import importlib.util
import sys

from .errors import MissingExtra

#: Top-level module -> the extra that installs it.
EXTRA_OF = {
    "deepspeed": "deepspeed",
    "megatron": "megatron",
    "mpi4py": "mpi",
    "triton": "gpu",
    "mlflow": "loggers",
    "wandb": "loggers",
    "pyarrow": "data",
    "zstandard": "data",
    **dict.fromkeys(
        (
            *("matplotlib", "numpy", "pydantic", "pytorch_optimizer", "tensorboard", "tokenizers", "tqdm"),
            *("transformers", "yaml"),
        ),
        "pretrain",
    ),
}


def require(*modules: str) -> None:
    """Check that modules are installed, without importing them.

    Raises:
        MissingExtra: some are not; it names them and what to install.
    """
    missing = [module for module in modules if _is_missing(module)]
    if missing:
        raise MissingExtra(what_to_install(*missing))


def what_to_install(*missing: str) -> str:
    """A line about missing modules, which all belong to extras."""
    extras = sorted({EXTRA_OF[module.partition(".")[0]] for module in missing})
    verb = "is" if len(missing) == 1 else "are"
    return f"{' and '.join(missing)} {verb} not installed: pip install 'alto-distributed[{','.join(extras)}]'"


def explained(error: ImportError) -> str | None:
    """The same for an import that failed; None if no extra has the module."""
    name = error.name or ""
    known = isinstance(error, ModuleNotFoundError) and name.partition(".")[0] in EXTRA_OF
    return what_to_install(name) if known else None


def _is_missing(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is None
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # the package that it belongs to
        return True
