"""Faults at every instant of a save (tests/helpers/faults.py), and flipped bits in every file of what was saved.

    python -m tests.distributed.programs.fault_matrix ENGINE DIRECTORY KILLS REFUSALS FLIPS SEED

Two ranks save twice, and a third time while their events are counted. Then, for a sample of all instants (-1 for all):

- full, refuse, deny, delay: in the same ranks, which must go on. A save ends with the same OSError on both ranks and
  leaves the directory as it was, or it is whole.
- flip, after a file was read back for its checksum: the save goes on, and a load finds it.
- kill: in ranks that are forked for it. Whatever has a name afterwards is whole, and the newest can be loaded.
- flip, of a checkpoint that is there: a bit of each file in turn, which must be found.

Lines of JSON tell the number of events, each trial, and the counts. ENGINE is as in checkpoint_faults.py.
"""

import datetime
import json
import os
import random
import shutil
import sys
from pathlib import Path

import torch.distributed as dist

from alto_distributed.pretrain.checkpoint import manifest
from alto_distributed.pretrain.checkpoint.manager import Checkpoints
from tests.helpers.faults import Fault, Injector, flip, on_disk

from .checkpoint_faults import PATIENCE, WORLD, Light, Real, fingerprint, module_of, settings, wait

SURVIVED = ("full", "refuse", "deny", "delay", "flip")
#: Actions that may come at any event; a disk does nothing to a collective.
ANYWHERE = ("kill", "stop", "delay")


def connect(rank, meeting):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = "1"  # the ranks meet in a file; DeepSpeed only asks whether it is set
    timeout = datetime.timedelta(seconds=PATIENCE * 2)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD, timeout=timeout)


def names(directory):
    """What a reader of checkpoints sees. Names with a point in front are what a next save removes."""
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def everyones(value):
    values = [None] * WORLD
    dist.all_gather_object(values, value)
    return values


def attempt(saved, engine, step, fault):
    """Save with a fault on one rank; what came of it."""
    kind, message = "saved", ""
    with Injector(fault, str(saved.directory)) as injector:
        try:
            saved.save(engine, step)
        except Exception as error:
            kind, message = type(error).__name__, str(error)
    return {"end": kind, "message": message, "reached": injector.reached, "seen": injector}


def survive(rank, engine_name, directory, refusals, seed):
    """Save, count, and go on after each fault that leaves the ranks alive."""
    run = settings(engine_name)
    engine = Light() if engine_name == "light" else Real(run)
    saved = Checkpoints(directory / "checkpoints", run)
    for step in (1, 2):
        engine.advance(step)
        saved.save(engine, step)
        (directory / f"fingerprint {step} {rank}").write_text(fingerprint(engine))
    dist.barrier()
    if rank == 0:
        shutil.copytree(directory / "checkpoints", directory / "base")
    dist.barrier()
    engine.advance(3)
    (directory / f"fingerprint 3 {rank}").write_text(fingerprint(engine))
    seen = attempt(saved, engine, 3, None)["seen"]
    events, instants = zip(*everyones((seen.events, seen.instants)), strict=True)
    report(rank, {"events": events, "instants": instants})
    step, mine = 3, random.Random(seed)
    for who, number, after, action in sample(events, instants, SURVIVED, refusals, mine):
        if rank == 0:  # what the last one left would be removed first, and events would have other numbers
            for left in saved.directory.glob(".step-*"):
                shutil.rmtree(left)
        dist.barrier()
        before, step = names(saved.directory), step + 1
        fault = Fault(number, after, action) if rank == who else None
        came = attempt(saved, engine, step, fault)
        came = everyones({key: came[key] for key in ("end", "message", "reached")})
        if all(one["end"] == "saved" for one in came):
            right = names(saved.directory)[-1] == f"step-{step:08d}"
        else:
            right = came[0]["end"] == came[1]["end"] == "OSError" and came[0]["message"] == came[1]["message"]
            right = right and names(saved.directory) == before
        damage = [problem for each in saved.all() for problem in saved.damage(each)] if rank == 0 else []
        trial = {"action": action, "rank": who, "at": events[who][number], "after": after}
        reached = came[who]["reached"]
        report(rank, {**trial, "ends": [c["end"] for c in came], "right": right, "damage": damage, "reached": reached})
        if action == "flip" and rank == 0 and came[0]["end"] == "saved":
            shutil.rmtree(saved.directory / f"step-{step:08d}")
        if not right:
            report(rank, {"said": [c["message"] for c in came], "names": names(saved.directory), "before": before})
        dist.barrier()
    saved.save(engine, step + 1)  # and none of them is in the way of the next
    saved.load(engine, saved.newest())
    if fingerprint(engine) != (directory / f"fingerprint 3 {rank}").read_text():
        raise SystemExit("what was loaded is not what was saved")
    dist.barrier()


def sample(events, instants, actions, count, chance, at=""):
    """(rank, number, after, action) for some of the instants at which an action makes sense, at events of a kind."""
    every = [
        (rank, number, after, action)
        for action in actions
        for rank in range(WORLD)
        for number, after in instants[rank]
        if _makes_sense(action, events[rank], number, after) and at in events[rank][number]
    ]
    return every if count < 0 else chance.sample(every, min(count, len(every)))


def _makes_sense(action, events, number, after):
    event = events[number]
    if action == "flip":  # of a file that was read back: torch's own writer syncs before, and a save cannot see that
        is_last = event not in events[number + 1 :]
        return (
            after and is_last and event.startswith("sync") and event.endswith((".pt", ".json", ".distcp", ".metadata"))
        )
    return action in ANYWHERE or on_disk(event)


def die(rank, engine_name, directory, who, number, after):
    """Go on from the base and save with a deadly fault on one rank."""
    run = settings(engine_name)
    engine = Light() if engine_name == "light" else Real(run)
    saved = Checkpoints(directory / "checkpoints", run)
    saved.load(engine, saved.newest())
    engine.advance(3)
    attempt(saved, engine, 3, Fault(number, after, "kill") if rank == who else None)


def check_load(rank, engine_name, directory, notes):
    """Load the newest, and compare it with what was saved."""
    run = settings(engine_name)
    engine = Light() if engine_name == "light" else Real(run)
    saved = Checkpoints(directory / "checkpoints", run)
    newest = saved.newest()
    saved.load(engine, newest)
    if fingerprint(engine) != (notes / f"fingerprint {newest.step} {rank}").read_text():
        raise SystemExit("what was loaded is not what was saved")


def report(rank, line):
    if rank == 0:
        print(json.dumps(line), flush=True)


def in_ranks(work, meeting, *arguments, patience=PATIENCE * 20):
    """Fork the ranks; how each ended."""
    meeting.unlink(missing_ok=True)
    sys.stdout.flush()
    children = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                connect(rank, meeting)
                work(rank, *arguments)
                code = 0
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {str(error)[:500]}", file=sys.stderr, flush=True)
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(pid)
    return wait(children, patience)


def kills(engine, directory, events, instants, count, chance):
    for who, number, after, _ in sample(events, instants, ("kill",), count, chance):
        shutil.rmtree(directory / "checkpoints")
        shutil.copytree(directory / "base", directory / "checkpoints")
        codes = in_ranks(die, directory / "meeting", engine, directory, who, number, after)
        saved = Checkpoints(directory / "checkpoints", settings(engine))
        damage = [problem for each in saved.all() for problem in saved.damage(each)]
        newest = saved.newest().step
        loaded = in_ranks(check_load, directory / "meeting", engine, directory, directory)
        trial = {"action": "kill", "rank": who, "at": events[who][number], "after": after, "codes": codes}
        report(0, {**trial, "newest": newest, "damage": damage, "loaded": loaded})


def flips(directory, count, chance):
    """Flip bits of every file of a checkpoint in turn, one at a time, and put each back."""
    newest = max((directory / "base").glob("step-*"))
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    missed = []
    for number in range(count):
        path = files[number % len(files)]
        bit = chance.randrange(path.stat().st_size * 8)
        flip(path, bit)
        try:
            whole = manifest.read(newest)
            found = manifest.problems(newest, whole, whole.files)
        except ValueError as error:
            found = [str(error)]
        flip(path, bit)
        if not found:
            missed.append([str(path.relative_to(newest)), bit])
    report(0, {"flips": count, "files": len(files), "missed": missed})


def main(engine, directory, killed, refused, flipped, seed):
    directory, chance = Path(directory), random.Random(int(seed))
    directory.mkdir(parents=True)
    if engine != "light":
        module_of(engine)  # once, for all that are forked
    reading, writing = os.pipe()
    # The lines of rank 0 are needed here too: how many events there are.
    shown = os.dup(1)
    os.dup2(writing, 1)
    child = os.fork()
    if child == 0:
        os.close(reading)
        codes = in_ranks(survive, directory / "meeting", engine, directory, int(refused), int(seed))
        os._exit(0 if codes == [0, 0] else 1)
    os.close(writing)
    os.dup2(shown, 1)
    with os.fdopen(reading) as lines:
        said = [line for line in lines if line.startswith("{")]
    sys.stdout.write("".join(said))
    _, status = os.waitpid(child, 0)
    report(0, {"survivors": os.waitstatus_to_exitcode(status)})
    counted = json.loads(said[0])
    kills(engine, directory, counted["events"], counted["instants"], int(killed), chance)
    flips(directory, int(flipped), chance)


if __name__ == "__main__":
    main(*sys.argv[1:])
