"""The Megatron engine of the training program with a tiny GPT-2."""

import contextlib

from alto_distributed.pretrain.config.settings import parse

from . import devices, megatron_gpt

# isort: split
# The imports below need what megatron_gpt puts in place of a GPU.

from megatron.core import parallel_state

from alto_distributed.pretrain.engines.megatron import engine as pretrain


def run_of(optimizer="alto", precision="bf16", dropout=0.1, **layout):
    model = {"layers": 1, "hidden": 32, "heads": 2, "sequence": 8, "vocabulary": 256, "dropout": dropout}
    training = {"global_batch": 16, "micro_batch": 4, "precision": precision}
    parts = {"model": model, "training": training, "optimizer": {"name": optimizer, "lr": 0.01}, "megatron": layout}
    return parse({"engine": "megatron", "logs": {"diagnostics_every": 1}, **parts})


@contextlib.contextmanager
def programs_groups(tensor_parallel=1, pipeline_parallel=1):
    """Process groups as the program makes them, with gloo's."""
    before = megatron_gpt._parallel_state()
    vars(parallel_state).update(megatron_gpt._NO_GROUPS)
    parallel_state.initialize_model_parallel(tensor_parallel, pipeline_parallel)
    try:
        yield
    finally:
        vars(parallel_state).update(before)


def engine_of(run):
    return pretrain.MegatronTraining(run, devices.here())


def weights(engine):
    return list(engine._model.parameters())
