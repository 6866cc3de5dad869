"""The pages, without building them: links lead somewhere, the README is short, tables can be read."""

import re

import pytest

from tests.helpers.launcher import REPO

PAGES = [
    *(REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((REPO / "docs").glob("**/*.md")),
    *sorted((REPO / "configs").glob("*/README.md")),
]
LONGEST_CELL = 100
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page):
    """The lines of a page that are not in a fenced block of code."""
    fenced = False
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line


def anchors(page):
    """Of its headings, as a code host makes them: lower case, no punctuation, spaces to hyphens."""
    found = set()
    for line in prose(page):
        heading = re.match(r"#+ (.*)", line)
        if heading:
            kept = "".join(c for c in heading[1].lower() if c.isalnum() or c in " -_")
            found.add(kept.strip().replace(" ", "-"))
    return found


def cells(line):
    """Of a line of a table; a bar in code is escaped."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def name(page):
    return str(page.relative_to(REPO))


def dead_links(page):
    for line in prose(page):
        for link in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if re.match(r"[a-z]+:", link):
                continue
            if not target.resolve().is_relative_to(REPO) or not target.exists():
                yield f"{link}: no such file"
            elif anchor and anchor not in anchors(target):
                yield f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_to_a_file_and_a_heading(page):
    assert list(dead_links(page)) == []


def test_a_dead_link_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "REPO", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A page: one\n[a](#a-page-one) [b](#two) [c](gone.md) [d](https://e.org) `[f](g)`\n```\n[h](i)\n```\n"
    )
    assert list(dead_links(page)) == ["#two: no such heading", "gone.md: no such file"]


def test_the_readme_is_short():
    assert len((REPO / "README.md").read_text().splitlines()) < 120


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_cells_of_tables_are_short(page):
    """A cell of hundreds of characters is a paragraph."""
    tables = (line for line in prose(page) if line.startswith("|"))
    assert [cell for line in tables for cell in cells(line) if len(cell) > LONGEST_CELL] == []


def test_every_page_is_in_the_navigation():
    navigation = (REPO / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(REPO / "docs")) for page in PAGES if page.is_relative_to(REPO / "docs")]
    assert [page for page in pages if f": {page}\n" not in navigation] == []


def test_every_page_is_in_the_index_or_in_the_results():
    """Three were found in the navigation alone."""
    docs = REPO / "docs"
    listed = {
        link.partition("#")[0]
        for page in ("index", "results")
        for link in LINK.findall((docs / f"{page}.md").read_text())
    }
    pages = {str(page.relative_to(docs)) for page in PAGES if page.is_relative_to(docs)} - {"index.md"}
    assert pages - listed == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tests_that_a_page_names_exist(page):
    """Files of tests were renamed, and pages went on naming the old ones."""
    if page.name == "CHANGELOG.md":
        return  # it tells what was
    named = re.findall(r"`(?:[\w/]+/)?(test_\w+|cases/[\w*]+)(\.py)?(?:\[[^`]*\])?`", page.read_text())
    sources = "\n".join(path.read_text() for path in (REPO / "tests").glob("*/test_*.py"))
    files = [file for file, suffix in named if suffix and not list((REPO / "tests").glob(f"**/{file}.py"))]
    assert files + [test for test, suffix in named if not suffix and f"def {test}(" not in sources] == []
