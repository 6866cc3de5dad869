"""Which engines ALTO can be used with here: supported, untested, refused, or not installed; and what to do."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedVersion
from ..framework_import import advice, conflicts
from ..torch_version import OLDEST_THAT_LOADS_SAFELY, check_torch
from . import facts, processes


class Framework(NamedTuple):
    name: str
    folder: str
    module: str
    package: str


FRAMEWORKS = (
    Framework("DeepSpeed", "deepspeed", "deepspeed", "deepspeed"),
    Framework("Megatron", "megatron", "megatron.core", "megatron-core"),
)

#: What the training program imports beside torch: modules, as pip's extra "pretrain" brings them.
_PROGRAM = ("numpy", "yaml", "tqdm", "tokenizers", "transformers")

USABLE = ("supported", "untested")


def pytorch() -> dict[str, Any]:
    """PyTorch itself: DDP, FSDP2, tensor parallelism."""
    try:
        check_torch(str(torch.__version__))
    except UnsupportedVersion as error:
        return _engine("PyTorch, FSDP2", "refused", str(torch.__version__), message=str(error))
    message = "" if torch.distributed.is_available() else "this build has no torch.distributed: one process alone"
    return _engine("PyTorch, FSDP2", "supported", str(torch.__version__), message=message)


def framework(which: Framework, seconds: float) -> dict[str, Any]:
    """DeepSpeed or Megatron: imported by its folder here, in a process of its own."""
    place = facts.origin(which.module)
    if place is None:
        wanted = f"if you want it: pip install '.[{which.folder}]' in a clone of alto_distributed"
        return _engine(which.name, "not installed", message=wanted)
    (ended,) = processes.run(["framework", *which[1:]], seconds=seconds)
    if ended.records:
        status, message, version = (ended.records[-1][key] for key in ("status", "message", "version"))
    else:
        status, version = "refused", None
        message = f"it cannot be imported: {ended.problem or 'its process said nothing'}; {advice(which.package)}"
    unmet = conflicts(which.package)
    if unmet and status in USABLE:
        message = "; ".join(filter(None, [message, f"imported, but {unmet[0]}"]))
    version = version or facts.version_at(which.package, place)
    return _engine(which.name, status, version, facts.shown_path(place), message)


def training_program(others: list[dict[str, Any]]) -> dict[str, Any]:
    """``python -m alto_distributed pretrain``.

    Args:
        others: the frameworks' verdicts; it needs one that is usable.
    """
    name, wanted = "training program", "if you want it: pip install '.[pretrain]' in a clone of alto_distributed"
    missing = [module for module in _PROGRAM if facts.origin(module) is None]
    if missing:
        return _engine(name, "not installed", message=f"{', '.join(missing)} missing; {wanted}")
    try:
        check_torch(str(torch.__version__), OLDEST_THAT_LOADS_SAFELY, "the pretraining program")
    except UnsupportedVersion as error:
        return _engine(name, "refused", message=str(error))
    usable = [other for other in others if other["status"] in USABLE]
    if not usable:
        return _engine(name, "refused", message="needs DeepSpeed or Megatron, and neither can be used: see above")
    status = "supported" if any(other["status"] == "supported" for other in usable) else "untested"
    return _engine(name, status, message=f"with {' and '.join(other['name'] for other in usable)}")


def _engine(
    name: str, status: str, version: str | None = None, place: str | None = None, message: str = ""
) -> dict[str, Any]:
    return {"name": name, "status": status, "version": version, "from": place, "message": message}
