"""Faults at every instant of a whole run (tests/helpers/faults.py): its collectives, log lines, saves and locks.

    python -m tests.distributed.programs.run_faults ENGINE DIRECTORY SEED ACTION[@EVENT]=COUNT...

Two ranks train five steps with the program's own loop, while their events are counted. Then, for COUNT of all instants
(-1 for all) of each ACTION, with @EVENT at events that are called so, they train anew with that fault on one rank, and
if they did not end well, once more without: the command is given again. A line of JSON tells for each trial how the
ranks ended, what the checkpoints were like in between, and whether losses and weights have the bits of the run that was
left alone.

With "rules" instead of ACTION=COUNT, it is tried what the loop sees to at its start and before a save (run_rules.py).

ENGINE is "light" (tests/helpers/light_engine.py), "deepspeed" or "megatron".
"""

import contextlib
import io
import json
import logging
import os
import random
import shutil
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
import torch._dynamo  # which every optimizer imports when it is made: once, for all that are forked

from alto_distributed.pretrain import metrics, trainer
from alto_distributed.pretrain.checkpoint.manager import Checkpoints
from alto_distributed.pretrain.config.settings import parse
from alto_distributed.pretrain.data.prepare import prepare
from tests.helpers import light_engine
from tests.helpers.faults import Fault, Injector
from tests.helpers.light_engine import LightEngine, with_timeout

from . import run_rules
from .checkpoint_faults import WORLD, module_of, settings
from .fault_matrix import in_ranks, report, sample

#: Of a rank that waits for one that is stopped; and for all others, on a busy machine.
SHORT, LONG = 6.0, 60.0


def settings_of(engine, data):
    light = light_engine.settings(data, timeout=LONG)
    if engine == "light":
        return light
    shape = settings(engine).as_dict()
    both = {**light.as_dict(), **{key: shape[key] for key in ("engine", "deepspeed", "megatron")}}
    both["model"] = {**both["model"], "hidden": 16, "heads": 2, "vocabulary": 260}
    return parse({**both, "training": {**both["training"], "micro_batch": 2}})


def one_rank(rank, run, directory, who, fault, notes):
    """One rank of a start of the program."""
    if run.engine == "deepspeed" and run.deepspeed.config == "":
        trainer.build = LightEngine
    warnings.simplefilter("ignore")
    logging.disable()
    fault = fault if rank == who else None
    with Injector(fault, str(directory)) as injector, contextlib.redirect_stderr(io.StringIO()):
        trainer.train(run, directory)
    if notes is not None:
        (notes / f"events {rank}").write_text(json.dumps([injector.events, injector.instants]))


def outcome(directory, run):
    """Losses by step, and the bits of the newest checkpoint."""
    saved = Checkpoints(directory / "checkpoints", run)
    newest = saved.newest()
    losses = {str(r["step"]): r["loss"] for r in metrics.read(directory) if "loss" in r}
    damage = [problem for each in saved.all() for problem in saved.damage(each)]
    return losses, damage, newest


def bits(checkpoint):
    """The content of a checkpoint's tensors, by file."""
    found = {}
    for path in sorted(checkpoint.path.rglob("*")):
        if path.suffix == ".pt":
            found[path.name] = _tensors(torch.load(path, weights_only=False))
        elif path.suffix == ".distcp":
            found[path.name] = path.read_bytes()
    return found


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {str(key): _tensors(inner) for key, inner in value.items()}
    return [_tensors(inner) for inner in value] if isinstance(value, (list, tuple)) else None


def trial(engine, run, place, peace, who, fault, label):
    """One fault in one run. Returns what came of it."""
    directory = place / "run"
    shutil.rmtree(directory, ignore_errors=True)
    run = with_timeout(run, SHORT) if fault.action == "stop" else run
    rescue = _ends_the_stopped(place) if fault.action == "stop" else contextlib.nullcontext()
    with rescue:
        codes = in_ranks(one_rank, place / "meeting", run, directory, who, fault, None)
    losses, damage, newest = outcome(directory, run)
    told = {"action": fault.action, "rank": who, "at": label, "after": fault.after, "codes": codes, "damage": damage}
    told["known"] = all(losses[step] == peace[0][step] for step in losses)
    starts = 1
    while newest is None or newest.step < run.training.iterations:
        if starts == 3:
            break
        again = in_ranks(one_rank, place / "meeting", with_timeout(run, LONG), directory, None, None, None)
        losses, _, newest = outcome(directory, run)
        starts += 1
        told["again"] = again
    told["losses"] = sorted(set(peace[0]) - set(losses), key=int)
    told["known"] = told["known"] and all(losses[step] == peace[0][step] for step in losses)
    told["same"] = newest is not None and bits(newest) == bits(peace[1])
    return {**told, "starts": starts}


@contextlib.contextmanager
def _ends_the_stopped(place):
    """Kill the rank that has stopped, once the other one has given it up: as torchrun or an operator would."""
    over = threading.Event()

    def watch():
        while not over.wait(0.05):
            children = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
            states = {pid: _state(pid) for pid in children}
            stopped = [pid for pid, state in states.items() if state == "T"]
            if stopped and all(state in "TZ" for state in states.values()):
                os.kill(stopped[0], signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "Z"


def main(engine, directory, seed, *actions):
    place, chance = Path(directory), random.Random(int(seed))
    place.mkdir(parents=True)
    for name in ("data", "other data"):
        texts = [place / f"{name} {number}.txt" for number in range(6)]
        for number, text in enumerate(texts):
            text.write_text(" ".join(f"{name[0]}{number}{count:x}" for count in range(200)))
        prepare(place / name, texts, kind="bytes", split=("0.5", "0.5", "0"), seed=3)
    run = settings_of(engine, place / "data")
    if engine != "light":
        module_of(engine)
    peace = place / "peace"
    codes = in_ranks(one_rank, place / "meeting", run, peace, None, None, place)
    if codes != [0, 0]:
        raise SystemExit(f"the run that was left alone ended with {codes}")
    losses, _, newest = outcome(peace, run)
    counted = [json.loads((place / f"events {rank}").read_text()) for rank in range(WORLD)]
    events, instants = zip(*counted, strict=True)
    report(0, {"events": events, "instants": [len(of_rank) for of_rank in instants], "steps": sorted(losses, key=int)})
    for wanted, _, count in (word.partition("=") for word in actions):
        action, _, at = wanted.partition("@")
        if action == "rules":
            report(0, {"rules": run_rules.outcomes(run, place)})
            continue
        for who, number, after, _ in sample(events, instants, (action,), int(count), chance, at):
            began = time.process_time()
            fault = Fault(number, bool(after), action)
            told = trial(engine, run, place, (losses, newest), who, fault, events[who][number])
            report(0, {**told, "seconds": time.process_time() - began})


if __name__ == "__main__":
    main(*sys.argv[1:])
