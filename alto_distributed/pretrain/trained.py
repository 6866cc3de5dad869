"""What a run has trained: a checkpoint, checked, with its settings, weights and tokenizer, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from .checkpoint.manager import Checkpoint, Checkpoints, about, with_new_settings
from .config.settings import Run, parse
from .data import files
from .data.tokenizer import SAVED_AS, Tokenizer
from .engines.base import read_weights
from .model import build_model


@dataclass(frozen=True)
class Trained:
    """A checkpoint of a run."""

    run: Run
    checkpoint: Checkpoint
    data: Mapping[str, str] = field(repr=False)
    """Checksums of the data that it was trained on, by file; empty in checkpoints of before 0.2."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole, on the CPU, in the run's precision."""
        return read_weights(self.run, self.checkpoint.path)

    def model(self) -> nn.Module:
        """The run's model with these weights, to evaluate with, on a GPU if there is one."""
        weights = self.weights()
        model = build_model(self.run)
        fill(model, weights, self.checkpoint.path)
        precision = next(iter(weights.values())).dtype
        return model.to(device(), precision).eval()

    def tokenizer(self, directory: str | Path | None = None) -> Tokenizer:
        """The tokenizer of its data.

        Args:
            directory: the prepared data, if they are not where they were in training.

        Raises:
            ValueError: it is not there, or another one is.
        """
        where = directory or self.run.data.directory
        self.check_tokenizer(where)
        return files.open_tokenizer(where)

    def check_tokenizer(self, directory: str | Path) -> None:
        """Refuse data that were prepared with another tokenizer."""
        found = files.fingerprint(directory).get(SAVED_AS)
        if self.data and found != self.data.get(SAVED_AS):
            raise ValueError(
                f"{directory} was prepared with another tokenizer than {self.checkpoint.path} was trained with; give "
                "data that were prepared with the same one"
            )


def open_run(directory: Path, step: int | None = None) -> Trained:
    """A checkpoint of a run, by default the newest, after all of its files have been compared with their checksums.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    kept = Checkpoints(directory / "checkpoints", Run())
    found = kept.all()
    if not found:
        raise ValueError(f"{directory} has no checkpoint: give the directory of a run, such as runs/gpt2-345m-alto")
    chosen = found[-1] if step is None else next((each for each in found if each.step == step), None)
    if chosen is None:
        raise ValueError(
            f"{directory} has no checkpoint of step {step}; there are those of "
            f"{', '.join(str(checkpoint.step) for checkpoint in found)}"
        )
    damage = kept.damage(chosen)
    if damage:
        raise ValueError(f"{chosen.path} is damaged and was not loaded: {'; '.join(damage)}. Give another --step")
    settings, data = about(chosen.path)
    return Trained(parse(with_new_settings(settings)), chosen, data)


@torch.no_grad()
def fill(model: nn.Module, weights: Mapping[str, torch.Tensor], where: Path) -> None:
    """Put weights into a model that has the same names.

    Raises:
        ValueError: one is missing, or of another shape.
    """
    for name, param in model.named_parameters():
        if name not in weights or weights[name].shape != param.shape:
            said = f"has {list(weights[name].shape)}" if name in weights else "is not there"
            raise ValueError(f"{where}: {name} {said}, and the model has {list(param.shape)}; it is of another model")
        param.copy_(weights[name])


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
