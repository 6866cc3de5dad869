"""Programs that a run's records also go to: TensorBoard, Weights & Biases, MLflow.

Each is a class with :meth:`Logger.record` and :meth:`Logger.close`, opened on rank 0 at the first record. Another one
is a class here and a setting in ``logs``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from .config.settings import Run


class Logger(Protocol):
    """What takes records."""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers by name, after so many steps. The same step may come several times, with other names."""

    def close(self) -> None:
        """There are no more."""


#: Name of a logger -> how to open it.
Openers = Mapping[str, Callable[[], Logger]]


def of_run(run: Run, directory: Path) -> Openers:
    """The loggers that a run's settings name, but TensorBoard, which :class:`.metrics.Log` has of its own."""
    found: dict[str, Callable[[], Logger]] = {}
    if run.logs.wandb:
        found["wandb"] = lambda: WeightsAndBiases(run, directory)
    if run.logs.mlflow:
        found["mlflow"] = lambda: MLflow(run, directory)
    return found


class TensorBoard:
    """Event files in ``RUN/tensorboard``."""

    def __init__(self, directory: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=start + 1)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._events.close()


class WeightsAndBiases:
    """A run of the project ``logs.wandb``; the environment says where to: ``WANDB_MODE=offline`` needs no network."""

    def __init__(self, run: Run, directory: Path) -> None:
        import wandb

        self._id = _Kept(directory / ".wandb-run")
        self._run = wandb.init(
            project=run.logs.wandb,
            name=directory.name,
            dir=str(directory),
            config=run.as_dict(),
            id=self._id.read() or None,
            resume="allow",
        )
        self._id.write(self._run.id)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the experiment ``logs.mlflow``, at ``MLFLOW_TRACKING_URI``, which may be a local file."""

    def __init__(self, run: Run, directory: Path) -> None:
        from mlflow import MlflowClient

        self._client, self._id = MlflowClient(), _Kept(directory / ".mlflow-run")
        self._run = self._id.read()
        if not self._run:
            known = self._client.get_experiment_by_name(run.logs.mlflow)
            experiment = known.experiment_id if known else self._client.create_experiment(run.logs.mlflow)
            self._run = self._client.create_run(experiment, run_name=directory.name).info.run_id
            self._id.write(self._run)
            for section, values in run.as_dict().items():
                for key, value in values.items() if isinstance(values, dict) else [("", values)]:
                    self._client.log_param(self._run, f"{section}.{key}".rstrip("."), str(value)[:500])

    def record(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, float(value), step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class _Kept:
    """The id that a logger gave a run, for the next start in its directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> str:
        try:
            return self._path.read_text().strip()
        except OSError:
            return ""

    def write(self, value: str) -> None:
        with contextlib.suppress(OSError):  # then the next start is another run there
            self._path.write_text(f"{value}\n")
