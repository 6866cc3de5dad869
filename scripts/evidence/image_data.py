"""Images: scikit-learn's digits in memory, CIFAR's binary files, folders of pictures."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

SIDE = 32
PIXELS = 3 * SIDE * SIDE
CIFAR10_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
PICTURES = (".jpeg", ".jpg", ".png")
#: Mean and deviation of ImageNet's channels, as everybody uses them.
IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Images:
    """A set in memory."""

    images: torch.Tensor
    """count x channels x height x width: float32, or uint8 as read."""
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


def digits(train: int, seed: int = 0) -> tuple[Images, Images]:
    """scikit-learn's 1,797 handwritten digits (8x8), shuffled and split by ``seed``, the same in all runs."""
    from sklearn.datasets import load_digits

    bundle = load_digits()
    images = torch.tensor(bundle.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(bundle.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    first, rest = order[:train], order[train:]
    mean, deviation = images[first].mean(), images[first].std()
    images = (images - mean) / deviation
    return Images(images[first], labels[first]), Images(images[rest], labels[rest])


def cifar(directory: Path, classes: int) -> tuple[Images, Images]:
    """CIFAR-10 or CIFAR-100 from its "binary version": plain bytes, nothing unpickled.

    Args:
        directory: with data_batch_1.bin ... data_batch_5.bin and test_batch.bin (10 classes), or train.bin and
            test.bin (100 classes, of which the second label, the fine one, is taken).
        classes: 10 or 100.

    Raises:
        ValueError: a file is missing, or is not what it should be.
    """
    if classes not in (10, 100):
        raise ValueError(f"CIFAR has 10 or 100 classes, not {classes}")
    train = CIFAR10_TRAIN if classes == 10 else ("train.bin",)
    test = ("test_batch.bin",) if classes == 10 else ("test.bin",)
    return _cifar_files(directory, train, classes), _cifar_files(directory, test, classes)


def _cifar_files(directory: Path, names: tuple[str, ...], classes: int) -> Images:
    parts = [_cifar_file(directory / name, classes) for name in names]
    return Images(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))


def _cifar_file(path: Path, classes: int) -> Images:
    if not path.is_file():
        raise ValueError(f"{path} is missing: point --data at the unpacked binary version of CIFAR-{classes}")
    labels = 1 if classes == 10 else 2
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    if content.numel() == 0 or content.numel() % (PIXELS + labels):
        raise ValueError(f"{path} has {content.numel()} bytes, not a multiple of {PIXELS + labels}: download it again")
    records = content.view(-1, PIXELS + labels)
    label = records[:, labels - 1].long()
    if int(label.max()) >= classes:
        raise ValueError(f"{path} has label {int(label.max())}: it is not CIFAR-{classes}, or it is damaged")
    return Images(records[:, labels:].reshape(-1, 3, SIDE, SIDE), label)


def augment(images: torch.Tensor, generator: torch.Generator, padding: int = 4) -> torch.Tensor:
    """CIFAR's usual augmentation: a random crop out of the zero-padded image, mirrored half of the time."""
    count, _, side, _ = images.shape
    padded = torch.nn.functional.pad(images, [padding] * 4)
    down, right = (torch.randint(2 * padding + 1, (count,), generator=generator) for _ in range(2))
    rows = (down[:, None] + torch.arange(side))[:, None, :, None]
    columns = (right[:, None] + torch.arange(side))[:, None, None, :]
    mirrored = torch.rand(count, generator=generator)[:, None, None, None] < 0.5
    columns = torch.where(mirrored, columns.flip(-1), columns)
    at = torch.arange(count)[:, None, None, None], torch.arange(images.shape[1])[None, :, None, None]
    return padded[at[0], at[1], rows, columns]


class InMemory:
    """Pixels in memory, normalised as they are loaded, by the training set's own mean and deviation."""

    def __init__(self, pixels: Images, mean: torch.Tensor, deviation: torch.Tensor) -> None:
        self.pixels, self.mean, self.deviation = pixels, mean, deviation

    @staticmethod
    def statistics(pixels: Images) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and deviation of each channel, ready to be broadcast."""
        channels = [pixels.images[:, i].double() / 255 for i in range(pixels.images.shape[1])]
        mean = torch.stack([channel.mean() for channel in channels]).float()[:, None, None]
        return mean, torch.stack([channel.std() for channel in channels]).float()[:, None, None]

    def __len__(self) -> int:
        return len(self.pixels)

    def load(self, indices: torch.Tensor, generator: torch.Generator | None) -> Images:
        images = (self.pixels.images[indices] / 255 - self.mean) / self.deviation
        if generator is not None:
            images = augment(images, generator)
        return Images(images, self.pixels.labels[indices])


class Folder:
    """Pictures in one folder a class, as ImageNet is usually unpacked; read through Pillow when they are needed.

    Args:
        directory: with a folder for each class. Classes are numbered in the order of their names.
        side: of the squares that the pictures become.

    Raises:
        ValueError: there are no classes, or one is empty.
    """

    def __init__(self, directory: Path, side: int = 224) -> None:
        self.side = side
        self.classes = sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
        if not self.classes:
            raise ValueError(f"{directory} has no folders: expected one folder of pictures for each class")
        self.files: list[tuple[Path, int]] = []
        for label, name in enumerate(self.classes):
            pictures = sorted(p for p in (directory / name).iterdir() if p.suffix.lower() in PICTURES)
            if not pictures:
                raise ValueError(f"{directory / name} has no pictures ({', '.join(PICTURES)})")
            self.files += [(path, label) for path in pictures]

    def __len__(self) -> int:
        return len(self.files)

    def load(self, indices: torch.Tensor, generator: torch.Generator | None) -> Images:
        """Some of the pictures, normalised: with a generator a random crop that may be mirrored, else the centre."""
        chosen = [self.files[i] for i in indices.tolist()]
        # Drawn before the threads start, so that what is drawn does not depend on their timing.
        draws = [None] * len(chosen) if generator is None else torch.rand(len(chosen), 5, generator=generator).tolist()
        with ThreadPoolExecutor() as threads:  # Pillow decodes without holding the interpreter
            images = list(threads.map(lambda pair, draw: _picture(pair[0], self.side, draw), chosen, draws))
        return Images(torch.stack(images), torch.tensor([label for _, label in chosen]))


def _picture(path: Path, side: int, draw: list[float] | None) -> torch.Tensor:
    """Cropped, scaled and normalised; ``draw`` has five numbers in [0, 1) that choose the crop and the mirroring."""
    from PIL import Image

    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    box = _random_box(*picture.size, *draw[:4]) if draw else _centre_box(*picture.size)
    picture = picture.resize((side, side), Image.Resampling.BILINEAR, box=box)
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(side, side, 3).permute(2, 0, 1)
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_DEVIATION))
    image = (pixels / 255 - mean) / deviation
    return image.flip(-1) if draw and draw[4] < 0.5 else image


def _centre_box(width: int, height: int) -> tuple[float, float, float, float]:
    """The middle 7/8 of the shorter side: 224 of 256."""
    side = min(width, height) * 7 / 8
    return ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)


def _random_box(
    width: int, height: int, area: float, shape: float, x: float, y: float
) -> tuple[float, float, float, float]:
    """Between 8% and all of the area, three quarters to four thirds as wide as high."""
    wanted = (0.08 + 0.92 * area) * width * height
    aspect = (3 / 4) ** (1 - 2 * shape)
    w, h = min((wanted * aspect) ** 0.5, width), min((wanted / aspect) ** 0.5, height)
    return ((width - w) * x, (height - h) * y, (width - w) * x + w, (height - h) * y + h)


def batches(count: int, size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Indices of an epoch in random order; a last batch that is smaller is used too."""
    yield from torch.randperm(count, generator=generator).split(size)
