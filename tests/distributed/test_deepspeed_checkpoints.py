"""Checkpoints under DeepSpeed: each case of cases/zero_checkpoints.py and zero_universal.py a test."""

import subprocess
import sys

import pytest

from tests.helpers.cases import REPO, every_case
from tests.helpers.launcher import check

SAME, OTHER = "zero_checkpoints", "zero_universal"


@pytest.mark.parametrize("case", every_case(SAME, 2, 4))
def test_at_the_same_world_size(case, directory):
    check(case, directory)


@pytest.mark.parametrize("case", every_case(OTHER, 1, 2, 4))
def test_at_another_world_size(case, directory):
    check(case, directory)


@pytest.mark.parametrize("case", every_case(SAME, 2, only="case_conversion_carries_every_state-stage 1"))
def test_command_line(case, directory, capsys):
    check(case, directory)
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
    no_folder = saved / "pictures.pt" / "universal"
    with pytest.raises(SystemExit) as refused:  # what the system says was a traceback
        universal.main([str(saved / "saved"), str(no_folder)])
    assert refused.value.code == 2
    said = f"python -m alto_distributed.deepspeed.universal: [Errno 20] Not a directory: '{no_folder}'"
    assert capsys.readouterr().err.splitlines() == [said]
