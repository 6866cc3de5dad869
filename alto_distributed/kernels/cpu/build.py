"""Compiles alto.c with the machine's own C compiler, once, and keeps the library for later runs.

The compiler is ``$CC``, or the first of ``cc``, ``gcc`` and ``clang``; it needs no headers but libc's and takes
half a second. The library is kept in ``$ALTO_CACHE_DIR``, or else ``alto_distributed`` under the user's cache
directory, under a name that stands for the source, the flags, the CPU and the C library: another CPU in the same
cluster, or another container, builds its own. Many ranks may build at once: each writes a file of its own and moves
it into place.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("alto.c")

# No -ffast-math: NaN and infinity must come through. -ffp-contract=off: fused operations only where alto.c says
# so, or the result would depend on how a compiler happens to unroll. The other two allow vectors of square
# roots and divisions, and change no value.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
# Not every compiler knows the first; the last is good for any.
CPU_FLAGS = (("-march=native",), ("-mcpu=native",), ())
_TIMEOUT = 120.0


class NativeUnavailable(ValueError, RuntimeError):
    """The C kernel cannot be built or loaded here; the message says why and what to do."""


@functools.lru_cache(maxsize=1)
def cpu() -> str:
    """What ``-march=native`` depends on."""
    flags = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features", "model name", "CPU part")):
                flags += line + "\n"
            elif not line and flags:
                break  # the other cores are alike
    return f"{platform.system()} {platform.machine()} {platform.processor()}\n{flags}"


def library() -> ctypes.CDLL:
    """The compiled library, from the cache or built now. Raises NativeUnavailable."""
    name = f"alto-{_fingerprint()}.so"
    directory = _cache_directory()
    if directory is None:
        # No home to write to: build for this process alone. A loaded library does not need its file.
        with tempfile.TemporaryDirectory(prefix="alto_distributed-") as private:
            return _load(_build(Path(private) / name))
    path = directory / name
    if path.exists():
        _refuse_others(path)
        if _is_whole(path):
            return _load(path)
    return _load(_build(path))


def _fingerprint() -> str:
    parts = (SOURCE.read_text(), repr((FLAGS, CPU_FLAGS)), os.environ.get("CC", ""), cpu(), repr(platform.libc_ver()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cache_directory() -> Path | None:
    """Where libraries are kept, private to the user; None if the default place cannot be used."""
    chosen = os.environ.get("ALTO_CACHE_DIR")
    try:
        if chosen:
            directory = Path(chosen)
        else:
            base = os.environ.get("XDG_CACHE_HOME")
            directory = (Path(base) if base else Path.home() / ".cache") / "alto_distributed"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_others(directory)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} cannot be written to")
    except (OSError, RuntimeError) as error:  # Path.home() raises RuntimeError where there is none
        if chosen:
            raise NativeUnavailable(
                f"ALTO_CACHE_DIR={chosen} cannot be used: {error}. Set it to a directory of your own"
            ) from error
        return None
    return directory


def _refuse_others(path: Path) -> None:
    """Raise PermissionError if somebody else could have put code there that we would run, or can replace a parent."""
    if not hasattr(os, "geteuid"):
        return
    path = path.resolve()
    for place in (path, *path.parents):
        status = place.stat()
        own = {os.geteuid()} if place == path else {os.geteuid(), 0}
        if status.st_uid not in own:
            raise PermissionError(f"{place} belongs to another user")
        # In a sticky directory, as /tmp is, others cannot replace what is not theirs.
        shared = place != path and status.st_mode & stat.S_ISVTX
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not shared:
            raise PermissionError(f"{place} can be written to by others (chmod go-w {place})")


def find_compiler() -> list[str]:
    """The command of the C compiler. Raises NativeUnavailable."""
    chosen = os.environ.get("CC")
    if chosen:
        try:
            command = shlex.split(chosen)
        except ValueError as error:
            raise NativeUnavailable(f"CC={chosen!r} is not a command: {error}") from error
        if command and shutil.which(command[0]):
            return command
        raise NativeUnavailable(f"the C compiler that CC={chosen!r} names was not found")
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise NativeUnavailable("no C compiler was found: install one (cc, gcc or clang), or name one with CC")


def _build(path: Path) -> Path:
    """Compile to ``path``, which appears whole or not at all."""
    compiler = find_compiler()
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix="unfinished-", suffix=".so")
    os.close(handle)
    try:
        complaint = ""
        for for_this_cpu in CPU_FLAGS:
            command = [*compiler, *FLAGS, *for_this_cpu, "-pthread", str(SOURCE), "-o", unfinished, "-lm"]
            try:
                status, said = _run(command)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise NativeUnavailable(f"the C compiler {shlex.join(compiler)} did not run: {error}") from error
            if status == 0:
                try:
                    _load(Path(unfinished))
                except OSError as error:
                    complaint = complaint or str(error)
                    continue
                with open(unfinished, "ab") as file:
                    file.write(hashlib.sha256(Path(unfinished).read_bytes()).digest())
                os.chmod(unfinished, 0o700)
                os.replace(unfinished, path)
                return path
            complaint = complaint or said.strip()[-500:]
        raise NativeUnavailable(f"the C compiler {shlex.join(compiler)} failed on {SOURCE.name}: {complaint}")
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)


def _run(command: list[str]) -> tuple[int, str]:
    """How a command ended, and what it said. One that takes too long is killed with all that it started."""
    with tempfile.TemporaryFile() as output:  # no pipe, which a process that outlives the compiler would keep open
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(_TIMEOUT)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        output.seek(0)
        return status, output.read().decode(errors="replace")


def _is_whole(path: Path) -> bool:
    """Whether a library ends with the digest of what is before it, where no loader looks.

    One that a full disk or a crash cut short would not fail to load: it would kill the process.
    """
    content = path.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _load(path: Path) -> ctypes.CDLL:
    """Raises OSError for a file that is no library of ours."""
    loaded = ctypes.CDLL(str(path))
    try:
        loaded.alto_span_size.restype = ctypes.c_int64
        loaded.alto_numbers_size.restype = ctypes.c_int64
        loaded.alto_block.restype = ctypes.c_int64
    except AttributeError as error:
        raise OSError(f"{path} lacks a function: {error}") from error
    return loaded
