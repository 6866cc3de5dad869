"""Where the time of the smallest iteration goes, one sample of 1024 tokens; run by scripts/benchmark.py.

In float32, without dropout or recomputation. Whatever the global batch, the optimizer steps once an iteration: its
share at N samples follows from that at one.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from alto_distributed import ALTO, param_groups
from alto_distributed.pretrain.config.settings import Model, Run
from alto_distributed.pretrain.model import build_model, inputs_of, next_token_loss

ROUNDS = 2


def main(hidden: int, layers: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(model=Model(layers=layers, hidden=hidden, heads=max(hidden // 64, 1), dropout=0.0))
    model = build_model(run).to(device)
    optimizer = ALTO(param_groups(model), lr=1e-5)
    tokens = torch.randint(run.model.vocabulary, (1, run.model.sequence + 1), device=device)
    taken: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}

    def timed(part: str, work):
        began = time.perf_counter()
        result = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken[part].append(time.perf_counter() - began)
        return result

    for _ in range(1 + ROUNDS):
        optimizer.zero_grad(set_to_none=False)
        loss = timed("forward", lambda: next_token_loss(model(**inputs_of(tokens)).logits, tokens))
        timed("backward", loss.backward)
        timed("optimizer", optimizer.step)
    # The first round makes gradients and states.
    parts = {part: statistics.median(seconds[1:]) for part, seconds in taken.items()}
    print(json.dumps({"samples": 1, "tokens": run.model.sequence, "seconds": sum(parts.values()), "parts": parts}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
