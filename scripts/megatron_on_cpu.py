"""Megatron-core without a GPU, for tests and demonstrations: stand-ins for the pieces of CUDA that it insists on.

    from scripts.megatron_on_cpu import install
    install()                      # before anything of megatron is imported; process groups are gloo's
    import megatron.core

As a program it runs a training script of Megatron's, with ALTO at hand, on the CPU:

    torchrun --nproc-per-node 2 scripts/megatron_on_cpu.py Megatron-LM/pretrain_gpt.py --optimizer alto ...

which is ``torchrun --nproc-per-node 2 -m alto_distributed Megatron-LM/pretrain_gpt.py --optimizer alto ...`` after
:func:`install`, :func:`install_for_pretraining` and :func:`norms_for_sequence_parallel`.

Never use it where there is a GPU; :func:`install` refuses. Nothing of ALTO's depends on it, and it knows nothing of
ALTO (the runner apart): what runs under it is Megatron's own code, with its tensors in main memory.

Beside each stand-in a line says what a GPU user has instead. tests/helpers/pretend/megatron.py needs two of
them, on a device that has the rules of CUDA and NCCL.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import importlib.metadata
import logging
import os
import sys
import time
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._device import _device_constructors

from alto_distributed.import_hooks import AfterImport

_CPU = torch.device("cpu")


def install() -> None:
    """Put the stand-ins in place, once.

    Raises:
        RuntimeError: there is a GPU, or Megatron is imported already and has bound what should be replaced.
    """
    if getattr(torch.cuda, "stands_in_for_a_gpu", False):
        return
    if torch.cuda.is_available():
        raise RuntimeError("there is a GPU: megatron_on_cpu would only be in Megatron's way, run without it")
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core is imported already: call megatron_on_cpu.install() before that")
    torch.cuda.stands_in_for_a_gpu = True
    # Megatron compiles small functions with inductor, which takes longer here than all that is run with them. On a GPU:
    # compiled. None of them is ours, and ALTO's step is not compiled.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _devices()
    _random_numbers()
    _streams()
    sys.meta_path.insert(0, AfterImport({"megatron.core.transformer.moe.moe_utils": _experts}))


def install_for_pretraining() -> None:
    """What Megatron-LM's own scripts (``megatron.training``) need on top of :func:`install`."""
    install()
    # Megatron-LM's main branch is written for Python 3.12; this is all it takes for 3.11. On a GPU: the same.
    typing.override = getattr(typing, "override", lambda method: method)
    # With no device to count, they do not set up model parallelism. On a GPU: as many as there are.
    torch.cuda.device_count = lambda: 1
    # For messages, and to choose kernels that are not used here. On a GPU: its own.
    torch.cuda.get_device_capability = lambda device=None: (8, 0)
    torch.cuda.get_device_properties = lambda device=None: _Properties()
    # Asked for in every log line. On a GPU: real figures.
    torch.cuda.memory_stats = lambda device=None: collections.defaultdict(int)
    actions = {
        "megatron.core.datasets": _index_builder_of_the_wheel,
        "megatron.core.dist_checkpointing.strategies.filesystem_async": _fork_to_save,
        "megatron.training.initialize": _initialize_without_a_gpu,
    }
    sys.meta_path.insert(0, AfterImport(actions))


def norms_for_sequence_parallel() -> None:
    """Mark torch's norms, so that Megatron sums their gradients over tensor-parallel ranks. Call it before the import.

    On a GPU: norms of Apex or TransformerEngine; without both, Megatron's wrapper of torch's norm refuses sequence
    parallelism. The training program does not need this: it has norms of its own.
    """
    sys.meta_path.insert(0, AfterImport({"megatron.core.transformer.torch_norm": _norms_with_the_mark}))


# -- devices and types -------------------------------------------------------------------------------------


def _cpu_for_cuda(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str):
        return _CPU if value.split(":")[0] == "cuda" else value
    return value


def rename_devices(rename: Callable[[Any], Any], prefix: str, without: Sequence[str] = ()) -> None:
    """Have all functions that make or move tensors ask for another device.

    A mode of torch functions would do the same, at a cost for every call, and not in backward passes.

    Args:
        rename: of each argument, what is given instead.
        prefix: of the names of tensor types. Megatron's optimizers sort parameters by these, and know those of CUDA
            alone. On a GPU the names are these.
        without: arguments by name that are left out.
    """

    def numbered(value: Any) -> Any:
        return rename(torch.device("cuda", value) if type(value) is int else value)

    def renamed(function: Any, first: Callable[[Any], Any] = rename) -> Any:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs = {name: rename(value) for name, value in kwargs.items() if name not in without}
            if "device" in kwargs:
                kwargs["device"] = numbered(kwargs["device"])
            return function(*args[:1], *map(first, args[1:2]), *map(rename, args[2:]), **kwargs)

        return called

    makers = {function.__name__ for function in _device_constructors()}
    for name in [name for name in vars(torch) if name in makers or name.endswith("_like")]:
        setattr(torch, name, renamed(getattr(torch, name)))
    for name in [name for name in dir(torch.Tensor) if name.startswith("new_")]:
        setattr(torch.Tensor, name, renamed(getattr(torch.Tensor, name)))
    torch.Tensor.to = renamed(torch.Tensor.to, first=numbered)
    type_of = torch.Tensor.type

    def type_of_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)
        return result.replace(prefix, "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = type_of_tensor


def _devices() -> None:
    """Every call that asks for the device "cuda", by name or by argument, gets the CPU.

    On a GPU: tensors there, and errors where host and device meet. tests/helpers/pretend/megatron.py has those rules.
    """
    # Pinning memory needs a GPU to pin it for. There copies from it run beside the host, which must wait for them.
    rename_devices(_cpu_for_cuda, "torch.", without=("pin_memory",))
    # Megatron allocates on "the current device" everywhere. On a GPU: the number that the program must have set before.
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self


# -- random numbers ----------------------------------------------------------------------------------------


class _OneGenerator:
    """The generator of the CPU, whatever the index of the GPU. A GPU has its own, so dropout draws other numbers."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


def _random_numbers() -> None:
    generator = torch.default_generator
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device=None: generator.get_state()
        module.set_rng_state = lambda state, device=None: generator.set_state(state)
        # Not torch.manual_seed, which calls these.
        module.manual_seed = lambda seed: generator.manual_seed(seed)
    torch.cuda.default_generators = _OneGenerator()
    # Megatron sets states through these two; torch would keep the call until a GPU turns up. On a GPU: done at once.
    torch.cuda._lazy_call = lambda call, **_: call()
    torch.cuda._lazy_init = lambda: None
    # Megatron warns when the CPU's generator moved while a GPU's was in use; here they are one. On a GPU: no warning.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


# -- streams and events ------------------------------------------------------------------------------------


class _Stream:
    """A queue of work that is always done, because nothing runs beside anything here.

    On a GPU: work that is not waited for may not be done. Neither this nor tests/helpers/pretend can show that.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def _done(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = _done

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Event()

    def query(self) -> bool:
        return True


class _Event:
    """A moment in such a queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 1000.0 * (end._time - self._time)


def _streams() -> None:
    only = _Stream()
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: only
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.set_stream = lambda stream: None
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.record_stream = lambda self, stream: None


# -- Megatron-LM's scripts ---------------------------------------------------------------------------------


class _Properties:
    """Of a GPU that is not there."""

    name, major, minor, multi_processor_count, total_memory = "CPU", 8, 0, 1, 1 << 34


def _initialize_without_a_gpu() -> None:
    from megatron.training import initialize

    # It asks for a GPU before anything else, and its callers do not use its way out. On a GPU: there is one.
    initialize.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    # Kernels for GPUs; and an index builder for data sets, which would be written into the tree (see below). On a GPU:
    # compiled at the first start.
    initialize._compile_dependencies = lambda: None


def _fork_to_save() -> None:
    """A spawned process imports the script again, without what stands in here, and main's does not import so.

    On a GPU: spawned, by Megatron-LM's scripts. Our own saves start no process (engines/megatron/checkpoint.py).
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if hasattr(filesystem_async, "get_write_results_queue"):
        filesystem_async.get_write_results_queue = functools.partial(filesystem_async.get_write_results_queue, "fork")


def _index_builder_of_the_wheel() -> None:
    """The compiled module that is not in the tree comes with the installed megatron-core. On a GPU: it is compiled."""
    import megatron.core.datasets

    compiled = importlib.metadata.distribution("megatron-core").locate_file("megatron/core/datasets")
    megatron.core.datasets.__path__.append(str(compiled))


# -- Megatron itself ---------------------------------------------------------------------------------------


def names_of_transformer_engine() -> None:
    """0.16.1 asks whether this name is None, and without TransformerEngine has not defined it.

    On a GPU: without TransformerEngine the same NameError, in any model with experts. It is Megatron's to mend.
    """
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


def _experts() -> None:
    """Megatron makes arrays, which its collectives want, only of what comes from a GPU. On a GPU: it makes them."""
    names_of_transformer_engine()
    from megatron.core.transformer.moe import moe_utils

    move = moe_utils.maybe_move_tensor_to_cpu

    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = move(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    moe_utils.maybe_move_tensor_to_cpu = move_to_cpu


def _norms_with_the_mark() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    build = WrappedTorchNorm.__new__

    def __new__(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = build(cls, plain, *args, **kwargs)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = __new__


if __name__ == "__main__":
    from alto_distributed.__main__ import main
    from alto_distributed.sharding.shutdown import leave

    install_for_pretraining()
    if sys.argv[1:2] != ["pretrain"]:
        norms_for_sequence_parallel()
    main()
    leave()
