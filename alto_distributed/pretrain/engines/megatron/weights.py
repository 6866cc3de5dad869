"""The weights in a checkpoint of the Megatron engine, whole, in one process. Needs torch alone."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ....safe_load import only_data
from ...checkpoint.safe_load import refuse_code_alone
from ...config.settings import Run
from .translate import from_megatron, name_in_run

#: Megatron saves the norms before matrices under the names that TransformerEngine, which fuses them, has for them.
_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def read(run: Run, directory: Path) -> dict[str, torch.Tensor]:
    """See :func:`alto_distributed.pretrain.engines.base.read_weights`."""
    refuse_code_alone(directory, [*directory.glob("**/*.pt"), *directory.glob(".metadata")], ())
    reader = FileSystemReader(directory)
    saved = {
        key: torch.empty(about.size, dtype=about.properties.dtype, device="cpu")
        for key, about in reader.read_metadata().state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata) and key.startswith(("embedding.", "decoder.", "output_layer."))
    }
    with only_data(()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no ranks
        load(saved, storage_reader=reader, no_dist=True)
    weights = {}
    for key, tensor in saved.items():
        in_layers = re.fullmatch(r"decoder\.layers\.(\D.*)", key)
        if in_layers is None:
            weights[name_in_run(run.model, key)] = from_megatron(run.model, key, tensor)
            continue
        # All layers are one tensor.
        module = in_layers[1]
        for saved_as, called in _NORMS.items():
            module = module.replace(saved_as, called)
        for index, of_layer in enumerate(tensor):
            name = f"decoder.layers.{index}.{module}"
            weights[name_in_run(run.model, name)] = from_megatron(run.model, name, of_layer)
    return weights
