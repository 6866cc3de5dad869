"""Train a ResNet on CIFAR or ImageNet with the paper's settings, when the data is there.

    python -m scripts.evidence.train_images configs/images/cifar10-resnet20.yaml \
        --batch 16384 --optimizer ALTO --data DIR --into runs/cifar10-alto

One process and one device. Writes metrics.jsonl (an epoch a line) and checkpoint.pt, from which it continues.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from .image_data import Folder, Images, InMemory, batches, cifar
from .image_settings import CLASSES, Settings, factor, read_settings
from .image_training import make_optimizer
from .networks import build


class Source(Protocol):
    """A set of images that are loaded by number."""

    def __len__(self) -> int: ...

    def load(self, indices: torch.Tensor, generator: torch.Generator | None) -> Images:
        """Normalised; augmented if there is a generator."""


def sources(settings: Settings, data: Path) -> tuple[Source, Source, int]:
    """(train, test, classes)."""
    if settings.data == "imagenet":
        train, test = Folder(data / "train"), Folder(data / "val")
        if train.classes != test.classes:
            raise ValueError(f"{data / 'train'} and {data / 'val'} do not have the same folders: one a class in both")
        return train, test, len(train.classes)
    classes = CLASSES[settings.data]
    pixels, held_out = cifar(data, classes)
    mean, deviation = InMemory.statistics(pixels)
    return InMemory(pixels, mean, deviation), InMemory(held_out, mean, deviation), classes


def build_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    options = {"LAMB": {"betas": settings.alto["betas"]}, "ALTO": settings.alto}.get(settings.optimizer, {})
    return make_optimizer(settings.optimizer, model, settings.lr, settings.batch, settings.weight_decay, **options)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    source: Source,
    settings: Settings,
    epoch: int,
    seed: int,
    micro_batch: int,
    device: torch.device,
) -> float:
    """One pass over the data; batches and augmentation follow from the seed and the epoch, so that a continued run
    sees what it would have seen. Returns the mean loss."""
    model.train()
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    steps = math.ceil(len(source) / settings.batch)
    total = 0.0
    for step, chosen in enumerate(batches(len(source), settings.batch, generator)):
        rate = settings.lr * factor(settings.schedule, epoch + step / steps, settings.epochs, settings.warmup_epochs)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        for part in chosen.split(micro_batch):
            batch = source.load(part, generator)
            scores = model(batch.images.to(device))
            # A sum over the parts, divided by the whole: the gradient of the whole batch's mean.
            loss = nn.functional.cross_entropy(scores, batch.labels.to(device), reduction="sum") / len(chosen)
            loss.backward()
            total += loss.item() * len(chosen)
        optimizer.step()
    return total / len(source)


@torch.no_grad()
def test(model: nn.Module, source: Source, micro_batch: int, device: torch.device) -> float:
    """Accuracy in percent."""
    model.eval()
    right = 0
    for part in torch.arange(len(source)).split(micro_batch):
        batch = source.load(part, None)
        right += int((model(batch.images.to(device)).argmax(dim=-1).cpu() == batch.labels).sum())
    return 100 * right / len(source)


def run(
    settings: Settings, data: Path, into: Path, *, seed: int = 0, micro_batch: int | None = None, device: str = "cpu"
) -> list[dict[str, Any]]:
    """All epochs that are left; returns all lines of metrics.jsonl.

    Raises:
        ValueError: ``into`` holds a run with other settings.
    """
    train_source, test_source, classes = sources(settings, data)
    micro_batch = micro_batch or settings.batch
    place = torch.device(device)
    torch.manual_seed(seed)
    model = build(settings.model, classes).to(place)
    optimizer = build_optimizer(settings, model)
    told = {**asdict(settings), "seed": seed, "micro_batch": micro_batch}
    lines: list[dict[str, Any]] = []
    saved = into / "checkpoint.pt"
    if saved.is_file():
        checkpoint = torch.load(saved, map_location=place, weights_only=True)
        if json.loads(checkpoint["settings"]) != json.loads(json.dumps(told)):
            raise ValueError(f"{into} holds a run with other settings: name another directory")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        lines = json.loads(checkpoint["lines"])
    into.mkdir(parents=True, exist_ok=True)
    for epoch in range(len(lines), settings.epochs):
        loss = train_epoch(model, optimizer, train_source, settings, epoch, seed, micro_batch, place)
        accuracy = test(model, test_source, micro_batch, place)
        lines.append({"epoch": epoch + 1, "train_loss": loss, "test_accuracy": accuracy})
        print(json.dumps(lines[-1]), flush=True)
        (into / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        # Whole or not at all: a run may be stopped while it writes.
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "settings": json.dumps(told),
                "lines": json.dumps(lines),
            },
            into / "checkpoint.tmp",
        )
        os.replace(into / "checkpoint.tmp", saved)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="one of configs/images/*.yaml")
    parser.add_argument("--batch", type=int, required=True, help="one of the file's batch sizes")
    parser.add_argument("--optimizer", default="ALTO", help="one of the file's optimizers")
    parser.add_argument("--data", type=Path, required=True, help="see configs/images/README.md")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--micro-batch", type=int, help="images in one pass; the whole batch if not given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    o = parser.parse_args()
    settings = read_settings(o.config, o.batch, o.optimizer)
    run(settings, o.data, o.into, seed=o.seed, micro_batch=o.micro_batch, device=o.device)


if __name__ == "__main__":
    main()
