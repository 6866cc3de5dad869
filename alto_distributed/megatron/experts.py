"""What Megatron's modules of experts do not say of their parameters.

A parameter may hold all experts of a rank. Each expert is a parameter of its own to ALTO. The experts lie one after the
other in memory:

    module                                     parameter        its shape, with E experts on this rank
    GroupedMLP (up to 0.16)                    weight1          (hidden, E * ffn), read as (E, hidden, ffn)
                                               weight2          (E * ffn, hidden), read as (E, ffn, hidden)
    TEGroupedLinear (from 0.18 on), with       weight, bias     (E, ...)
    single_grouped_weight, single_grouped_bias

A parameter may be cut over the experts' tensor-parallel ranks and not say ``tensor_model_parallel``. Those of
TEGroupedLinear do not, with a megatron-core before 0.19 and TransformerEngine 2.13 or later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

#: Parameters of GroupedMLP -> the dimension that all experts share.
_GROUPED_MLP = {"weight1": 1, "weight2": 0}

#: Parameters of TEGroupedLinear -> the attribute that says that they hold all experts.
_SINGLE_GROUPED = {"weight": "single_grouped_weight", "bias": "single_grouped_bias"}

#: Classes of grouped linear layers -> the names of their parameters that tensor parallelism cuts.
_CUT = {
    "TEColumnParallelGroupedLinear": re.compile(r"(weight|bias)\d*"),
    "TERowParallelGroupedLinear": re.compile(r"weight\d*"),
}


@dataclass(frozen=True)
class PackedExperts:
    """How a parameter holds its experts."""

    count: int
    dim: int | None
    """The dimension that experts share; None if the first one counts them."""

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of one expert's part of a parameter."""
        if self.dim is None:
            return tuple(whole[1:])
        return tuple(n // self.count if dim == self.dim else n for dim, n in enumerate(whole))


def packed_experts(model_chunks: Sequence[torch.nn.Module]) -> dict[torch.Tensor, PackedExperts]:
    """The parameters of a model that hold several experts."""
    return {param: packed for chunk in model_chunks for module in chunk.modules() for param, packed in _in(module)}


def cut_experts(model_chunks: Sequence[torch.nn.Module]) -> set[torch.Tensor]:
    """The parameters of grouped linear layers that are cut where there is tensor parallelism of experts."""
    found: set[torch.Tensor] = set()
    for module in (module for chunk in model_chunks for module in chunk.modules()):
        for names in (_CUT[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _CUT):
            found.update(p for name, p in module.named_parameters(recurse=False) if names.fullmatch(name))
    return found


def _in(module: torch.nn.Module) -> Iterator[tuple[torch.Tensor, PackedExperts]]:
    if any(cls.__name__ == "GroupedMLP" for cls in type(module).__mro__):
        for name, dim in _GROUPED_MLP.items():
            yield getattr(module, name), PackedExperts(int(module.num_local_experts), dim)  # type: ignore[arg-type]
    for name, attribute in _SINGLE_GROUPED.items():
        if getattr(module, attribute, False) is not True or not isinstance(getattr(module, name, None), torch.Tensor):
            continue
        param, count = getattr(module, name), int(module.num_gemms)  # type: ignore[arg-type]
        if param.shape[0] != count:
            raise ValueError(
                f"ALTO under Megatron: {attribute} of {type(module).__name__} has {count} experts and a {name} of "
                f"shape {tuple(param.shape)}, whose first dimension does not count them; set moe_{attribute}=False"
            )
        yield param, PackedExperts(count, None)
