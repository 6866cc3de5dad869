"""Train a tiny GPT under torchrun while a seeded adversary disturbs it, then compare it with a run left in peace.

    python scripts/chaos.py --minutes 30 --seed 1

For two thirds of the time (--steady) the number of ranks stays the same: every loss must have the bits of the
undisturbed run. For the last third it changes as well: losses must agree to --tolerance, relatively. The adversary

    kills one rank, all of them, or torchrun alone; stops a rank for a moment, or for longer than training.timeout;
    fills the disk (a small tmpfs, where mounting is allowed); sends SIGTERM to all; changes the number of ranks;
    flips a bit of the newest checkpoint, which the next start must refuse, and then does what the refusal says.

torchrun restarts what it can. If it ends, this program gives the same command again, as an operator would.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parents[1]
ENTRIES = {"deepspeed": ["-m", "alto_distributed"], "megatron": [str(REPO / "scripts" / "megatron_on_cpu.py")]}
#: Seconds without an answer after which ranks give one up, and what a start may take on a busy machine.
TIMEOUT, PATIENCE = 15, 300
SETTINGS = [
    *("training.precision=fp32", "training.iterations=1000000", "schedule.warmup=50", "evaluation.every=0"),
    *("evaluation.samples=32", "training.global_batch=16", "training.micro_batch=4", "logs.every=1"),
    *("logs.tensorboard=false", "checkpoints.keep=3", f"training.timeout={TIMEOUT}", "optimizer.lr=0.005"),
]
#: So many MiB for the disturbed run, of which checkpoints take about a third.
DISK = 64


class Job:
    """A run that is started again and again.

    Args:
        options: of the command line.
        into: the run's directory.
    """

    def __init__(self, options: argparse.Namespace, into: Path) -> None:
        self.options, self.into, self.ranks = options, into, options.ranks
        self.process: subprocess.Popen[str] | None = None
        self.log = options.into / f"{into.name}.log"
        self.starts = 0

    def start(self, *more: str, restarts: int = 1000) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        command += [f"--max-restarts={restarts}", "--monitor-interval=0.5", *ENTRIES[self.options.engine], "pretrain"]
        command += ["--config", "configs/gpt2-tiny.yaml", "--engine", self.options.engine, "--into", str(self.into)]
        command += [f"data.directory={self.options.into / 'tokens'}", f"checkpoints.every={self.options.every}"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPO)}
        variables.setdefault("TORCH_EXTENSIONS_DIR", str(REPO / ".cache" / "torch_extensions"))
        variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*command, *SETTINGS, *more], cwd=REPO, env=variables, stdout=log, stderr=log, text=True
            )
        self.starts += 1

    def checkpoints(self) -> list[Path]:
        found = (self.into / "checkpoints").glob("step-*")
        return sorted(path for path in found if re.fullmatch(r"step-\d{8}", path.name))

    def step(self) -> int:
        return int(self.checkpoints()[-1].name[5:]) if self.checkpoints() else 0

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def processes(self) -> dict[int, psutil.Process]:
        """By rank."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True) if self.process else ():
                with contextlib.suppress(psutil.Error, KeyError, ValueError):
                    found.setdefault(int(child.environ()["RANK"]), child)
        return found

    def signal_ranks(self, number: int, ranks: list[int] | None = None) -> None:
        for rank, process in self.processes().items():
            if ranks is None or rank in ranks:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)

    def end(self, number: int) -> None:
        """Signal torchrun and all ranks, and wait until they are gone."""
        there = list(self.processes().values())
        self.signal_ranks(number)
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
            self.process.wait(PATIENCE)
        psutil.wait_procs(there, timeout=PATIENCE)

    def wait_for_step(self, step: int) -> None:
        """Start again whenever it has ended, until there is a checkpoint of a later step."""
        deadline = time.monotonic() + PATIENCE
        while self.step() <= step:
            if not self.is_running():
                self.start()
            if time.monotonic() > deadline:
                raise SystemExit(f"chaos: no checkpoint after step {step} in {PATIENCE} s; see {self.log}")
            time.sleep(0.1)


class Adversary:
    """Does one thing at a time to a job, chosen by the seed."""

    def __init__(self, job: Job, chance: random.Random, disk: bool) -> None:
        self.job, self.chance, self.disk = job, chance, disk
        self.done: collections.Counter[str] = collections.Counter()
        self.unchanged: int | None = None
        """The step after which the number of ranks was another for the first time."""

    def act(self, may_change_ranks: bool) -> str:
        deeds = [self.kill_a_rank, self.kill_all, self.kill_torchrun, self.pause_a_rank, self.hang_a_rank]
        deeds += [self.terminate, self.corrupt] + [self.fill_the_disk] * (2 if self.disk else 0)
        deeds += [self.change_ranks] * (4 if may_change_ranks else 0)
        deed = self.chance.choice(deeds)
        deed()
        name = deed.__name__.replace("_", " ")
        self.done[name] += 1
        return name

    def _some_rank(self) -> list[int]:
        return [self.chance.randrange(self.job.ranks)]

    def kill_a_rank(self) -> None:
        self.job.signal_ranks(signal.SIGKILL, self._some_rank())

    def kill_all(self) -> None:
        self.job.end(signal.SIGKILL)

    def kill_torchrun(self) -> None:
        """The ranks save a checkpoint and end."""
        there = list(self.job.processes().values())
        if self.job.process:
            self.job.process.kill()
            self.job.process.wait()
        _, left = psutil.wait_procs(there, timeout=PATIENCE)
        if left:
            raise SystemExit(f"chaos: {left} outlived torchrun")

    def pause_a_rank(self) -> None:
        """Shorter than the timeout: nothing may come of it."""
        ranks = self._some_rank()
        self.job.signal_ranks(signal.SIGSTOP, ranks)
        time.sleep(TIMEOUT / 5)
        self.job.signal_ranks(signal.SIGCONT, ranks)

    def hang_a_rank(self) -> None:
        """Until somebody kills it: the others give up, and torchrun kills it 30 seconds later."""
        there = self.job.processes()
        rank = self._some_rank()[0]
        if self.job.ranks == 1 or rank not in there:
            return self.kill_a_rank()  # a world of one has nobody who would notice
        there[rank].send_signal(signal.SIGSTOP)
        psutil.wait_procs([there[rank]], timeout=PATIENCE)

    def terminate(self) -> None:
        self.job.end(signal.SIGTERM)

    def change_ranks(self) -> None:
        self.job.end(signal.SIGTERM)
        self.unchanged = self.job.step() if self.unchanged is None else self.unchanged
        self.job.ranks = self.chance.choice([n for n in (1, 2) if n != self.job.ranks])

    def fill_the_disk(self) -> None:
        """A save or two do not fit, and log lines are lost."""
        ballast = self.job.into / "ballast"
        with ballast.open("wb") as file, contextlib.suppress(OSError):
            while True:
                os.write(file.fileno(), bytes(4096))
        said = self.job.log.stat().st_size
        deadline = time.monotonic() + 20
        while b"NOT saved" not in self._said_since(said) and time.monotonic() < deadline and self.job.is_running():
            time.sleep(0.2)
        ballast.unlink()

    def _said_since(self, size: int) -> bytes:
        with self.job.log.open("rb") as file:
            file.seek(size)
            return file.read()

    def corrupt(self) -> None:
        """One bit of one file of the newest checkpoint. The message says what to do, and that is done."""
        self.job.end(signal.SIGKILL)
        newest = self.job.checkpoints()[-1]
        files = sorted(path for path in newest.rglob("*") if path.is_file() and "universal" not in path.parts)
        victim = self.chance.choice([path for path in files if path.stat().st_size])
        bit = self.chance.randrange(victim.stat().st_size * 8)
        with victim.open("r+b") as file:
            file.seek(bit // 8)
            byte = file.read(1)[0]
            file.seek(bit // 8)
            file.write(bytes([byte ^ (1 << bit % 8)]))
        said = self.job.log.stat().st_size
        self.job.start(restarts=0)
        code = self.job.process.wait(PATIENCE) if self.job.process else None
        told = self._said_since(said).decode(errors="replace")
        advice = re.search(r"mv (\S+) (\S+\.damaged)", told)
        if code == 0 or "is damaged and was not loaded" not in told or advice is None:
            raise SystemExit(f"chaos: bit {bit} of {victim} was flipped, and the run began all the same ({code})")
        subprocess.run(shlex.split(advice.group(0)), check=True, cwd=REPO)
        subprocess.run(["rm", "-rf", advice.group(2)], check=True)  # room on the small disk


def losses(into: Path) -> dict[int, float]:
    found = {}
    for line in (into / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            found[record["step"]] = record["loss"]
    return found


def disturbed(options: argparse.Namespace, job: Job, adversary: Adversary) -> int:
    """Train and disturb until the time is over. Returns the last step until which the number of ranks was the same."""
    began, end = time.monotonic(), options.minutes * 60
    while (passed := time.monotonic() - began) < end:
        job.wait_for_step(job.step())
        time.sleep(adversary.chance.random() * 4)
        before, ranks = job.step(), job.ranks
        if not job.is_running():
            job.start()
        deed = adversary.act(may_change_ranks=passed > end * options.steady)
        print(f"{passed:6.0f} s  step {before:6}  {ranks} ranks  {deed}", flush=True)
    job.wait_for_step(job.step())
    job.end(signal.SIGTERM)
    return job.step() if adversary.unchanged is None else adversary.unchanged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="of disturbance (default 30)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=ENTRIES, default="deepspeed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints (default 20)")
    parser.add_argument("--steady", type=float, default=2 / 3, help="share of the time without another number of ranks")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="after the number of ranks has changed")
    parser.add_argument("--into", type=Path, default=REPO / ".cache" / "chaos", help="a directory that is emptied")
    options = parser.parse_args()
    options.into = options.into.resolve()
    disk = options.into / "disk"
    subprocess.run(["umount", "-l", str(disk)], check=False, capture_output=True)
    subprocess.run(["rm", "-rf", str(options.into)], check=True)
    disk.mkdir(parents=True)
    text = [str(path) for path in sorted((REPO / "docs").glob("*.md"))]
    prepare = [sys.executable, "-m", "alto_distributed", "prepare", *text, "--output", str(options.into / "tokens")]
    subprocess.run([*prepare, "--vocabulary", "512", "--split", "0.7,0.2,0.1", "--quiet"], check=True, cwd=REPO)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        compare(options, disk, mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(disk)], check=False)


def compare(options: argparse.Namespace, disk: Path, mounted: bool) -> None:
    job = Job(options, disk / "run")
    adversary = Adversary(job, random.Random(options.seed), mounted)
    if not mounted:
        print("the disk is not filled: mounting a tmpfs is not allowed here")
    try:
        unchanged = disturbed(options, job, adversary)
    finally:
        job.end(signal.SIGKILL)
    got, last = losses(job.into), job.step()
    peace = Job(options, options.into / "undisturbed")
    peace.start("--stop-at", str(last), restarts=0)
    if peace.process is None or peace.process.wait() != 0:
        raise SystemExit(f"chaos: the undisturbed run failed; see {peace.log}")
    expected = losses(peace.into)
    same = [step for step in got if step <= unchanged]
    unequal = [step for step in same if got[step] != expected[step]]
    gap = max((abs(got[step] / expected[step] - 1) for step in got), default=0.0)
    print(
        json.dumps(
            {
                "engine": options.engine,
                "seed": options.seed,
                "minutes": options.minutes,
                "steps": last,
                "starts by hand": job.starts,
                "faults": dict(sorted(adversary.done.items())),
                "steps compared bitwise": len(same),
                "steps that differ": len(unequal),
                "steps after the number of ranks changed": len([step for step in got if step > unchanged]),
                "largest relative difference there": gap,
                "records lost to the full disk": last - len(got),
                "first and last loss": [expected[1], expected[last]],
            },
            indent=1,
        )
    )
    if unequal or gap > options.tolerance or not same or last - len(got) > last // 2:
        raise SystemExit(f"chaos: the losses are not those of the undisturbed run: steps {unequal[:10]}, gap {gap:.1e}")


if __name__ == "__main__":
    main()
