"""The tutorials, as a reader follows them: files are written, commands are run, and the page shows what they print.

In a page of docs/tutorials

- a block with a title is a file of that name;
- a block of sh is run by bash, in order, unless a comment "not run: REASON" stands before it;
- a block of text is what the command before it prints, some lines left out; figures may differ in their last digits.
"""

import re
from typing import NamedTuple

import pytest

from tests.helpers.launcher import REPO, environment
from tests.helpers.processes import run

PAGES = sorted((REPO / "docs" / "tutorials").glob("*.md"))
#: What the pages use of a clone of the repository.
CLONE = ("LICENSE", "configs", "scripts")
#: DeepSpeed would compile a library that is not used, for a minute. A reader waits for it.
SITE = """
import sys
from alto_distributed.import_hooks import AfterImport
from tests.helpers.launcher import without_compiling
sys.meta_path.insert(0, AfterImport({"deepspeed": without_compiling}))
"""
NUMBER = re.compile(r"\d+(?:\.\d+)?")


class Block(NamedTuple):
    language: str
    title: str | None
    text: str
    skipped: str | None


def blocks(page):
    """The fenced blocks of a page, in order."""
    pattern = r'(?:<!-- not run: ([^\n]+) -->\n)?^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$'
    for match in re.finditer(pattern, page, re.M | re.S):
        skipped, language, title, text = match.groups()
        yield Block(language, title, text, skipped)


def same(told, printed):
    """Whether two lines are the same, but for 2% in figures with a fraction."""
    if NUMBER.sub("#", told) != NUMBER.sub("#", printed):
        return False
    pairs = zip(NUMBER.findall(told), NUMBER.findall(printed), strict=True)
    return all(float(b) == pytest.approx(float(a), rel=2e-2 if "." in a else 0, abs=1e-4) for a, b in pairs)


def missing(told, printed):
    """The lines of ``told`` that do not stand in ``printed``, in this order."""
    rest = iter(printed)
    return [line for line in told if not any(same(line, other) for other in rest)]


def losses(output):
    """{step: [losses]}, of every run that a page makes."""
    found = {}
    for step, loss in re.findall(r"^step (\d+): (?:validation )?loss ([\d.]+)", output, re.M):
        found.setdefault(int(step), []).append(float(loss))
    return found


def followed(page, directory):
    """Do what a page says in a directory; returns all that was printed."""
    site = directory / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    folder = directory / "reader"
    folder.mkdir()
    for name in CLONE:
        (folder / name).symlink_to(REPO / name)
    path = f"{site}:{environment()['PYTHONPATH']}"
    printed, everything = [], []
    for block in blocks(page.read_text()):
        if block.title:
            (folder / block.title).write_text(block.text)
        elif block.language == "sh" and not block.skipped:
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            printed = run(command, cwd=folder, PYTHONPATH=path, CUDA_VISIBLE_DEVICES="").splitlines()
            everything += printed
        elif block.language == "text":
            assert missing(block.text.splitlines(), printed) == [], "\n".join(printed[-60:])
    return "\n".join(everything)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(page, tmp_path):
    curve = losses(followed(page, tmp_path))
    assert curve[max(curve)][0] < 0.9 * curve[min(curve)][0], "the loss does not fall"
    if page.stem != "pretraining":  # whose resumed runs test_pretrain_runs.py compares
        again = {step: values for step, values in curve.items() if len(values) > 1}
        assert len(again) >= 2, "no step was made by a resumed run as well"
        for first, *others in again.values():
            assert others == pytest.approx([first] * len(others), rel=1e-5, abs=2e-6)


def test_every_way_to_use_alto_has_a_tutorial():
    assert [page.stem for page in PAGES] == ["deepspeed", "megatron", "pretraining", "pytorch", "trainer"]
    for page in PAGES:
        page_blocks = list(blocks(page.read_text()))
        assert page.read_text().count("\n```") == 2 * len(page_blocks), f"{page.name}: a block is not understood"
        shells = [block for block in page_blocks if block.language == "sh" and not block.skipped]
        assert len(shells) >= 2
        assert sum(block.language == "text" for block in page_blocks) >= 2


def test_output_that_a_page_does_not_show_is_found():
    printed = ["a warning", "step 1: loss 2.50000, ranks 2", "step 2: loss 1.00000, ranks 2"]
    assert missing(["step 1: loss 2.51, ranks 2", "step 2: loss 1.0, ranks 2"], printed) == []
    for told in (
        "step 1: loss 2.6, ranks 2",
        "step 1: loss 2.5, ranks 1",
        "step 1: loss 2.5",
        "step 3: loss 1, ranks 2",
    ):
        assert missing([told], printed) == [told]
    assert missing(printed[::-1], printed) == printed[:2][::-1]
