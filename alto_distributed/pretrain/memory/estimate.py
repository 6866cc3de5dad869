"""``python -m alto_distributed estimate``: bytes a rank by part, for ALTO, LAMB, AdamW and the official ALTO."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path

from ..config import settings as config
from . import usage as memory
from .footprint import BYTES, ENGINES, Footprint, Setting, checkpoint, footprint
from .shapes import Groups, count, of_count, of_model

_DTYPES = ("float32", "bfloat16")
#: Optimizer -> how the table calls it.
_ROWS = {"alto": "ALTO", "lamb": "LAMB (ALTO, alpha 0)", "adamw": "AdamW", "official": "official ALTO, unsharded"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--config", type=Path, help="settings of a pretraining run: configs/*.yaml")
    size.add_argument("--parameters", type=float, help="size of a model, like 7e9, that is taken to divide evenly")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of --config")
    parser.add_argument("--engine", choices=ENGINES, help="default: the settings'; with --parameters deepspeed")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="DeepSpeed's ZeRO stage")
    parser.add_argument("--world", type=int, default=1, metavar="RANKS")
    parser.add_argument("--tensor-parallel", type=int, metavar="RANKS", help="Megatron's")
    parser.add_argument("--pipeline-parallel", type=int, metavar="RANKS", help="Megatron's")
    parser.add_argument("--no-distributed-optimizer", action="store_true", help="Megatron's")
    parser.add_argument("--precision", choices=tuple(BYTES), help="of the model")
    parser.add_argument(
        "--grad-accum-dtype", choices=tuple(BYTES), help="DeepSpeed's (default: the JSON's, or precision)"
    )
    parser.add_argument("--grad-ema-dtype", choices=_DTYPES, help="of ALTO's third state")
    parser.add_argument("--exp-avg-dtype", choices=_DTYPES, help="of ALTO's and LAMB's first moment")


def main(options: argparse.Namespace) -> None:
    print(report(options))


def report(options: argparse.Namespace) -> str:
    """The table and what it is of.

    Raises:
        ValueError: the options do not go together.
    """
    setting, whole, here, chosen, notes = _asked(options)
    rows = []
    for name, title in _ROWS.items():
        kept = memory.states_of(name, chosen)
        like = name in ("adamw", "official")
        one = replace(setting, states=kept, states_like_parameters=like)
        groups = here
        if name == "official":
            one, groups = one.unsharded(), whole
        rows.append((title, footprint(one, groups), checkpoint(one, whole)))
    s = setting
    details = {
        "deepspeed": f"ZeRO stage {s.stage}, gradients accumulated in {s.accumulate_in or s.precision}",
        "megatron": f"{'with' if s.distributed_optimizer else 'without'} the distributed optimizer",
    }.get(s.engine, "states by the plain optimizer")
    head = [
        f"{count(whole):,} parameters, {s.engine}, {s.precision}, {options.world} ranks, "
        f"{s.data_parallel} data-parallel; {details}",
        "GiB on the fullest rank; checkpoint: GiB of all ranks' files. Activations are not in it.",
    ]
    return "\n".join([*head, "", *_table(rows), *(["", *notes] if notes else [])])


def _asked(options: argparse.Namespace) -> tuple[Setting, Groups, Groups, dict[str, str], list[str]]:
    """The setting, the whole model, the fullest rank's part of it, the choice of states, and notes."""
    notes = ["the official ALTO takes norms of what it is given, so it is right only where nothing is sharded"]
    chosen = {name: getattr(options, name) for name in ("grad_ema_dtype", "exp_avg_dtype") if getattr(options, name)}
    named = {"stage": options.stage, "precision": options.precision, "accumulate_in": options.grad_accum_dtype}
    named = {key: value for key, value in named.items() if value is not None}
    if options.no_distributed_optimizer:
        named["distributed_optimizer"] = False
    if options.world < 1:
        raise ValueError(f"--world {options.world}: there must be one rank at least")
    if options.config is None:
        if not options.parameters >= 1:
            raise ValueError(f"--parameters {options.parameters} should be a number like 7e9")
        if options.overrides:
            raise ValueError(f"{options.overrides[0]!r} overrides settings, and there are none without --config")
        engine, size = options.engine or "deepspeed", int(options.parameters)
        tensor, pipeline = _model_parallel(options, engine, 1, 1)
        setting = Setting(engine=engine, data_parallel=options.world // (tensor * pipeline), **named)
        notes.append("parameters are taken to divide evenly; with --config the model's own shapes are counted")
        return setting, of_count(size), of_count(size, tensor * pipeline), chosen, notes

    run = config.load(options.config, options.overrides)
    engine = options.engine or run.engine
    if engine in config.ENGINES:
        run = replace(run, engine=engine)
    layout = run.megatron if engine == "megatron" else None
    tensor, pipeline = _model_parallel(
        options, engine, layout.tensor_parallel if layout else 1, layout.pipeline_parallel if layout else 1
    )
    base = memory.setting_of(replace(run, megatron=replace(run.megatron, tensor_parallel=1, pipeline_parallel=1)), 1)
    if options.stage == 0:
        named.setdefault("accumulate_in", "")  # the JSON's is for its own stage
    setting = replace(base, engine=engine, data_parallel=options.world // (tensor * pipeline), **named)
    if memory.offloads(run):
        notes.append("the DeepSpeed JSON offloads to the host: the figures are those without offloading")
    chosen = {**{key: str(value) for key, value in run.optimizer.options.items() if key.endswith("_dtype")}, **chosen}
    return setting, of_model(run.model), of_model(run.model, tensor, pipeline), chosen, notes


def _model_parallel(options: argparse.Namespace, engine: str, tensor: int, pipeline: int) -> tuple[int, int]:
    tensor = tensor if options.tensor_parallel is None else options.tensor_parallel
    pipeline = pipeline if options.pipeline_parallel is None else options.pipeline_parallel
    if tensor < 1 or pipeline < 1 or options.world % (tensor * pipeline):
        raise ValueError(
            f"{options.world} ranks are not a multiple of tensor-parallel x pipeline-parallel = {tensor} x {pipeline}"
        )
    if tensor * pipeline > 1 and engine != "megatron":
        raise ValueError("--tensor-parallel and --pipeline-parallel are Megatron's: add --engine megatron")
    return tensor, pipeline


def _table(rows: list[tuple[str, Footprint, float]]) -> list[str]:
    """Markdown, in columns; a part that no optimizer has is left out."""
    parts = [f.name for f in fields(Footprint) if any(getattr(row, f.name) for _, row, _ in rows)]
    titles = {"exp_avg": "m", "exp_avg_sq": "v", "more": "more states"}
    lines = [["optimizer", *(titles.get(part, part) for part in parts), "total", "checkpoint"]]
    for title, row, saved in rows:
        figures = [*(getattr(row, part) for part in parts), row.total, saved]
        lines.append([title, *(f"{figure / 2**30:.3f}" for figure in figures)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = ["| " + " | ".join(map(_pad, range(len(widths)), line, widths)) + " |" for line in lines]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return [padded[0], rule, *padded[1:]]


def _pad(column: int, cell: str, width: int) -> str:
    return cell.rjust(width) if column else cell.ljust(width)
