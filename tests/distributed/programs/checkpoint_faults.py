"""Kill ranks with SIGKILL while they save, again and again, and see that what they had saved can be loaded.

    python -m tests.distributed.programs.checkpoint_faults ENGINE DIRECTORY TRIALS SEED

Two ranks, real processes over gloo, load the newest checkpoint, compare it with what was saved, and then do nothing but
save. They are forked from this process, which has imported everything, so that a trial costs a fraction of a second.
Half of the trials kill at a random instant, from outside; in the others a rank kills itself at a given point, for some
are too short to be hit from outside. The victim is rank 0, rank 1, or both. A line of JSON says how each trial went.

ENGINE is "deepspeed" or "megatron", the real ones, or "light": an engine of torch alone, with one file a rank. What is
tested, alto_distributed.pretrain.checkpoint.manager.Checkpoints, is the same.
"""

import contextlib
import datetime
import hashlib
import importlib
import json
import mmap
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from alto_distributed.pretrain.checkpoint import manager as module
from alto_distributed.pretrain.checkpoint import manifest
from alto_distributed.pretrain.checkpoint.io import Written, describe, failing_late
from alto_distributed.pretrain.checkpoint.manager import Checkpoints
from alto_distributed.pretrain.config.settings import parse
from alto_distributed.sharding.rank_sync import run_on_rank0
from alto_distributed.sharding.shutdown import shutdown

WORLD = 2
#: Parts of a save, as rank 0 sees them.
PHASES = (
    "outside",
    "begun",
    "prepare",
    "engine",
    "checksums",
    "publish",
    "manifest",
    "rename",
    "named",
    "retention",
    "deleting",
)
#: Where a rank may kill itself: the phase that it has just entered.
POINTS = ("prepare", "engine", "checksums", "publish", "manifest", "rename", "named", "deleting")
PATIENCE = 30  # seconds


class Light:
    """An engine that only saves and loads: two tensors a rank that follow from the step."""

    device = torch.device("cpu")

    def advance(self, step):
        self.step = step
        generator = torch.Generator().manual_seed(step * WORLD + dist.get_rank())
        self.state = {name: torch.randn(400_000, generator=generator) for name in ("weights", "exp_avg")}

    def save(self, directory):
        path = directory / f"shard_{dist.get_rank()}.pt"
        with failing_late() as attempt:
            attempt(lambda: torch.save({"step": self.step, **self.state}, path))
            dist.barrier()
        return {path: Written(dist.get_rank(), describe(self.state))}

    def load(self, directory, saved_by):
        assert saved_by == WORLD
        saved = torch.load(directory / f"shard_{dist.get_rank()}.pt", weights_only=True)
        self.step = saved.pop("step")
        self.state = saved

    def tensors(self):
        return self.state


class Real:
    """DeepSpeed's or Megatron's, training a very small GPT-2."""

    def __init__(self, run):
        self.run, self.engine = run, module_of(run.engine).build(run)
        self.device, self.save, self.load = self.engine.device, self.engine.save, self.engine.load

    def advance(self, step):
        own = self.engine.data_parallel_rank
        generator = torch.Generator().manual_seed(step * WORLD + own)
        vocabulary, sequence = self.run.model.vocabulary, self.run.model.sequence
        batches = self.run.accumulation(self.engine.data_parallel_size)
        shape = 4, sequence + 1
        self.engine.train([torch.randint(0, vocabulary, shape, generator=generator) for _ in range(batches)], 0.01)

    def tensors(self):
        if self.run.engine == "deepspeed":
            optimizers = [self.engine._engine.basic_optimizer]
        else:
            from alto_distributed.megatron import altos

            optimizers = altos(self.engine._optimizer)
        states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
        flat = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        return {str(index): value for index, value in enumerate([*states, *flat]) if isinstance(value, torch.Tensor)}


def module_of(engine):
    if engine == "megatron":
        from tests.helpers import megatron_gpt  # noqa: F401  (puts its stand-ins for a GPU in place)
    return importlib.import_module(f"alto_distributed.pretrain.engines.{engine}.engine")


def settings(engine):
    from tests.helpers.launcher import REPO

    model = {"layers": 1, "hidden": 16, "heads": 2, "sequence": 8, "vocabulary": 64, "dropout": 0.0}
    return parse(
        {
            "engine": "megatron" if engine == "megatron" else "deepspeed",
            "model": model,
            "training": {"global_batch": 8, "micro_batch": 4, "precision": "fp32"},
            "checkpoints": {"keep": 2},
            "deepspeed": {"config": str(REPO / "configs/deepspeed/pretrain-stage2.json")},
            # With two copies of the model rank 0 would write all of it.
            "megatron": {"tensor_parallel": 2} if engine == "megatron" else {},
        }
    )


def fingerprint(engine):
    digest = hashlib.sha256()
    for name, value in sorted(engine.tensors().items()):
        digest.update(name.encode() + value.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Board:
    """Memory that ranks and the killer share: each rank's phase, and the last step whose save has returned."""

    def __init__(self):
        self.memory = mmap.mmap(-1, 8 * 2 * WORLD)

    def put(self, rank, slot, value):
        start = 8 * (2 * rank + slot)
        self.memory[start : start + 8] = value.to_bytes(8, "little")

    def get(self, rank, slot):
        start = 8 * (2 * rank + slot)
        return int.from_bytes(self.memory[start : start + 8], "little")

    def phases(self):
        return [PHASES[self.get(rank, 0)] for rank in range(WORLD)]


def watch(board, rank, victims, point, after):
    """Report phases, and die on entering ``point`` if that is this rank's part, once ``after`` saves are done."""
    done = [0]

    def enter(phase):
        board.put(rank, 0, PHASES.index(phase))
        if phase == point and done[0] >= after and rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)

    def entering(phase, function):
        def wrapped(*args, **kwargs):
            enter(phase)
            return function(*args, **kwargs)

        return wrapped

    for name, phase in (("_prepare", "prepare"), ("_read_back", "checksums"), ("_publish", "publish")):
        setattr(Checkpoints, name, entering(phase, getattr(Checkpoints, name)))
    Checkpoints._beyond = entering("retention", Checkpoints._beyond)
    manifest.write = entering("manifest", manifest.write)
    Checkpoints.save = entering("begun", Checkpoints.save)
    rmtree, rename, sync = shutil.rmtree, Path.rename, module.sync

    def watched_rename(path, target):
        enter("rename" if path.name.endswith(".partial") else "retention")
        return rename(path, target)

    def watched_sync(path):
        if path.name == "checkpoints":
            enter("named")
        sync(path)

    def watched_rmtree(path, *args, **kwargs):
        if not str(path).endswith(".partial"):
            files = [file for file in Path(path).rglob("*") if file.is_file()]
            if files:
                files[0].unlink()  # it dies when one file is gone
            enter("deleting")
        return rmtree(path, *args, **kwargs)

    Path.rename, module.shutil.rmtree, module.sync = watched_rename, watched_rmtree, watched_sync
    return enter, done


def rank_main(rank, engine_name, directory, meeting, board, victims, point, after, only_load):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = "1"  # the ranks meet in a file; DeepSpeed only asks whether it is set
    timeout = datetime.timedelta(seconds=PATIENCE * 2)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD, timeout=timeout)
    run = settings(engine_name)
    engine = Light() if engine_name == "light" else Real(run)
    saved = Checkpoints(directory / "checkpoints", run)
    newest, step = run_on_rank0(saved.newest), 0
    notes = directory / "fingerprints"
    if newest is not None:
        saved.load(engine, newest)
        step = newest.step
        if (notes / f"{step}.{rank}").read_text() != fingerprint(engine):
            raise SystemExit(f"rank {rank}: what was loaded is not what was saved at step {step}")
    if only_load:
        shutdown()
        return
    enter, done = watch(board, rank, victims, point, after)
    save = engine.save

    def watched_save(where):
        enter("engine")
        return save(where)

    engine.save = watched_save
    while True:
        step += 1
        engine.advance(step)
        (notes / f"{step}.{rank}").write_text(fingerprint(engine))
        saved.save(engine, step)
        board.put(rank, 1, step)
        board.put(rank, 0, 0)
        done[0] += 1


def start(count, *arguments):
    """Fork the ranks."""
    children = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_main(rank, *arguments)
                code = 0
            except BaseException as error:
                print(f"trial {count}, rank {rank}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
                code = 7 if "is not what was saved" in str(error) or isinstance(error, ValueError) else 3
            finally:
                os._exit(code)
        children.append(pid)
    return children


def wait(children, patience):
    """Exit codes; None for one that had to be killed because it did not end."""
    codes, deadline = {}, time.monotonic() + patience
    while len(codes) < len(children) and time.monotonic() < deadline:
        for pid in set(children) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    for pid in set(children) - set(codes):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[pid] = None
    return [codes[pid] for pid in children]


def trial(name, count, engine, directory, chance):
    board = Board()
    victims = chance.choice(([0], [1], [0, 1]))
    point = POINTS[count // 2 % len(POINTS)] if count % 2 else None
    if point not in (None, "engine", "checksums"):
        victims = [0]  # rank 1 only waits there
    after = chance.choice((1, 2, 3))  # the third save is the first to delete one
    after = 3 if point == "deleting" else after
    meeting = directory / f"meeting {name}"
    children = start(name, engine, directory, meeting, board, victims, point, after, False)
    if point is None:
        deadline = time.monotonic() + PATIENCE
        while board.get(0, 1) == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.random() * (0.15 if engine == "light" else 0.5))
        while board.phases()[0] == "outside" and time.monotonic() < deadline:
            pass  # a save, not the steps between them
        for rank in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(children[rank], signal.SIGKILL)
    codes = wait(children, PATIENCE)
    saved = max(board.get(rank, 1) for rank in range(WORLD))
    kept = Checkpoints(directory / "checkpoints", settings(engine))
    newest = kept.newest()
    damage = [problem for checkpoint in kept.all() for problem in kept.damage(checkpoint)]
    return {
        "victims": victims,
        "point": point,
        "phases": board.phases(),
        "codes": codes,
        "saved": saved,
        "newest": newest and newest.step,
        "damage": damage,
    }


def main(engine, directory, trials, seed):
    directory, chance = Path(directory), random.Random(int(seed))
    (directory / "fingerprints").mkdir(parents=True)
    if engine != "light":
        module_of(engine)  # once, for all that are forked
    for count in range(int(trials)):
        for attempt in range(10):
            result = trial(f"{count} {attempt}", count, engine, directory, chance)
            # On a busy machine the save that was aimed at may be over when the signal comes.
            if result["point"] or result["phases"][0] != "outside":
                break
        print(json.dumps(result), flush=True)
    children = start("the last", engine, directory, directory / "meeting", Board(), [], None, 0, True)
    print(json.dumps({"loaded": wait(children, PATIENCE)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
