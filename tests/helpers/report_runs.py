"""Directories of runs as the training program leaves them, with curves that are made up."""

import json
import math
import random

from alto_distributed.pretrain.config.settings import parse

PARAMETERS = {
    "gpt2": ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
    "llama": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
}
PREFIX = {"gpt2": "transformer.h", "llama": "model.layers"}
EMBEDDING = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}


def made_up(directory, *, optimizer="alto", kind="gpt2", layers=12, steps=400, total=400, seed=1, skipped=()):
    """A run of ``steps`` steps out of ``total``."""
    draw = random.Random(seed)
    directory.mkdir(parents=True)
    settings = {"model": {"kind": kind, "layers": layers}, "training": {"iterations": total, "seed": seed}}
    run = parse({**settings, "optimizer": {"name": optimizer}})
    fall = {"alto": 0.012, "lamb": 0.010, "adamw": 0.008}.get(optimizer, 0.007)
    with open(directory / "metrics.jsonl", "w") as file:
        for step in range(0, steps + 1, 10):
            loss = 3.2 + 3.7 * math.exp(-fall * step)
            if step:
                values = {"loss": loss + draw.gauss(0, 0.03), "lr": 0.01 * (1 - step / total) + 1e-4}
                values |= {"grad_norm": 0.4 + draw.random(), "tokens_per_second": 9e4 + draw.gauss(0, 2e3)}
                values |= {"peak_gib": 11.2, "skipped": False, "skipped_steps": int(step in skipped)}
                file.write(json.dumps({"step": step, **values}) + "\n")
            if step % 100 == 0:
                validated = {"valid_loss": loss, "valid_perplexity": math.exp(loss)}
                file.write(json.dumps({"step": step, **validated}) + "\n")
    start = {"began": "2026-11-18T12:00:00+00:00", "step": 0, "ranks": 8, "command": ["alto", "pretrain", "<b>"]}
    about = {"versions": {"torch": "2.13.0"}, "hardware": {"cpu": "a CPU", "gpus": "8 x a GPU"}}
    (directory / "starts.jsonl").write_text(json.dumps({**start, **about, "settings": run.as_dict()}) + "\n")
    if optimizer in ("alto", "lamb"):
        with open(directory / "diagnostics.jsonl", "w") as file:
            for step in range(20, steps + 1, 20):
                file.write(json.dumps({"step": step, "parameters": readings(kind, layers, step, draw)}) + "\n")
    return directory


def readings(kind, layers, step, draw):
    found = {EMBEDDING[kind]: [0.05 * math.exp(-step / 300), 30.0, 2.0, 0.1]}
    for layer in range(layers):
        for place, name in enumerate(PARAMETERS[kind]):
            ratio = 0.02 * (1 + layer) / layers * math.exp(step / 500 - place / 3) * (1 + 0.1 * draw.random())
            is_vector = name.startswith("ln")
            four = [1.0 if is_vector else ratio, 8 + layer + step / 100, 1.5 + 0.1 * place, 0.3 + 0.02 * layer]
            found[f"{PREFIX[kind]}.{layer}.{name}.weight"] = four
    return found
