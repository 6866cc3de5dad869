"""Where studies read and write."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
DOCS = ROOT / "docs"
