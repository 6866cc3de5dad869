"""The documentation builds with warnings as errors, and the built pages need no other server."""

import re

from tests.helpers.launcher import REPO
from tests.helpers.processes import run


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    """A script or font of another server is what a reader without a network waits for."""
    run(["bash", "scripts/docs.sh", "--site-dir", str(tmp_path)])
    pages = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.glob("**/*.html")}
    for source in (REPO / "docs").glob("**/*.md"):
        assert str(source.relative_to(REPO / "docs").with_suffix(".html")) in pages
    assert 'id="alto_distributed.ALTO"' in pages["api.html"], "the reference is made of docstrings"
    for name, page in pages.items():
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=[\"']?([^\"' >]+)", page)
        loaded += re.findall(r"<link[^>]* rel=[\"']?stylesheet[^>]* href=[\"']?([^\"' >]+)", page)
        assert loaded
        assert [link for link in loaded if re.match("https?:|//", link)] == [], name
        if name != "404.html":  # which is shown at any address, so its links begin at the site's root
            assert [link for link in loaded if not (tmp_path / name).parent.joinpath(link).exists()] == []
