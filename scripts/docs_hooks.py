"""Hooks of mkdocs: pages and figures that are not in docs/ become part of the site.

Links in the pages are those of the repository, so that they work on a code host. Here they are turned into links of the
site. A link to anything else outside docs/ is left for mkdocs, which warns.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = "scripts/evidence/results"

#: Path in the repository -> path in the site's sources.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "configs/deepspeed/README.md": "configs/deepspeed.md",
    "configs/images/README.md": "configs/images.md",
    "configs/megatron/README.md": "configs/megatron.md",
    "scripts/track3/README.md": "track3.md",
}
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")


def _outside() -> dict[str, str]:
    files = [*(ROOT / EVIDENCE).glob("*/*"), *(ROOT / EVIDENCE).glob("*.jsonl")]
    figures = {str(path.relative_to(ROOT)): path.relative_to(ROOT / EVIDENCE) for path in files}
    return {**PAGES, **{source: f"evidence/{place}" for source, place in figures.items() if place.suffix != ".md"}}


def on_files(files: Files, config: Any) -> Files:
    for source, target in _outside().items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    outside = _outside()
    path = page.file.src_uri
    source = {target: name for name, target in outside.items()}.get(path, f"docs/{path}")

    def to_site(link: re.Match[str]) -> str:
        wanted = os.path.normpath(os.path.join(os.path.dirname(source), link[0]))
        if wanted == "README.md":
            wanted = "docs/index.md"
        target = outside.get(wanted, wanted.removeprefix("docs/") if wanted.startswith("docs/") else None)
        return link[0] if target is None else os.path.relpath(target, os.path.dirname(path) or ".")

    # The folder of the studies is no page.
    markdown = markdown.replace(f"[{EVIDENCE}](../{EVIDENCE})", f"`{EVIDENCE}`")
    return _LINK.sub(to_site, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Docstrings name other objects with roles of Sphinx, such as :meth:`step`; here the name alone is shown."""
    return re.sub(r":(?:attr|class|func|meth|mod):(?=<code>)", "", html)
