"""Our optimizers as PyTorch's own tests take optimizers: an OptimizerInfo each. The inputs of E are the base's."""

import inspect

import torch
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
    optim_db,
)

from alto_distributed import ALTO, LAMB, E


def alto_inputs(device, dtype=None):
    kwargs = {
        "default": {},
        "lr": {"lr": 0.001},
        "tensor lr": {"lr": torch.tensor(0.001)},
        "decay": {"weight_decay": 0.1},
        "no decay": {"weight_decay": 0.0, "layerwise": "matrices"},
        "maximize": {"maximize": True, "weight_decay": 0.1},
        "betas": {"betas": (0.9, 0.8, 0.95)},
        "no ratio": {"layerwise": "none"},
        "vanilla": {"bias_correction": False, "layerwise": "all"},
        "trust_clip": {"trust_clip": (0.1, 2.0)},
        "bfloat16 states": {"grad_ema_dtype": "bfloat16", "exp_avg_dtype": "bfloat16"},
        "torch kernel": {"kernel": "torch", "foreach": True, "fused": True},
        "capturable": {"capturable": True},
    }
    return [OptimizerInput(params=None, kwargs=given, desc=name) for name, given in kwargs.items()]


def lamb_inputs(device, dtype=None):
    """Those of ALTO that LAMB takes."""
    own = inspect.signature(LAMB).parameters
    inputs = [given for given in alto_inputs(device) if given.kwargs.keys() <= own.keys()]
    return [given for given in inputs if given.kwargs.get("layerwise") != "all"]


def alto_errors(device, dtype):
    wrong = {"lr": -1.0, "betas": (0.9, 1.0, 0.9), "eps": -1.0, "weight_decay": -1.0, "trust_clip": (2.0, 1.0)}
    own = [
        ErrorOptimizerInput(
            OptimizerInput(params=None, kwargs={name: value}, desc=name), error_type=ValueError, error_regex=name
        )
        for name, value in {**wrong, "capturable": "yes", "differentiable": True}.items()
    ]
    return get_error_inputs_for_all_optims(device, dtype) + own


def info_of(cls):
    """PyTorch's, for E of one of its optimizers."""
    base = next(info for info in optim_db if info.optim_cls is cls)
    return OptimizerInfo(
        E.of(cls),
        optim_inputs_func=base.optim_inputs_func,
        optim_error_inputs_func=base.optim_error_inputs_func,
        scheduler_inputs=base.scheduler_inputs,
        supported_impls=base.supported_impls,
        supports_complex=False,  # E refuses complex gradients
    )


INFOS = [
    *(
        OptimizerInfo(
            cls,
            optim_inputs_func=inputs,
            optim_error_inputs_func=alto_errors,
            scheduler_inputs=next(info for info in optim_db if info.optim_cls is torch.optim.AdamW).scheduler_inputs,
            supported_impls=("foreach", "fused"),
            supports_complex=False,
        )
        for cls, inputs in ((ALTO, alto_inputs), (LAMB, lamb_inputs))
    ),
    info_of(torch.optim.SGD),
    info_of(torch.optim.AdamW),
    *([info_of(torch.optim.Muon)] if hasattr(torch.optim, "Muon") else []),  # from torch 2.9
]
