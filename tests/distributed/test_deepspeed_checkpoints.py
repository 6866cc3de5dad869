"""Checkpoints under DeepSpeed: each case of cases/zero_checkpoints.py and zero_universal.py a test."""

import subprocess
import sys

import pytest

from tests.helpers.launcher import REPO, check, every_case, launch

SAME, OTHER = "zero_checkpoints", "zero_universal"


@pytest.mark.parametrize(("world", "case"), every_case(SAME, 2, 4))
def test_at_the_same_world_size(world, case, directory):
    check(SAME, world, case, directory)


@pytest.mark.parametrize(("world", "case"), every_case(OTHER, 1, 2, 4))
def test_at_another_world_size(world, case, directory):
    for saving in (2, 4):
        launch(SAME, saving, directory)
    check(OTHER, world, case, directory)


def test_command_line(directory, capsys):
    launch(SAME, 2, directory)
    saved = directory / "saved by 2" / "stage 1"
    arguments = [str(saved / "saved"), str(saved / "by command")]
    command = [sys.executable, "-m", "alto_distributed.deepspeed.universal", *arguments]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = {path.relative_to(saved / "universal") for path in (saved / "universal").rglob("*.pt")}
    assert {path.relative_to(saved / "by command") for path in (saved / "by command").rglob("*.pt")} == files

    from alto_distributed.deepspeed import universal

    with pytest.raises(SystemExit) as refused:
        universal.main(arguments)
    assert refused.value.code == 2
    assert "is not empty" in capsys.readouterr().err
