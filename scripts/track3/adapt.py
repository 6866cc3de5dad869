"""Write the track's own training script with ALTO in the place of Muon.

    python -m scripts.track3.adapt modded-nanogpt/records/track_3_optimization/train_gpt_simple.py \
        --preset recommended --lr 0.01 --steps 4875 --into train_gpt_alto.py

Data, batch, architecture, evaluation and the AdamW of embedding, head and vectors stay those of the track. The code of
the optimizer goes into the script, as the rules want it.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from alto_distributed import recipe
from alto_distributed.presets import PRESETS

_SETUP = re.compile(r"^#{30,}\n#\s+Setup\s+#\n", re.M)
_MUON = re.compile(r"^    optimizer2 = Muon\(.*?\)\n(?=    optimizers = )", re.M | re.S)
_STEPS = re.compile(r"^    train_steps = \d+$", re.M)


def adapt(source: str, preset: str, lr: float, steps: int) -> str:
    """The text of the new script.

    Args:
        source: text of the track's ``train_gpt_simple.py``.
        preset: of :func:`alto_distributed.recipe`.
        lr: relative step of the matrices.
        steps: of training.

    Raises:
        ValueError: the script is not as it was in August 2026.
    """
    chosen = recipe(4096, preset=preset, lr=lr)
    chosen.pop("vector_lr", None)  # vectors are AdamW's here
    numbers = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
    single = Path(__file__).with_name("single.py").read_text()
    ours = single[single.index("class ALTO") :]
    matrices = "[p for p in model.blocks.parameters() if p.ndim >= 2]"
    block = f"    optimizer2 = ALTO({matrices},\n{' ' * 22}{numbers})\n"
    text = source
    for pattern, replacement, what in (
        (_SETUP, f"{ours}\n\n\\g<0>", "a section named Setup"),
        (_MUON, block, "optimizer2 = Muon(...)"),
        (_STEPS, f"    train_steps = {steps}", "train_steps"),
    ):
        text, count = pattern.subn(replacement, text)
        if count != 1:
            raise ValueError(f"the training script has {what} {count} times and should have it once; edit it by hand")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, help="the track's train_gpt_simple.py")
    parser.add_argument("--preset", choices=PRESETS, default="recommended")
    parser.add_argument("--lr", type=float, default=1e-2, help="relative step of the matrices")
    parser.add_argument("--steps", type=int, default=4875)
    parser.add_argument("--into", type=Path, default=Path("train_gpt_alto.py"))
    options = parser.parse_args()
    options.into.write_text(adapt(options.script.read_text(), options.preset, options.lr, options.steps))
    print(options.into)


if __name__ == "__main__":
    main()
