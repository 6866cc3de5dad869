"""Checkpoints of a run: ``RUN/checkpoints/step-00000500``, whole or not there.

A checkpoint is written beside, under a name that no reader looks for. When every rank has finished, each reads back
what it wrote for the checksums of the manifest (:mod:`.manifest`), all of it is forced to the disk, and a rename gives
it its name. The name is the pointer: there is no second file that could say otherwise, and the newest checkpoint is the
highest step that has a name. Nothing is deleted before that, and what is deleted loses its name first.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...sharding.rank_sync import run_on_every_rank, run_on_rank0
from ..config.parsing import parse_json
from ..config.settings import Run
from ..engines.base import Engine
from ..integrity import make_directories, sync
from ..memory.usage import parameter_count
from . import manifest
from .changes import MAY_CHANGE, Change, changed, check_changes, differences, is_named, note_changes
from .io import Written
from .manifest import FileRecord, Manifest

_ABOUT = "run.json"
HISTORY = "history.jsonl"


@dataclass(frozen=True)
class Checkpoint:
    step: int
    """Optimizer steps done."""
    path: Path


class Checkpoints:
    """Those of one run.

    Args:
        directory: where they are, on a file system that all ranks see; made on the first save.
        run: the run's settings.
        data: checksums of the files that it trains on, by name.
        other_data: go on with other data than a checkpoint was trained on.
        changes: settings that may be others than a checkpoint's (:mod:`.changes`).
    """

    def __init__(
        self,
        directory: Path,
        run: Run,
        data: Mapping[str, str] | None = None,
        *,
        other_data: bool = False,
        changes: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.run = run
        self._data = dict(data or {})
        self._other_data = other_data
        self._changes = tuple(changes)

    def all(self) -> list[Checkpoint]:
        """Oldest first. Each was whole once; whether it still is, :meth:`load` finds out."""
        found = []
        for path in self.directory.glob("step-*"):
            name = re.fullmatch(r"step-(\d+)", path.name)
            if name and path.is_dir():
                found.append(Checkpoint(int(name.group(1)), path))
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def newest(self) -> Checkpoint | None:
        return max(self.all(), key=lambda checkpoint: checkpoint.step, default=None)

    # -- saving ------------------------------------------------------------------------------------------

    def save(self, engine: Engine, step: int) -> Path:
        """Write one, and delete the oldest beyond ``checkpoints.keep``. Called by all ranks.

        Raises:
            OSError: on all ranks, if any of them could not write its part. Nothing is left of it, and the
                checkpoints from before are as they were.
        """
        final = self.directory / f"step-{step:08d}"
        beside = self.directory / f".{final.name}.partial"
        try:
            run_on_rank0(lambda: self._prepare(final, beside))
            written = run_on_every_rank(lambda: _inside(beside, engine.save(beside)))
            entries = self._read_back(beside, written)
            run_on_rank0(lambda: self._publish(step, beside, final, entries))
        except OSError as error:
            about = run_on_rank0(lambda: self._give_up(beside))
            raise OSError(f"{final} could not be written: {error}. {about}") from error
        return final

    def _prepare(self, final: Path, beside: Path) -> None:
        """An empty directory to write into; what killed runs left is removed."""
        if final.exists():
            raise ValueError(f"{final} is there already, and is not overwritten; move it away")
        for left in self.directory.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)
        make_directories(self.directory.absolute())
        beside.mkdir()
        need, space = self._need(), shutil.disk_usage(self.directory)
        if space.total and space.free < need:
            raise OSError(f"{self.directory} has too little space")

    def _read_back(self, beside: Path, written: Sequence[Mapping[str, Written]]) -> dict[str, FileRecord]:
        """Checksums of all files, each taken by the rank that wrote it, from what it finds on the disk."""
        everyones = {name: about for of_rank in written for name, about in of_rank.items()}
        names = run_on_rank0(lambda: self._listing(beside, everyones))
        unknown = Written(0, {})
        shares = run_on_every_rank(
            lambda: {
                name: manifest.entry_of(beside / name, about.rank, about.states)
                for name, about in ((name, everyones.get(name, unknown)) for name in names)
                if about.rank == dist.get_rank()
            }
        )
        entries = {name: entry for share in shares for name, entry in share.items()}
        return {name: entries[name] for name in names}

    def _listing(self, beside: Path, everyones: Mapping[str, Written]) -> list[str]:
        names = sorted(str(path.relative_to(beside)) for path in beside.rglob("*") if path.is_file())
        for name in sorted(set(everyones) - set(names)):
            raise OSError(
                f"rank {everyones[name].rank} wrote {beside / name}, and rank 0 does not see it there: checkpoints "
                "must be on a file system that all ranks share (--into)"
            )
        return names

    def _publish(self, step: int, beside: Path, final: Path, entries: dict[str, FileRecord]) -> None:
        """The manifest, the disk, the rename; and only then is anything older deleted."""
        about = {"step": step, "settings": self.run.as_dict(), "data": self._data}
        (beside / _ABOUT).write_text(json.dumps(about, indent=1))
        entries = {**entries, _ABOUT: manifest.entry_of(beside / _ABOUT, 0, {})}
        whole = Manifest(step, dist.get_world_size(), manifest.versions(), entries)
        for problem in manifest.problems(beside, whole, entries, sizes_only=True):
            raise OSError(f"{beside} is not as it was written: {problem}")
        manifest.write(beside, whole)
        try:
            beside.rename(final)
            sync(self.directory)
        except OSError:
            with contextlib.suppress(OSError):  # what is said not to be written must not bear the name
                final.rename(beside)
            raise
        for old in self._beyond(self.run.checkpoints.keep):
            unnamed = old.path.with_name(f".{old.path.name}.deleted")
            with contextlib.suppress(OSError):  # the new one is there all the same, and the next save tries again
                old.path.rename(unnamed)
                shutil.rmtree(unnamed)

    def _beyond(self, keep: int) -> list[Checkpoint]:
        """Those older than the newest ``keep`` good ones. A damaged one does not count: it is not one to go back to."""
        newest_first, good = self.all()[::-1], 0
        for index, checkpoint in enumerate(newest_first):
            good += not self.damage(checkpoint, sizes_only=True)
            if good == max(keep, 1):
                return newest_first[index + 1 :]
        return []

    def _give_up(self, beside: Path) -> str:
        """What there is to do about a failed save; its remains are removed."""
        shutil.rmtree(beside, ignore_errors=True)
        existing = next(path for path in (self.directory, *self.directory.absolute().parents) if path.exists())
        space, newest = shutil.disk_usage(existing).free, self.newest()
        return (
            f"A checkpoint needs {'' if newest else 'at least '}{_mib(self._need())} there, and "
            f"{_mib(space)} of {existing} are free; free some, lower checkpoints.keep, or give another directory "
            f"(--into) that can be written to. "
            + (f"The newest checkpoint is {newest.path}" if newest else "There is no checkpoint of this run yet")
        )

    def _need(self) -> int:
        """Bytes: those of the newest, or what no optimizer is below: float32 weights and one state."""
        for checkpoint in self.all()[::-1]:
            try:
                return manifest.read(checkpoint.path).bytes
            except (ValueError, OSError):
                continue
        return parameter_count(self.run) * 8

    # -- loading -----------------------------------------------------------------------------------------

    def load(self, engine: Engine, checkpoint: Checkpoint) -> list[str]:
        """Continue from one. Called by all ranks.

        Returns:
            What this run changes, as it was asked to.

        Raises:
            ValueError: on all ranks, before anything of it is used: it is damaged, or belongs to a run with other
                settings. Whether to go back to the one before is for the user to say.
        """
        damage = self._all_damage(checkpoint)
        if damage:
            raise ValueError(
                f"{checkpoint.path} is damaged and was not loaded: {'; '.join(damage)}. {self._instead(checkpoint)}"
            )
        meant, saved_by = run_on_rank0(
            lambda: (self.check(checkpoint), manifest.read(checkpoint.path).world_size),
        )
        engine.load(checkpoint.path, saved_by)
        if meant:
            run_on_rank0(lambda: note_changes(self.directory.parent / HISTORY, checkpoint.step, meant))
        return list(map(str, meant))

    def check(self, checkpoint: Checkpoint) -> list[Change]:
        """Compare a checkpoint's settings and data with the run's. Called by one process.

        Returns:
            What this run changes, as it was asked to.

        Raises:
            ValueError: it belongs to a run with other settings, or was trained on other data.
        """
        saved, data = about(checkpoint.path)
        before = with_new_settings(saved)
        meant = [change for change in changed(before, self.run.as_dict()) if is_named(change.name, self._changes)]
        others = list(differences(before, self.run.as_dict(), meant))
        if others:
            raise ValueError(
                f"{checkpoint.path} was written by a run with other settings: {'; '.join(others)}. Go on with those, "
                f"start in another directory (--into), or name what may change in --resume-with ({MAY_CHANGE})"
            )
        check_changes(self.run, meant, checkpoint.step)
        self._refuse_other_data(checkpoint.path, data)
        return meant

    def _refuse_other_data(self, path: Path, data: Mapping[str, Any]) -> None:
        """Raise if a checkpoint was trained on other data. One of before 0.2 does not say."""
        others = [name for name in sorted({*data, *self._data}) if data.get(name) != self._data.get(name)]
        if data and self._data and others and not self._other_data:
            raise ValueError(
                f"{path} was trained on other data than {self.run.data.directory} holds now: {', '.join(others)} "
                "differ. Name the directory that it was trained on in data.directory, or give --other-data if the "
                "change is meant"
            )

    def _instead(self, damaged: Checkpoint) -> str:
        away = f"mv {shlex.quote(str(damaged.path))} {shlex.quote(f'{damaged.path}.damaged')}"
        older = run_on_rank0(lambda: [checkpoint for checkpoint in self.all() if checkpoint.step < damaged.step])
        for checkpoint in reversed(older):
            if not self._all_damage(checkpoint):
                return (
                    f"The checkpoint of step {checkpoint.step}, {checkpoint.path}, is whole: to go on from there, move "
                    f"the damaged one away and start again: {away}"
                )
        return f"There is no whole one before it; to begin anew, move it away: {away}"

    def _all_damage(self, checkpoint: Checkpoint) -> list[str]:
        """What is wrong with a checkpoint, each rank having read a part of it. The same on all ranks."""
        rank, world = dist.get_rank(), dist.get_world_size()
        found = run_on_every_rank(lambda: self.damage(checkpoint, rank, world))
        return list(dict.fromkeys(problem for of_rank in found for problem in of_rank))

    def damage(self, checkpoint: Checkpoint, rank: int = 0, world: int = 1, *, sizes_only: bool = False) -> list[str]:
        """What is wrong with a checkpoint's files, or with this rank's share of them."""
        try:
            whole = manifest.read(checkpoint.path)
        except (ValueError, OSError) as error:
            return [str(error)]
        if whole.step != checkpoint.step:
            return [f"{manifest.NAME}: of step {whole.step}; the directory was renamed"]
        share = list(whole.files)[rank::world]
        return manifest.problems(checkpoint.path, whole, share, sizes_only=sizes_only)


def _inside(directory: Path, written: Mapping[Path, Written]) -> dict[str, Written]:
    """The same by path inside a directory."""
    here = directory.resolve()
    return {str(path.resolve().relative_to(here)): about for path, about in written.items()}


def about(checkpoint: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The settings of the run that saved, and the checksums of its data."""
    path = checkpoint / _ABOUT
    content = parse_json(path.read_bytes(), str(path))
    settings = content.get("settings") if isinstance(content, dict) else None
    data = content.get("data", {}) if isinstance(content, dict) else None
    if not isinstance(settings, dict) or not isinstance(data, dict):
        raise ValueError(f"{path} does not hold the settings of a run")
    return settings, data


def with_new_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a checkpoint, with the defaults of those that are newer than it."""
    filled = dict(saved)
    for section, defaults in Run().as_dict().items():
        if isinstance(saved.get(section), Mapping) and isinstance(defaults, dict):
            filled[section] = {**defaults, **saved[section]}
    return filled


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
