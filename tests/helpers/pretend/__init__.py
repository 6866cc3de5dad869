"""An accelerator that is not there, to find what would break on a real one.

``install()`` makes the device "pretend" the accelerator of this process, and "pretend" a backend of
``torch.distributed``. Memory and arithmetic are the host's, so results are those of the CPU. The rules are CUDA's and
NCCL's:

- an operator on tensors of the host and of the device, or of two devices, fails;
- every value that the host reads and every copy between host and device is counted, and can be forbidden (:func:`no`);
- a copy to the host has not arrived until the host waits for its stream, or for an event after it: it finds NaN there.
  What the host writes to memory that is on its way to the device is an error, and so is an operator on what another
  stream is copying to the device, unless its own stream waits for that;
- collectives take tensors of one device of this rank, and ranks that do not run the same collectives in the same order
  are told so, instead of hanging;
- object collectives go over the device.

``PRETEND_DEVICES=1`` shows one device to each rank, and ``PRETEND_NO_FLOAT64=1`` refuses float64 in collectives.

It has nothing else that runs late, no CUDA graphs and no Triton. It is for rank processes and subprocesses: it cannot
be taken out of a process again. The extension is compiled once, in about a minute.
"""

import contextlib
import functools
import os
import time
import types
from pathlib import Path

import torch
import torch.distributed as dist

NAME = "pretend"

#: What a step must not do in the steady state.
HOST = frozenset({"read", "to host", "to device", "synchronize"})


@functools.cache
def extension():
    """The compiled part."""
    from torch.utils import cpp_extension

    os.environ.setdefault("MAX_JOBS", "2")
    here = Path(__file__).parent
    sources = [str(here / name) for name in ("device.cpp", "group.cpp")]
    lock = Path(cpp_extension._get_build_directory("alto_pretend", False)) / "lock"
    with contextlib.suppress(FileNotFoundError):
        if time.time() - lock.stat().st_mtime > 600:  # of a process that was killed: torch would wait for it forever
            lock.unlink()
    return cpp_extension.load("alto_pretend", sources, extra_cflags=["-O1"])


@functools.cache
def install():
    """Make it this process's accelerator."""
    extension()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(NAME, _group, devices=[NAME])


def _group(store, rank, size, timeout):
    return extension().Group(dist.ProcessGroupGloo(store, rank, size, timeout))


# -- counters ----------------------------------------------------------------------------------------------


def counts():
    """How often the host has done what to the device since the process began."""
    return extension().counts()


@contextlib.contextmanager
def counted():
    """A dict that has the counts of the block when it ends."""
    before, found = counts(), {}
    try:
        yield found
    finally:
        after = {what: count - before.get(what, 0) for what, count in counts().items()}
        found.update({what: count for what, count in after.items() if count})


@contextlib.contextmanager
def no(what=HOST):
    """The host may not do this in the block."""
    extension().forbid(set(what))
    try:
        yield
    finally:
        extension().forbid(set())


# -- what torch.cuda is for CUDA ---------------------------------------------------------------------------


def device_of(device=None):
    """A device with its index; None and a device without one are the current one."""
    if isinstance(device, int):
        return torch.device(NAME, device)
    device = torch.device(NAME if device is None else device)
    return device if device.index is not None else torch.device(NAME, extension().current_device())


class Stream(torch.Stream):
    """Copies on it are in order; all else that is launched on it is done at once."""

    def __new__(cls, device=None, priority=0, **known):
        if known:
            return super().__new__(cls, priority=priority, **known)
        return super().__new__(cls, device=device_of(device), priority=priority)

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event


def Event(enable_timing=False, blocking=False, interprocess=False):
    """torch's own: it refuses to measure between events of a subclass."""
    del blocking, interprocess
    return torch.Event(NAME, enable_timing=enable_timing)


def current_stream(device=None):
    found = torch.accelerator.current_stream(device_of(device))
    return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)


def default_stream(device=None):
    found = current_stream(device)
    return Stream(stream_id=0, device_index=found.device_index, device_type=found.device_type)


class stream:
    """The current stream of a block. A class, as torch.cuda's is: some enter it more than once."""

    def __init__(self, new):
        self.new = new

    def __enter__(self):
        if self.new is not None:
            self.before = current_stream(self.new.device)
            torch.accelerator.set_stream(self.new)

    def __exit__(self, *_):
        if self.new is not None:
            torch.accelerator.set_stream(self.before)


class device:
    """The current device of a block. A class, as torch.cuda's is: some ask for its type."""

    def __init__(self, device):
        self.index = None if device is None else device_of(device).index

    def __enter__(self):
        self.before = extension().current_device()
        if self.index is not None:
            extension().set_device(self.index)

    def __exit__(self, *_):
        extension().set_device(self.before)


PROPERTIES = types.SimpleNamespace(name=NAME, total_memory=80 << 30, multi_processor_count=1, major=8, minor=0)


def device_module():
    """What ``torch.pretend`` has, by the names of ``torch.cuda``."""

    def nothing(*_, **__):
        return None

    def zero(*_, **__):
        return 0

    def yes(*_, **__):
        return True

    def no_(*_, **__):
        return False

    compiled, generator = extension(), torch.default_generator
    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        # what there is
        is_available=yes,
        is_initialized=yes,
        init=nothing,
        _lazy_init=nothing,
        _is_in_bad_fork=no_,
        is_bf16_supported=yes,
        is_current_stream_capturing=no_,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        # devices
        device=device,
        device_count=compiled.device_count,
        current_device=compiled.current_device,
        set_device=lambda d: compiled.set_device(device_of(d).index),
        _get_device_index=lambda d, *_, **__: device_of(d).index,
        get_device_name=lambda *_: NAME,
        get_device_capability=lambda *_: (8, 0),
        get_device_properties=lambda *_: PROPERTIES,
        utilization=zero,
        # streams and events
        Stream=Stream,
        Event=Event,
        stream=stream,
        StreamContext=stream,
        current_stream=current_stream,
        default_stream=default_stream,
        set_stream=torch.accelerator.set_stream,
        synchronize=lambda d=None: torch.accelerator.synchronize(device_of(d)),
        # random numbers are the host's
        seed=torch.seed,
        initial_seed=torch.initial_seed,
        manual_seed=generator.manual_seed,
        manual_seed_all=generator.manual_seed,
        get_rng_state=lambda device=None: generator.get_state(),
        set_rng_state=lambda state, device=None: generator.set_state(state.cpu()),
        default_generators=[generator] * compiled.device_count(),
        # memory
        empty_cache=nothing,
        memory_allocated=lambda *_: compiled.memory()[0],
        max_memory_allocated=lambda *_: compiled.memory()[1],
        reset_peak_memory_stats=lambda *_: compiled.reset_peak_memory(),
        reset_max_memory_allocated=lambda *_: compiled.reset_peak_memory(),
        memory_reserved=zero,
        max_memory_reserved=zero,
        memory_cached=zero,
        max_memory_cached=zero,
        reset_max_memory_cached=nothing,
        memory_stats=lambda *_: {},
        mem_get_info=lambda *_: (80 << 30, 80 << 30),
    )
    return module
