"""The oldest and the newest supported release of each framework, beside the installed one. More: scripts/matrix.py."""

import os
import subprocess

import pytest

from scripts import matrix
from tests.helpers.cases import REPO, every_case
from tests.helpers.launcher import check
from tests.helpers.releases import supported

#: Release -> the cases that are run with it. DeepSpeed's newest is the installed one.
RELEASES = {
    ("deepspeed", "0.16.9"): "release_deepspeed",
    ("megatron-core", "0.15.3"): "release_megatron",
    ("megatron-core", "0.19.2"): "release_megatron",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("release", "case"),
    [
        pytest.param(release, *parameters.values, id=f"{'-'.join(release)}-{parameters.id}")
        for release, module in RELEASES.items()
        for parameters in every_case(module, 2)
    ],
)
def test_release(release, case, directory):
    try:
        overlay = matrix.install(*release)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip cannot install {'=='.join(release)} here: {error}")
    place = directory / "-".join(release)
    place.mkdir(exist_ok=True)
    path = os.pathsep.join([str(overlay), str(REPO)])
    check(case, place, ALTO_OVERLAY=str(overlay), PYTHONPATH=path)


def test_the_oldest_and_the_newest_release_are_supported():
    for framework, folder in (("deepspeed", "deepspeed"), ("megatron-core", "megatron")):
        versions = supported(folder)
        tried = {version for name, version in RELEASES if name == framework}
        assert versions[0] in tried
        assert tried <= set(versions)
        assert {v for v in versions if v != "0.20.0"} <= set(matrix.RELEASES[framework])
