"""What completing the norms of PARAMETERS sharded parameters takes; run by scripts/benchmark.py under torchrun."""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
import torch.distributed as dist

from alto_distributed.sharding.layout import LogicalParameter
from alto_distributed.sharding.norms import NormTable
from alto_distributed.sharding.shutdown import leave


def main(parameters: int, rounds: int) -> None:
    dist.init_process_group("gloo")
    group, device = dist.group.WORLD, torch.device("cpu")
    table = NormTable(LogicalParameter(f"{i:04d}", (8, 8), (group,)) for i in range(parameters))
    taken = []
    for _ in range(rounds):
        partial = {device: table.zeros(device)}
        dist.barrier()
        began = time.perf_counter()
        table.complete(partial)
        taken.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        size = table.zeros(device).nbytes
        report = {"ranks": dist.get_world_size(), "parameters": parameters, "bytes": size}
        print(json.dumps({**report, "seconds": statistics.median(taken), "collectives": table.collectives}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    leave()
