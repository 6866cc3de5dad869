"""ALTO for sharded pretraining: LAMB plus an exploration term, exact on every shard.

>>> from alto_distributed import ALTO, param_groups, recipe
>>> optimizer = ALTO(param_groups(model), **recipe(4096, preset="recommended"))
"""

from . import torch_version  # noqa: F401  (first: with an older torch, what follows fails in its own ways)

# isort: split
from .adaptor import E
from .adopt import adopt
from .hyperparameters import Hyperparameters
from .import_hooks import register
from .lamb import LAMB
from .optimizer import ALTO
from .param_groups import param_groups
from .presets import recipe
from .sharding import LogicalParameter, Segment, ShardLayout
from .version import __version__

__all__ = [
    "ALTO",
    "LAMB",
    "E",
    "Hyperparameters",
    "LogicalParameter",
    "Segment",
    "ShardLayout",
    "__version__",
    "adopt",
    "param_groups",
    "recipe",
    "register",
]
