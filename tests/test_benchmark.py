"""The benchmark runs, and what it says about memory is so. Its times are for people to read."""

import json
import sys

from .launcher import REPO
from .processes import run


def test_the_benchmark_measures_what_is_here(tmp_path):
    command = [sys.executable, str(REPO / "scripts" / "benchmark.py"), "--model", "tiny", "--rounds", "3"]
    command += ["--only", "alto,lamb,adamw (torch", "--no-collectives", "--into", str(tmp_path)]
    said = run(command)
    result = json.loads((tmp_path / "benchmark.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    count = result["parameters"]
    assert count == (50304 + 1024) * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64
    per_parameter = {name: round(row["state"] / count) for name, row in rows.items()}
    assert per_parameter == {
        "AdamW (torch fused)": 8,
        "AdamW (torch foreach)": 8,
        "ALTO (C)": 12,
        "ALTO (torch)": 12,
        "ALTO (C, bf16 grad_ema)": 10,
        "LAMB (ALTO with alpha=0, C)": 8,
        "ALTO (official)": 24,
        "LAMB (pytorch_optimizer)": 8,
    }
    for kernel in ("ALTO (C)", "ALTO (torch)"):
        assert rows[kernel]["extra"] <= 16 * 2**20, kernel  # whatever the size of the model
    assert rows["ALTO (official)"]["seconds"] > 2 * rows["ALTO (C)"]["seconds"] > 0
    assert all(name in said for name in rows)
    assert (tmp_path / "benchmark.png").stat().st_size > 5_000
