"""Loaders, networks and settings of the paper's image experiments, on small files made here."""

import pytest
import torch
from PIL import Image

from scripts.evidence import image_data, image_settings, networks, train_images
from scripts.evidence.image_training import OPTIMIZERS, quarters
from tests.helpers.launcher import REPO

CONFIGS = REPO / "configs" / "images"


def cifar_bytes(labels, pixel, label_bytes=1):
    """Records of CIFAR's binary version; every pixel of image i is pixel + i, the channels 0, 1 and 2 more."""
    record = b""
    for i, label in enumerate(labels):
        record += bytes([label_bytes - 1]) * (label_bytes - 1) + bytes([label])
        record += b"".join(bytes([pixel + i + channel]) * 1024 for channel in range(3))
    return record


@pytest.fixture
def cifar10(tmp_path):
    for i, name in enumerate(image_data.CIFAR10_TRAIN):
        (tmp_path / name).write_bytes(cifar_bytes([i, 9], 40 * i))
    (tmp_path / "test_batch.bin").write_bytes(cifar_bytes([3, 4, 5], 100))
    return tmp_path


def test_cifar10_is_read_in_order(cifar10):
    train, test = image_data.cifar(cifar10, 10)
    assert train.labels.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert test.labels.tolist() == [3, 4, 5]
    assert train.images.shape == (10, 3, 32, 32)
    assert train.images[3].flatten(1).unique(dim=1).flatten().tolist() == [41, 42, 43]


def test_of_cifar100_the_fine_label_is_read(tmp_path):
    (tmp_path / "train.bin").write_bytes(cifar_bytes([99, 7], 10, label_bytes=2))
    (tmp_path / "test.bin").write_bytes(cifar_bytes([50], 10, label_bytes=2))
    train, test = image_data.cifar(tmp_path, 100)
    assert train.labels.tolist() == [99, 7]
    assert test.labels.tolist() == [50]
    assert test.images[0, 2].unique().tolist() == [12]


def test_cifar_that_is_missing_damaged_or_another_is_refused(cifar10, tmp_path):
    with pytest.raises(ValueError, match=r"train\.bin is missing.*CIFAR-100"):
        image_data.cifar(cifar10, 100)
    (cifar10 / "test_batch.bin").write_bytes(cifar_bytes([1], 0)[:-1])
    with pytest.raises(ValueError, match=r"3072 bytes, not a multiple of 3073"):
        image_data.cifar(cifar10, 10)
    (cifar10 / "test_batch.bin").write_bytes(cifar_bytes([10], 0))
    with pytest.raises(ValueError, match="label 10: it is not CIFAR-10"):
        image_data.cifar(cifar10, 10)


def test_augmentation_crops_and_mirrors():
    images = torch.arange(1, 1 + 64 * 2 * 8 * 8, dtype=torch.float32).view(64, 2, 8, 8)
    made = image_data.augment(images, torch.Generator().manual_seed(0), padding=2)
    assert made.shape == images.shape
    padded = torch.nn.functional.pad(images, [2] * 4)
    mirrored = 0
    for image, of in zip(made, padded, strict=True):
        crops = [(of[:, i : i + 8, j : j + 8], flip) for i in range(5) for j in range(5) for flip in (False, True)]
        (flip,) = [flip for crop, flip in crops if torch.equal(image, crop.flip(-1) if flip else crop)]
        mirrored += flip
    assert 16 < mirrored < 48


@pytest.fixture
def imagenet(tmp_path):
    for part, count in (("train", 3), ("val", 2)):
        for label, name in enumerate(("n01", "n02")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (40, 30 + i), (250 * label, 100, 50)).save(folder / f"{i}.JPEG", format="JPEG")
            (folder / "notes.txt").write_text("not a picture")
    return tmp_path


def test_a_folder_of_pictures_is_read(imagenet):
    folder = image_data.Folder(imagenet / "train", side=16)
    assert folder.classes == ["n01", "n02"]
    assert len(folder) == 6
    whole = folder.load(torch.tensor([0, 5]), None)
    assert whole.labels.tolist() == [0, 1]
    assert whole.images.shape == (2, 3, 16, 16)
    red = whole.images[:, 0].mean(dim=(1, 2)) * image_data.IMAGENET_DEVIATION[0] + image_data.IMAGENET_MEAN[0]
    assert (red * 255).tolist() == pytest.approx([0, 250], abs=4)
    drawn = [folder.load(torch.arange(6), torch.Generator().manual_seed(seed)).images for seed in (1, 1)]
    assert torch.equal(*drawn)


def test_random_boxes_lie_inside_the_picture():
    for draw in torch.rand(200, 4, generator=torch.Generator().manual_seed(0)).tolist():
        left, top, right, bottom = image_data._random_box(300, 100, *draw)
        assert -1e-9 <= left < right <= 300 + 1e-9
        assert -1e-9 <= top < bottom <= 100 + 1e-9


def test_folders_without_pictures_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no folders"):
        image_data.Folder(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no pictures"):
        image_data.Folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    # Of ResNet34 and ResNet50 the published counts; ResNet20 is the paper's 0.27 million, with 1x1 shortcuts.
    [("resnet20", 10, 272_474), ("resnet34", 1000, 21_797_672), ("resnet50", 1000, 25_557_032)],
)
def test_the_resnets_have_the_published_sizes(name, classes, parameters):
    with torch.device("meta"):
        model = networks.build(name, classes)
        scores = model(torch.empty(2, 3, *((32, 32) if name == "resnet20" else (224, 224))))
    assert sum(param.numel() for param in model.parameters()) == parameters
    assert scores.shape == (2, classes)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_batch_of_every_config_is_read(path):
    import yaml

    for batch, part in yaml.safe_load(path.read_text())["batches"].items():
        for optimizer in part["lr"]:
            settings = image_settings.read_settings(path, batch, optimizer)
            assert settings.lr > 0
            assert settings.alto["alpha"] == (-5.0 if batch >= 1024 else 0.5)
    assert optimizer in OPTIMIZERS


def test_what_a_config_does_not_have_is_refused(tmp_path):
    path = CONFIGS / "cifar10-resnet20.yaml"
    with pytest.raises(ValueError, match="no batch 64: it has 128, 16384"):
        image_settings.read_settings(path, 64, "ALTO")
    with pytest.raises(ValueError, match="no rate of Lion"):
        image_settings.read_settings(path, 128, "Lion")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(path.read_text().replace("schedule:", "shedule:"))
    with pytest.raises(ValueError, match="schedule, shedule"):
        image_settings.read_settings(wrong, 128, "ALTO")


def test_schedules():
    assert [image_settings.factor("quarters", e, 200, 0) for e in (0, 49, 50, 199)] == pytest.approx([1, 1, 0.1, 1e-3])
    assert [quarters(e, 200) for e in (0, 49, 50, 199)] == pytest.approx([1, 1, 0.1, 1e-3])
    assert [image_settings.factor("thirds", e, 90, 0) for e in (29.9, 30, 60)] == pytest.approx([1, 0.1, 0.01])
    polynomial = [image_settings.factor("polynomial", e, 90, 10) for e in (5, 10, 50, 90)]
    assert polynomial == pytest.approx([0.5, 1, 0.5, 0])


@pytest.fixture
def short_cifar(tmp_path):
    path = tmp_path / "short.yaml"
    text = (CONFIGS / "cifar10-resnet20.yaml").read_text()
    path.write_text(text.replace("epochs: 200", "epochs: 2").replace("  128:", "  6:"))
    return path


@pytest.mark.parametrize("optimizer", ["ALTO", "SGD"])
def test_a_run_on_cifar_that_is_stopped_goes_on_as_if_it_had_not_been(cifar10, short_cifar, tmp_path, optimizer):
    settings = image_settings.read_settings(short_cifar, 6, optimizer)
    whole = train_images.run(settings, cifar10, tmp_path / "whole", micro_batch=3)
    assert [line["epoch"] for line in whole] == [1, 2]
    stop = train_images.train_epoch

    def stopped(*arguments):
        if arguments[4] == 1:
            raise KeyboardInterrupt
        return stop(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_images, "train_epoch", stopped)
        with pytest.raises(KeyboardInterrupt):
            train_images.run(settings, cifar10, tmp_path / "stopped", micro_batch=3)
    assert train_images.run(settings, cifar10, tmp_path / "stopped", micro_batch=3) == whole
    with pytest.raises(ValueError, match="other settings"):
        train_images.run(settings, cifar10, tmp_path / "stopped", micro_batch=2)


def test_imagenet_runs_from_folders(imagenet):
    settings = image_settings.read_settings(CONFIGS / "imagenet-resnet34.yaml", 256, "ALTO")
    train, test, classes = train_images.sources(settings, imagenet)
    assert (len(train), len(test), classes) == (6, 4, 2)
    (imagenet / "val" / "n02").rename(imagenet / "val" / "n03")
    with pytest.raises(ValueError, match="do not have the same folders"):
        train_images.sources(settings, imagenet)
