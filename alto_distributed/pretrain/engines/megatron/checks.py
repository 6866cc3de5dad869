"""What can be refused before Megatron is imported."""

from __future__ import annotations

from ...config.settings import Run

#: The optimizers that this engine can build.
OPTIMIZERS = ("alto", "lamb", "adam", "adamw")


def check(run: Run, data_parallel: int) -> None:
    """Raise a ValueError if the batch does not divide, or Megatron has no such optimizer or cannot cut the model so."""
    run.accumulation(data_parallel)
    check_optimizer(run)
    check_layout(run)


def check_optimizer(run: Run) -> None:
    if run.optimizer.name not in OPTIMIZERS:
        raise ValueError(
            f"Megatron has no optimizer {run.optimizer.name!r}: use {', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]}, "
            "or --engine deepspeed"
        )


def check_layout(run: Run) -> None:
    m, layout = run.model, run.megatron
    if m.vocabulary % layout.tensor_parallel:
        raise ValueError(
            f"model.vocabulary={m.vocabulary} does not divide over megatron.tensor_parallel={layout.tensor_parallel}; "
            f"set it to {-(-m.vocabulary // (128 * layout.tensor_parallel)) * 128 * layout.tensor_parallel}"
        )
    for name, value in {"heads": m.heads, "kv_heads": m.groups, "feed_forward": m.inner}.items():
        if value % layout.tensor_parallel:
            raise ValueError(
                f"model.{name}={value} does not divide over megatron.tensor_parallel={layout.tensor_parallel}; set one "
                "of them so that it does"
            )
