"""Checkpoints of the DeepSpeed engine meet damaged files, crafted files, full, read-only and separate disks."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess

import pytest
import torch
import torch.distributed as dist

from alto_distributed.deepspeed import only_data
from alto_distributed.deepspeed.checkpoint import ONLY_DATA
from alto_distributed.pretrain import trainer as loop
from alto_distributed.pretrain.checkpoint import manifest
from alto_distributed.pretrain.checkpoint.manager import Checkpoints
from tests.helpers import damage, skips
from tests.helpers.cases import worlds
from tests.helpers.pretrain_deepspeed import advance, assert_same, engine_of, run_of, weights

SHARD = "saved/zero_pp_rank_1_mp_rank_00_optim_states.pt"
OTHER = "saved/zero_pp_rank_0_mp_rank_00_optim_states.pt"
MODEL = "saved/mp_rank_00_model_states.pt"


@worlds(2)
def case_a_manifest_says_what_there_is(directory):
    run = run_of(2)
    with engine_of(run) as engine:
        checkpoints = Checkpoints(directory / "manifest", run)
        advance(engine, run, 0, 1)
        path = checkpoints.save(engine, 1)
    whole = manifest.read(path)
    there = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert there == {*whole.files, manifest.NAME}
    assert (whole.step, whole.world_size, whole.bytes > 0) == (1, 2, True)
    assert {"torch", "deepspeed", "alto-distributed"} <= set(whole.versions)
    assert {name: whole.files[name].rank for name in (SHARD, OTHER, MODEL)} == {SHARD: 1, OTHER: 0, MODEL: 0}
    states = {name.rpartition(".")[2] for name in whole.files[SHARD].states}
    assert {"exp_avg", "exp_avg_sq", "grad_ema"} <= states, states
    assert whole.files[MODEL].states["module.transformer.wte.weight"] == "float32[61, 24]"
    assert not manifest.problems(path, whole, whole.files)


@worlds(2)
def case_a_checkpoint_of_0_1_1_loads(directory):
    """It has the number of ranks in two files more, another function wrote its manifest, and it names no data."""
    run = run_of(2)
    with engine_of(run) as engine:
        checkpoints = Checkpoints(directory / "older", run, {"train.bin": "of this run"})
        advance(engine, run, 0, 1)
        path, before = checkpoints.save(engine, 1), weights(engine)
        assert "ranks" not in json.loads((path / "saved_by.json").read_text())
        assert json.loads((path / "run.json").read_text()).keys() == {"step", "settings", "data"}

        def make_older():
            for name, more in (("saved_by.json", {"ranks": 2}), ("run.json", {"world_size": 2})):
                content = {**json.loads((path / name).read_text()), **more}
                content.pop("data", None)
                (path / name).write_text(json.dumps(content, indent=2))
                damage.reseal(path, name)
            content = json.loads((path / manifest.NAME).read_text())
            with (path / manifest.NAME).open("w") as file:
                json.dump(content, file, indent=1)

        damage.once(make_older)
        advance(engine, run, 1, 2)
        checkpoints.load(engine, checkpoints.newest())
        assert_same("a checkpoint of 0.1.1", weights(engine), before)


@worlds(2)
def case_damaged_shards_are_named_and_refused(directory):
    run = run_of(2)
    with engine_of(run) as engine:
        checkpoints = Checkpoints(directory / "damaged", run)
        for step in (1, 2):
            advance(engine, run, step, step + 1)
            checkpoints.save(engine, step)
        before = weights(engine)
        advance(engine, run, 2, 3)
        checkpoints.load(engine, checkpoints.newest())
        assert_same("loaded", weights(engine), before)
        damage.damaged_are_refused(engine, checkpoints, SHARD, OTHER)


@worlds(2)
def case_crafted_files_are_refused_and_do_not_run(directory):
    run = run_of(2)
    with engine_of(run) as engine:
        checkpoints = Checkpoints(directory / "crafted", run)
        advance(engine, run, 0, 1)
        path = checkpoints.save(engine, 1)
        for name in (SHARD, MODEL):
            damage.code_is_not_run(engine, checkpoints, name, damage.poison_torch)
        # Even if nobody had looked before: DeepSpeed's torch.load(weights_only=False) is not let.
        trace = directory / "ran in DeepSpeed"
        damage.once(lambda: damage.poison_torch(path / MODEL, damage.Payload(trace)))
        with only_data(), pytest.raises(Exception, match="mkdir"):
            engine._engine.load_checkpoint(str(path), tag="saved")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ONLY_DATA, "1")  # where nobody can put a block around it
            with pytest.raises(Exception, match="mkdir"):
                engine._engine.load_checkpoint(str(path), tag="saved")
        assert not trace.exists()
        dist.barrier()
        # The payload is one: where code may run, it does.
        damage.once(lambda: torch.load(path / MODEL, weights_only=False))
        assert trace.exists()


@worlds(2)
def case_a_quota_on_one_rank_stops_all(directory):
    run = run_of(2)
    with engine_of(run) as engine:
        advance(engine, run, 0, 1)
        damage.a_quota_on_one_rank_stops_all(engine, run, directory / "quota")


@worlds(2)
def case_a_run_goes_on_without_a_checkpoint_but_does_not_end_without(directory):
    run, said = run_of(2), []

    class Log:
        say = staticmethod(said.append)

    with engine_of(run) as engine:
        advance(engine, run, 0, 1)
        checkpoints = Checkpoints(directory / "rule", run)
        assert loop._save(checkpoints, engine, 1, Log, must=True)
        with damage.files_no_larger_than(2000, [1]):
            assert not loop._save(checkpoints, engine, 2, Log, must=False)
            with pytest.raises(OSError, match="step-00000003 could not be written: rank 1: "):
                loop._save(checkpoints, engine, 3, Log, must=True)
        assert loop._save(checkpoints, engine, 4, Log, must=False)
    assert [line.partition(",")[0].partition(" /")[0] for line in said] == [
        *("step 1: saved", "step 2: NOT saved", "step 4: saved")
    ]


@worlds(2)
def case_a_full_and_a_read_only_disk(directory):
    """Real file systems: a tmpfs with room for one checkpoint and a half; the same, read-only."""
    run = run_of(2)
    with engine_of(run) as engine:
        advance(engine, run, 0, 1)
        size = manifest.read(Checkpoints(directory / "size", run).save(engine, 1)).bytes
        disk = directory / "disk"
        with damage.small_disk(disk, size * 3 // 2) as mounted:
            if not mounted:
                pytest.skip("mounting a small tmpfs is not allowed here; the quota above is as real")
            checkpoints = Checkpoints(disk / "checkpoints", run)
            first = checkpoints.save(engine, 1)
            # What is known to be too little is not begun; what was thought to be enough ends with ENOSPC.
            for known in (True, False):
                if not known:
                    checkpoints._need = lambda: 1
                said = damage.refused(OSError, lambda: checkpoints.save(engine, 2))
                assert ("has too little space" in said) == known, said
                assert f"{disk / 'checkpoints' / 'step-00000002'} could not be written" in said
                assert " MiB there, and " in said
                assert [path.name for path in first.parent.iterdir()] == [first.name]
                checkpoints.load(engine, checkpoints.newest())
            del checkpoints._need
            damage.once(lambda: subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True))
            for where in (checkpoints, Checkpoints(disk / "elsewhere", run)):
                said = damage.refused(OSError, lambda where=where: where.save(engine, 2))
                assert "Read-only file system" in said, said
                assert str(where.directory) in said
            checkpoints.load(engine, checkpoints.newest())
            damage.once(lambda: subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True))


@worlds(2)
def case_a_directory_that_ranks_do_not_share(directory):
    run = run_of(2)
    with engine_of(run) as engine:
        advance(engine, run, 0, 1)
        own = directory / f"node {dist.get_rank()}"
        said = None
        with pytest.raises(OSError, match="checkpoints must be on a file system that all ranks share") as caught:
            Checkpoints(own, run).save(engine, 1)
        said = str(caught.value)
        assert "rank 1 wrote " in said
        assert SHARD in said


@worlds(2)
def case_the_last_good_one_is_never_deleted(directory):
    """keep is 2, and a damaged checkpoint does not count."""
    run = run_of(2)
    assert run.checkpoints.keep == 2
    with engine_of(run) as engine:
        advance(engine, run, 0, 1)
        checkpoints = Checkpoints(directory / "kept", run)
        left = []
        for step in range(1, 6):
            path = checkpoints.save(engine, step)
            left.append([checkpoint.step for checkpoint in checkpoints.all()])
            dist.barrier()
            if step in (2, 3):
                damage.once(lambda path=path: os.truncate(path / SHARD, 10))
        assert left == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5]], left


@worlds(2)
def case_a_damaged_conversion_is_made_again(directory):
    """For another number of ranks a checkpoint is converted, and the result kept: damaged, it is not used."""
    run = run_of(2)
    with engine_of(run) as engine:
        checkpoints = Checkpoints(directory / "converted", run)
        advance(engine, run, 0, 1)
        folder = checkpoints.save(engine, 1)
        before = weights(engine)
        kept = folder / "universal" / "zero" / "transformer.wte.weight" / "fp32.pt"
        for flipped in (False, True):
            if flipped:
                whole = kept.read_bytes()
                damage.once(lambda: damage.flip(kept))
                assert kept.read_bytes() != whole
            advance(engine, run, 1, 2)
            engine.load(folder, 4)  # another number of ranks, as the manifest would say
            assert_same(f"converted, flipped {flipped}", weights(engine), before)


@worlds(2)
def case_a_checkpoint_copied_over_another_is_converted_itself(directory):
    """The conversion beside it is of the one that was there, and as whole as it was."""
    run = run_of(2)
    with engine_of(run) as engine:
        checkpoints = Checkpoints(directory / "copied over", run)
        advance(engine, run, 0, 1)
        first = checkpoints.save(engine, 1)
        engine.load(first, 4)
        advance(engine, run, 1, 2)
        second = checkpoints.save(engine, 2)
        newer = weights(engine)
        damage.once(lambda: shutil.copytree(second, first, dirs_exist_ok=True))
        assert (first / "universal").is_dir()
        advance(engine, run, 2, 3)
        engine.load(first, 4)
        assert_same("copied over", weights(engine), newer)


@worlds(2)
def case_a_run_does_not_go_on_with_other_data_unasked(directory):
    run, place = run_of(2), directory / "other data"
    trained_on = {"train.bin": "one", "tokenizer.json": "two"}
    with engine_of(run) as engine:
        advance(engine, run, 0, 1)
        checkpoints = Checkpoints(place, run, trained_on)
        path = checkpoints.save(engine, 1)
        before = weights(engine)
        for data in ({**trained_on, "train.bin": "three"}, {"train.bin": "one"}):
            advance(engine, run, 1, 2)
            others = Checkpoints(place, run, data)
            said = damage.refused(ValueError, lambda others=others: others.load(engine, others.newest()))
            name = next(name for name in trained_on if data.get(name) != trained_on[name])
            assert said.startswith(f"{path} was trained on other data than")
            assert f": {name} differ. Name the directory" in said
            assert "give --other-data" in said
            meant = Checkpoints(place, run, data, other_data=True)
            meant.load(engine, meant.newest())
            assert_same("other data, asked for", weights(engine), before)
        checkpoints.load(engine, checkpoints.newest())


@worlds(2)
def case_the_loop_skips_and_stops(directory):
    run = run_of(2, precision="bf16")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocabulary=skips.VOCABULARY))
    with contextlib.ExitStack() as stack:
        skips.skips_and_stops(
            run,
            lambda run: stack.enter_context(engine_of(run)),
            lambda engine: list(engine._engine.module.parameters())[-1],
            directory / "skips",
        )
