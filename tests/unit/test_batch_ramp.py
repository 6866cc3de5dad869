"""``training.batch_ramp``: sizes and positions of batches from the step alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alto_distributed.pretrain.batch_size import batch_size, samples_before
from alto_distributed.pretrain.cli import plan
from alto_distributed.pretrain.config import settings as config
from alto_distributed.pretrain.data.samples import Samples
from tests.helpers.launcher import REPO
from tests.helpers.pretrain_runs import prepare_bytes

TINY = str(REPO / "configs/gpt2-tiny.yaml")


def training(start, step, every, batch):
    ramp = f"{{start: {start}, step: {step}, every: {every}}}"
    return config.load(TINY, [f"training.batch_ramp={ramp}", f"training.global_batch={batch}"]).training


@given(st.integers(1, 50), st.integers(1, 30), st.integers(1, 7), st.integers(1, 100), st.integers(0, 200))
def test_the_samples_before_a_step_are_those_of_all_steps_before_it(start, step, every, more, at):
    chosen = training(start, step, every, start + more)
    sizes = [batch_size(chosen, earlier) for earlier in range(at + 1)]
    assert samples_before(chosen, at) == sum(sizes[:-1])
    assert sizes == sorted(sizes)
    assert set(sizes) <= {*range(start, start + more, step), start + more}
    assert all(size == start for size in sizes[:every])


def test_without_a_ramp_all_steps_are_alike():
    chosen = config.load(TINY).training
    assert (batch_size(chosen, 7), samples_before(chosen, 7)) == (64, 448)


def test_no_sample_is_left_out_or_taken_twice(tmp_path):
    reader = Samples(prepare_bytes(tmp_path), "train", 64, 257, seed=5)
    chosen = training(4, 4, 3, 16)
    taken = [reader.batch_from(samples_before(chosen, step), batch_size(chosen, step), 4, 0, 1) for step in range(12)]
    got = torch.cat([micro for step in taken for micro in step])
    series = torch.cat(reader.batch_from(0, samples_before(chosen, 12), 1))
    assert np.array_equal(got, series)


@pytest.mark.parametrize(("words", "message"), [
    (["training.batch_ramp.start=16"], "the batch would never grow; set step"),
    (["training.batch_ramp.step=16"], "training.batch_ramp has no start"),
    (["training.batch_ramp={start: 64, step: 8, every: 2}"], "must be less than training.global_batch=64"),
    (["training.batch_ramp={start: 24, step: 16, every: 2}"],
     r"training.batch_ramp.start=24 is not a multiple .* = 16 x 1 = 16; the nearest that are: 16, 32"),
    (["training.batch_ramp={start: 16, step: 24, every: 2}"], "training.batch_ramp.step=24 is not a multiple"),
    (["training.batch_ramp.evry=2"], "no setting 'training.batch_ramp.evry'; did you mean 'every'"),
    (["training.global_batch={start: 8, every: 2, step: 8}"], "should be a whole number, .*training.batch_ramp={start"),
    (["training.batch_ramp.every=x"], "training.batch_ramp.every='x' should be a whole number"),
])  # fmt: skip
def test_a_wrong_ramp_is_refused(words, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        plan(config.load(TINY, words), 1, tmp_path)


def test_the_plan_tells_of_the_ramp(tmp_path):
    run = config.load(TINY, ["training.batch_ramp={start: 16, step: 48, every: 10}"])
    assert "200 steps; 16 at first, 48 more every 10 steps" in plan(run, 1, tmp_path)
