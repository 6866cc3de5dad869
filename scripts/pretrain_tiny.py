"""Pretrain a small byte-level GPT with ALTO, sharded by FSDP2, on Python's own standard library.

Run under torchrun (launch/tiny.sh does). Real text, a real held-out split, nothing downloaded: the corpus
is the source of the modules that come with Python. Batches follow from (seed, step) alone, so two runs
give the same losses.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from alto_distributed import ALTO, param_groups, recipe

SEED = 1234


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.ndim == 2:  # GPT-2's initialisation: 0.02, and less on the way back into the residual stream
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return F.linear(self.norm(h), self.tokens.weight)  # tied


def corpus(megabytes: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation bytes; every tenth file is held out."""
    files = sorted(p for p in Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py") if "site-packages" not in p.parts)
    splits = [bytearray(), bytearray()]
    for i, path in enumerate(files):
        splits[i % 10 == 0] += path.read_bytes()
        if sum(map(len, splits)) > megabytes * 1e6:
            break
    train, valid = (torch.frombuffer(split, dtype=torch.uint8) for split in splits)
    return train, valid


def batch(data: torch.Tensor, step: int, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole global batch of a step; each rank takes its rows of it."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    starts = torch.randint(0, len(data) - length - 1, (size, 1), generator=generator)
    rows = data[starts + torch.arange(length + 1)].long()
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def validation_loss(model: nn.Module, data: torch.Tensor, size: int, length: int) -> float:
    """Mean nats a byte over one fixed batch, every rank its rows of it."""
    x, y = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch(data, -1, size, length))
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=2e-2, help="peak learning rate, after 10%% warm-up")
    parser.add_argument("--global-batch", type=int, default=64, help="sequences a step, over all ranks")
    parser.add_argument("--length", type=int, default=128, help="bytes a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=4.0, help="size of the corpus")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.global_batch % world:
        raise ValueError(f"--global-batch {args.global_batch} does not divide over {world} ranks")

    torch.manual_seed(SEED)
    model = TinyGPT(args.layers, args.width, args.heads, args.length)
    size = sum(p.numel() for p in model.parameters())
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    hyper = recipe(args.global_batch)
    optimizer = ALTO(param_groups(model, hyper.pop("weight_decay")), **{**hyper, "lr": args.lr})
    warmup = max(1, args.steps // 10)

    def schedule(step: int) -> float:
        done = (step - warmup) / max(1, args.steps - warmup)
        return (step + 1) / warmup if step < warmup else 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    train, valid = corpus(args.megabytes)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    say(
        f"{size:,} parameters sharded over {world} ranks; {len(train):,} bytes to train on, {len(valid):,} held out; "
        f"ALTO alpha={hyper['alpha']}, betas={hyper['betas']}, lr={args.lr}"
    )
    first = validation_loss(model, valid, 64, args.length)
    say(f"step    0  valid loss {first:.4f}")
    began = time.perf_counter()
    for step in range(args.steps):
        x, y = (t.chunk(world)[rank] for t in batch(train, step, args.global_batch, args.length))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % 10 == 0 or step + 1 == args.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            rate = (step + 1) * args.global_batch * args.length / (time.perf_counter() - began)
            line = f"step {step + 1:4d}  train loss {mean.item() / world:.4f}  {rate:,.0f} bytes/s"
            if (step + 1) % 50 == 0 or step + 1 == args.steps:
                line += f"  valid loss {validation_loss(model, valid, 64, args.length):.4f}"
            say(line)
    last = validation_loss(model, valid, 64, args.length)
    say(f"done: validation {first:.4f} -> {last:.4f} nats a byte (perplexity {math.exp(last):.2f} a byte)")
    dist.barrier()  # nobody leaves while another is still in its last collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
