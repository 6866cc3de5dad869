"""Megatron-LM's command line: ``--optimizer alto`` and the ``--alto-*`` flags for its own scripts, unchanged.

Five functions of ``megatron.training`` are wrapped, wherever they have been imported to. Each does what it did for
every other optimizer.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import ModuleType
from typing import Any

from megatron.core.optimizer import OptimizerConfig

from ..errors import did_you_mean
from ..hyperparameters import LAYERWISE_MODES
from ..kernels import KERNELS
from ..param_groups import EMBEDDING_RULES
from ..states import DTYPES
from . import cpu_offload, monitor, precision_aware
from .config import LAMB, NAME, NAMES, AltoOptimizerConfig
from .refuse import refuse_arguments

#: Flag -> the field of AltoOptimizerConfig that it sets, what argparse should know, and what it means.
_FLAGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "--alto-alpha": (
        "alto_alpha",
        {"type": float},
        "weight of the acceleration, below 1/(1 - beta1) in size; 0 is LAMB",
    ),
    "--alto-betas": (
        "alto_betas",
        {"type": float, "nargs": 3, "metavar": ("BETA1", "BETA2", "BETA3")},
        "decay of the acceleration, of the first and of the second moment; Adam's two are the last two (default: 0.99 "
        "0.9 0.99, with lamb 0.99 0.9 0.999)",
    ),
    "--alto-eps": (
        "alto_eps",
        {"type": float, "nargs": "+", "metavar": "EPS"},
        "eps1, or all three of the paper's: eps1 eps2 eps3",
    ),
    "--alto-layerwise": (
        "alto_layerwise",
        {"choices": LAYERWISE_MODES},
        "which parameters get the layer-wise ratio",
    ),
    "--alto-trust-clip": (
        "alto_trust_clip",
        {"type": float, "nargs": 2, "metavar": ("LOW", "HIGH")},
        "limits of the layer-wise ratio, which has none without it",
    ),
    "--alto-vector-lr": (
        "alto_vector_lr",
        {"type": float, "metavar": "FACTOR"},
        "factor on the learning rate of parameters without the layer-wise ratio",
    ),
    "--alto-embeddings": (
        "alto_embeddings",
        {"choices": EMBEDDING_RULES},
        "embeddings with the layer-wise ratio, or as Adam moves them",
    ),
    "--no-alto-bias-correction": (
        "alto_bias_correction",
        {"action": "store_false"},
        'the paper\'s "ALTO Vanilla"; otherwise the moments are corrected',
    ),
    "--alto-kernel": ("alto_kernel", {"choices": KERNELS}, "what computes the update"),
    "--alto-diagnostics-every": (
        "alto_diagnostics_every",
        {"type": int, "metavar": "STEPS"},
        "measure norms and ratios every so many steps, and log them; 0 is never",
    ),
    "--alto-skip-nonfinite": (
        "alto_skip_nonfinite",
        {"action": "store_true"},
        "skip a step, on all ranks, if any gradient is not finite (fp16 always does)",
    ),
    "--alto-grad-ema-dtype": (
        "alto_grad_ema_dtype",
        {"choices": tuple(DTYPES)},
        "precision of the third state; bfloat16 is rounded stochastically",
    ),
    "--alto-exp-avg-dtype": ("alto_exp_avg_dtype", {"choices": tuple(DTYPES)}, "precision of the first moment"),
    "--alto-adopt": (
        "alto_adopt",
        {"action": "store_true"},
        "take over a checkpoint of Adam's: weights, moments and step count are kept, the third state starts from zero",
    ),
}

#: Functions that are wrapped, with the parameters that they must begin with.
_EXPECTED = {
    "add_megatron_arguments": ("parser",),
    "validate_args": ("args", "defaults"),
    "_print_args": ("title", "args"),
    "get_megatron_optimizer_config": ("args",),
}

#: What Megatron checks ALTO as. It has no words for another optimizer with element-wise states that it may shard: it
#: refuses the name, or (main) turns the distributed optimizer into one that deals out whole layers.
_MASK = "adam"

#: Of the arguments that Megatron is checking under the mask: their id, and the optimizer that they name.
_masked: dict[int, str] = {}


def patch_arguments() -> None:
    """Make ``megatron.training.arguments`` know ALTO and its flags. Idempotent.

    Raises:
        ValueError: its functions are not the ones we know; nothing is patched then.
    """
    wrappers: dict[str, Callable[..., Any]] = {
        "add_megatron_arguments": _add_megatron_arguments,
        "validate_args": _validate_args,
        "_print_args": _print_args,
    }
    _wrap(sys.modules["megatron.training.arguments"], wrappers)


def patch_training() -> None:
    """Make ``megatron.training.training`` build an :class:`AltoOptimizerConfig`. Idempotent.

    Raises:
        ValueError: its function is not the one we know; nothing is patched then.
    """
    training = sys.modules["megatron.training.training"]
    _wrap(training, {"get_megatron_optimizer_config": _get_megatron_optimizer_config})
    log = getattr(training, "training_log", None)
    # Its parameters are not the same in two releases. Without it diagnostics are not shown, which harms nothing else.
    if callable(log) and "iteration" in inspect.signature(log).parameters and not getattr(log, "knows_alto", False):
        _replace_everywhere("training_log", log, _wrapped(log, _training_log))


# -- what the five functions do for ALTO -------------------------------------------------------------------


def _add_megatron_arguments(original: Callable[..., Any], parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = original(parser)
    optimizer = next((action for action in parser._actions if "--optimizer" in action.option_strings), None)
    if optimizer is None or optimizer.choices is None:
        raise ValueError(_unknown("--optimizer is no longer a flag with a list of choices"))
    optimizer.choices = [*optimizer.choices, *NAMES]
    optimizer.type = _our_name_in_any_case
    group = parser.add_argument_group(
        "ALTO", f"only with --optimizer {' or '.join(NAMES)}; --lr and --weight-decay are Megatron's own"
    )
    for flag, (field, options, meaning) in _FLAGS.items():
        default = getattr(AltoOptimizerConfig, field)
        if default is not None and not isinstance(default, bool):
            meaning = f"{meaning} (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
        # Suppressed: a flag that was not given leaves no trace, so other optimizers' arguments are what they were.
        group.add_argument(flag, dest=field, default=argparse.SUPPRESS, help=meaning, **options)
    parser.parse_known_args = functools.partial(_parse_known_args, parser, parser.parse_known_args)  # type: ignore[method-assign]
    for action in parser._actions:
        _mend_help(action)
    return parser


def _our_name_in_any_case(name: str) -> str:
    return name.lower() if name.lower() in NAMES else name


def _parse_known_args(parser: argparse.ArgumentParser, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Also where unknown arguments are let pass, one that begins like ours is an error: it would have no effect."""
    known, unknown = original(*args, **kwargs)
    for word in unknown:
        flag = word.split("=")[0]
        if flag.startswith(("--alto-", "--no-alto-")):
            parser.error(f"unrecognized arguments: {flag}{did_you_mean(flag, list(_FLAGS))}")
    return known, unknown


def _mend_help(action: argparse.Action) -> None:
    """argparse formats a help text with %. A bare one, as main has, makes an error of all of ``--help``."""
    if isinstance(action.help, str):
        try:
            _ = action.help % {**vars(action), "prog": ""}
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")


def _validate_args(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    _refuse_flags_of_another_optimizer(args)
    if args.optimizer not in NAMES:
        return original(args, *rest, **kwargs)
    cpu_offload.check_arguments(args)
    refuse_arguments(args)
    # Before the minutes that it takes to build a large model.
    AltoOptimizerConfig(optimizer=args.optimizer, **_given(args))
    with _masked_as_adam(args):
        validated = original(args, *rest, **kwargs)
    precision_aware.check(args)  # by now they are dtypes
    return validated


def _print_args(original: Callable[..., Any], title: str, args: Any) -> None:
    """The log should name the optimizer that trains, not the mask."""
    if id(args) in _masked:
        args.optimizer = _masked[id(args)]
        try:
            original(title, args)
        finally:
            args.optimizer = _MASK
    else:
        original(title, args)


def _get_megatron_optimizer_config(original: Callable[..., Any], args: Any) -> Any:
    _refuse_flags_of_another_optimizer(args)
    if args.optimizer not in NAMES:
        return original(args)
    with _masked_as_adam(args), precision_aware.hidden(args):
        config, *rest = original(args)
    if not isinstance(config, OptimizerConfig):
        raise ValueError(_unknown(f"get_megatron_optimizer_config returns a {type(config).__name__} first"))
    known = {f.name: getattr(config, f.name) for f in fields(AltoOptimizerConfig) if f.init and hasattr(config, f.name)}
    known.update({name: getattr(args, name) for name in precision_aware.FIELDS if hasattr(args, name)})
    known["alto_checkpoint_format"] = _checkpoint_format(args)
    return AltoOptimizerConfig(**{**known, **_given(args), "optimizer": args.optimizer}), *rest


def _training_log(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    iteration = inspect.signature(original).bind(*args, **kwargs).arguments["iteration"]
    training = sys.modules["megatron.training.training"]
    found = (getattr(training, "get_tensorboard_writer", None), getattr(training, "get_wandb_writer", None))
    monitor.show(iteration, [get() for get in found if get is not None])
    return result


def _checkpoint_format(args: Any) -> str:
    """What the distributed optimizer will be saved as: worth refusing before hours of training, if it must be."""
    saves = getattr(args, "save", None) and getattr(args, "ckpt_format", None) == "torch_dist"
    if not saves or not args.use_distributed_optimizer or getattr(args, "no_save_optim", None):
        return ""
    return "fully_reshardable" if getattr(args, "dist_ckpt_optim_fully_reshardable", False) else "dp_reshardable"


def _given(args: Any) -> dict[str, Any]:
    """The values of the ``--alto-*`` flags that were given."""
    given = {field: getattr(args, field) for field, *_ in _FLAGS.values() if hasattr(args, field)}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = value[0] if len(value) == 1 else tuple(value)
    return given


def _refuse_flags_of_another_optimizer(args: Any) -> None:
    given = [flag for flag, (field, *_) in _FLAGS.items() if hasattr(args, field)]
    if args.optimizer == LAMB and "--alto-alpha" in given:
        raise ValueError(f"--alto-alpha has no effect with --optimizer {LAMB}; say --optimizer {NAME}, or leave it out")
    if given and args.optimizer not in NAMES:
        raise ValueError(
            f"{', '.join(given)} would have no effect with --optimizer {args.optimizer}; say --optimizer {NAME}, or "
            "leave it out"
        )


@contextmanager
def _masked_as_adam(args: Any) -> Iterator[None]:
    name, args.optimizer = args.optimizer, _MASK
    _masked[id(args)] = name
    try:
        yield
    finally:
        del _masked[id(args)]
        args.optimizer = name


# -- wrapping ----------------------------------------------------------------------------------------------


def _wrap(module: ModuleType, wrappers: dict[str, Callable[..., Any]]) -> None:
    """Replace functions of ``module`` by ``wrapper(original, ...)``: all of them, or none and a ValueError."""
    originals = {name: _checked(module, name) for name in wrappers}
    for name, original in originals.items():
        if not getattr(original, "knows_alto", False):
            _replace_everywhere(name, original, _wrapped(original, wrappers[name]))


def _checked(module: ModuleType, name: str) -> Callable[..., Any]:
    function, parameters = getattr(module, name, None), _EXPECTED[name]
    if not callable(function):
        raise ValueError(_unknown(f"{module.__name__} has no function {name}"))
    if tuple(inspect.signature(function).parameters) != parameters:
        raise ValueError(_unknown(f"{module.__name__}.{name} does not take ({', '.join(parameters)})"))
    return function  # type: ignore[no-any-return]


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    function.knows_alto = True  # type: ignore[attr-defined]
    return function


def _replace_everywhere(name: str, original: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """``from .arguments import validate_args`` may have been run before we came, in any module."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, ours)


def _unknown(what: str) -> str:
    return (
        f"this Megatron-LM is not one that alto_distributed knows: {what}. Use the tree of release core_v0.16.1, or "
        'build the optimizer in your own script with OptimizerConfig(optimizer="alto")'
    )
