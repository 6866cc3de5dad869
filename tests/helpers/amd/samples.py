"""An encoding or more of each instruction that the compiled kernels use: what its tests run."""

from __future__ import annotations

from pathlib import Path

SAMPLES: dict[str, list[bytes]] = {
    label: [bytes.fromhex(code) for code in codes.split()]
    for label, _, codes in (
        line.partition(": ") for line in Path(__file__).with_name("samples.txt").read_text().splitlines()
    )
}
"""By :attr:`.decode.Instruction.labels`."""
