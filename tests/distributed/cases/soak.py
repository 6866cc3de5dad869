"""Thousands of steps in one process of each rank: skipped ones, changed and added groups, and checkpoints all the way.

At the end weights are those of the paper's own form in float64 (helpers/oracle.py), which takes the steps that were not
skipped, and the memory of each rank is what it was. The figures go to ``soak.json`` in the directory of the test.
"""

import gc
import json
import random
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from alto_distributed import ALTO
from tests.helpers import devices
from tests.helpers.cases import EXHAUSTIVE, worlds
from tests.helpers.oracle import PaperALTO
from tests.helpers.releases import need_torch

STEPS = 2500 if EXHAUSTIVE else 150
EVERY = 50  # steps between checkpoints
SHAPES = [[(37, 11), (9, 5)], [(23,), (6,)]]  # of the two groups at the start; uneven over four ranks, or empty
ADDED = {60: (13, 3), 700: (31,), 1500: (7, 2, 2)}  # step -> a group that comes then
HYPER = {"betas": (0.9, 0.9, 0.99), "eps": (1e-6, 1e-6, 1e-10)}
DTYPES = (torch.float64, torch.float32)


class Soak:
    """One model in each precision, sharded over all ranks, beside its oracle."""

    def __init__(self, dtype):
        self.dtype, self.mesh = dtype, devices.mesh(dist.get_world_size())
        self.shapes = [list(group) for group in SHAPES]
        self.numbers = [
            {"lr": 0.01, "alpha": -5.0, "weight_decay": 0.01, "decayed": True},
            {"lr": 0.01, "alpha": -5.0, "weight_decay": 0.0, "decayed": False},
        ]
        starts = [[self.start(shape) for shape in group] for group in self.shapes]
        self.oracles = [[self.oracle(t, g) for t in group] for g, group in enumerate(starts)]
        self.build([[self.sharded(t) for t in group] for group in starts])

    def start(self, shape):
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator, dtype=self.dtype)

    def sharded(self, tensor):
        return nn.Parameter(self.distributed(tensor))

    def distributed(self, tensor):
        # src_data_rank=None: each rank has the whole tensor and takes its own part, without communication.
        return distribute_tensor(tensor.to(devices.here()), self.mesh, [Shard(0)], src_data_rank=None)

    def oracle(self, tensor, g):
        options = {key: value for key, value in self.numbers[g].items() if key != "decayed"}
        return PaperALTO(tensor, **HYPER, **options, ratio=self.numbers[g]["decayed"])

    def build(self, params):
        self.params = params
        groups = [{"params": group, **numbers} for group, numbers in zip(params, self.numbers, strict=True)]
        self.optimizer = ALTO(groups, skip_nonfinite=True, **HYPER)

    def change(self, chance):
        """One number of one group."""
        g, name = chance.randrange(len(self.numbers)), chance.choice(["lr", "alpha", "weight_decay"])
        if name == "weight_decay" and not self.numbers[g]["decayed"]:
            return
        bounds = {"lr": (0.002, 0.02), "alpha": (-8.0, 8.0), "weight_decay": (0.001, 0.05)}[name]
        value = chance.uniform(*bounds)
        self.numbers[g][name] = self.optimizer.param_groups[g][name] = value
        for oracle in self.oracles[g]:
            setattr(oracle, "wd" if name == "weight_decay" else name, value)

    def add(self, shape):
        self.numbers.append({"lr": 0.01, "alpha": 0.5, "weight_decay": 0.02, "decayed": len(shape) > 1})
        self.shapes.append([shape])
        start = self.start(shape)
        self.oracles.append([self.oracle(start, len(self.numbers) - 1)])
        self.params.append([self.sharded(start)])
        self.optimizer.add_param_group({"params": self.params[-1], **self.numbers[-1]})

    def step(self, k, bad_rank):
        """``bad_rank``: where a NaN or an infinity is, or None."""
        generator = torch.Generator().manual_seed(k)
        for params, oracles in zip(self.params, self.oracles, strict=True):
            for p, oracle in zip(params, oracles, strict=True):
                g = torch.randn(p.shape, generator=generator, dtype=self.dtype)
                p.grad = self.distributed(g)
                if bad_rank is None:
                    oracle.step(g)
        if bad_rank == dist.get_rank():
            last = [p.grad.to_local() for group in self.params for p in group if p.grad.to_local().numel()][-1]
            last.view(-1)[-1] = torch.nan if k % 2 else -torch.inf
        self.optimizer.step()

    def save_and_load(self, directory):
        """Into new tensors and a new optimizer, which go on in the place of the old."""
        saved = {f"{g}.{i}": p.detach() for g, group in enumerate(self.params) for i, p in enumerate(group)}
        dcp.save({"weights": saved, "optimizer": _tensors(self.optimizer)}, checkpoint_id=directory)
        groups, skipped = self.optimizer.state_dict()["param_groups"], self.optimizer.skipped_steps
        self.build([[self.sharded(torch.zeros(s, dtype=self.dtype)) for s in group] for group in self.shapes])
        self.optimizer.initialize_state()
        weights = {f"{g}.{i}": p.detach() for g, group in enumerate(self.params) for i, p in enumerate(group)}
        states = _tensors(self.optimizer)
        dcp.load({"weights": weights, "optimizer": states}, checkpoint_id=directory)
        by_place = {}
        for key, value in states.items():
            place, name = key.split(".")
            by_place.setdefault(int(place), {})[name] = value
        self.optimizer.load_state_dict({"state": by_place, "param_groups": groups})
        return skipped

    def gap(self):
        """Largest difference to the oracle, relative to the norm of the parameter."""
        gaps = [torch.zeros((), dtype=torch.float64)]
        for params, oracles in zip(self.params, self.oracles, strict=True):
            for p, oracle in zip(params, oracles, strict=True):
                whole = p.detach().full_tensor().cpu().double()
                gaps.append((whole - oracle.theta).norm() / oracle.theta.norm())
        return torch.stack(gaps).max().item()


def _tensors(optimizer):
    return {
        f"{place}.{name}": value
        for place, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


def resident():
    """Bytes of this process that are in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def slope(points):
    """Bytes a step, by least squares."""
    steps, sizes = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
    steps, sizes = steps - steps.mean(), sizes - sizes.mean()
    return (steps @ sizes / (steps @ steps)).item()


@worlds(4)
def case_soak(directory):
    need_torch(2, 7, "distribute_tensor without communication")
    chance = random.Random(7)  # the same on all ranks
    soaks = [Soak(dtype) for dtype in DTYPES]
    skipped, counted, memory = 0, 0, []
    for k in range(STEPS):
        if k in ADDED:
            for soak in soaks:
                soak.add(ADDED[k])
        if chance.random() < 0.05:
            seed = chance.random()
            for soak in soaks:
                soak.change(random.Random(seed))
        bad_rank = chance.randrange(dist.get_world_size()) if chance.random() < 0.1 else None
        skipped += bad_rank is not None
        for soak in soaks:
            soak.step(k, bad_rank)
            assert (soak.optimizer.skipped_in_a_row > 0) == (bad_rank is not None), k
        if (k + 1) % EVERY == 0:
            found = {soak.save_and_load(directory / f"soak-{soak.dtype}") for soak in soaks}
            assert len(found) == 1
            counted += found.pop()
            memory.append((k + 1, resident()))
    gaps = {str(soak.dtype): soak.gap() for soak in soaks}
    settled = memory[len(memory) // 3 :]
    growth = slope(settled) * STEPS if len(settled) > 2 else 0.0
    counted += soaks[0].optimizer.skipped_steps
    figures = {
        "steps": STEPS,
        "skipped": skipped,
        "gaps": gaps,
        "MiB": [m / 2**20 for _, m in memory],
        "growth": growth,
    }
    (directory / f"soak.{dist.get_rank()}.json").write_text(json.dumps(figures))
    assert counted == skipped > STEPS // 30
    first = next(s["step"] for s in soaks[0].optimizer.state.values())
    assert first == STEPS - skipped
    assert gaps["torch.float64"] < 1e-11, gaps
    assert gaps["torch.float32"] < 1e-4, gaps
    assert growth < 8 * 2**20, figures
