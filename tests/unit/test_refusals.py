"""Bad input: each refusal says which value, what is allowed, or what to do instead."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from alto_distributed import ALTO, E, LogicalParameter, Segment, ShardLayout
from alto_distributed.hyperparameters import Hyperparameters


def weights():
    return [nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1e-3}, r"lr=-0.001 is out of range: it must be a finite number >= 0"),
        ({"lr": math.nan}, r"lr=nan is out of range"),
        ({"lr": math.inf}, r"lr=inf is out of range"),
        ({"lr": "0.01"}, r"lr='0.01' must be a finite number >= 0, not a str"),
        ({"lr": True}, r"lr=True must be"),
        ({"lr": torch.ones(2)}, r"Tensor lr must be 1-element, got shape \(2,\)"),
        ({"betas": (0.9,)}, r"must be three numbers .*or Adam's two, which are ALTO's \(beta2, beta3\)"),
        ({"betas": (0.9, 1.5)}, r"betas\[1\] \(beta3\)=1.5 is out of range"),
        ({"betas": 0.9}, r"must be three numbers"),
        ({"betas": (1.0, 0.9, 0.99)}, r"betas\[0\] \(beta1\)=1.0 is out of range: it must be a number in \[0, 1\)"),
        ({"betas": (0.99, -0.1, 0.99)}, r"betas\[1\] \(beta2\)=-0.1 is out of range"),
        ({"betas": (0.99, 0.9, math.nan)}, r"betas\[2\] \(beta3\)=nan is out of range"),
        ({"betas": "abc"}, r"must be three numbers"),
        ({"alpha": -100}, r"alpha=-100 is out of range: \|alpha\| must be below 1/\(1 - beta1\) = 100 for beta1=0.99"),
        ({"alpha": 1.5, "betas": [0.01, 0.9, 0.99]}, r"alpha=1.5 .* 1.0101"),
        ({"alpha": math.nan}, r"alpha=nan is out of range"),
        ({"alpha": None}, r"alpha=None must be a finite number, not a NoneType"),
        ({"eps": -1e-8}, r"eps \(eps1\)=-1e-08 is out of range"),
        ({"eps": (1e-6, 1e-6)}, r"must be one number \(eps1\) or three"),
        ({"eps": (1e-6, -1, 1e-10)}, r"eps\[1\] \(eps2\)=-1.0 is out of range"),
        ({"weight_decay": -0.1}, r"weight_decay=-0.1 is out of range: it must be a finite number >= 0"),
        ({"layerwise": "decay"}, r"layerwise='decay' is not one of .*did you mean 'decayed'\?"),
        ({"layerwise": None}, r"layerwise=None is not one of"),
        ({"bias_correction": 1}, r"bias_correction=1 must be True or False"),
        ({"kernel": "cuda"}, r"kernel='cuda' is not one of 'auto', 'torch', 'reference'"),
        ({"weight_deacy": 0.1}, r"'weight_deacy' is not a hyperparameter of ALTO; did you mean 'weight_decay'\?"),
        ({"beta": (0.9, 0.9, 0.9)}, r"did you mean 'betas'\?"),
        ({"layer_wise": "all"}, r"did you mean 'layerwise'\?"),
        ({"warmup": 1.0}, r"'warmup' is not a hyperparameter of ALTO .*it has: lr, betas"),
    ],
)  # fmt: skip
def test_hyperparameters(options, message):
    with pytest.raises(ValueError, match=message):
        ALTO(weights(), **options)
    group = {k: v for k, v in options.items() if k not in ("kernel", "warmup")}
    if group:
        with pytest.raises(ValueError, match=r"out of range|must|not one of|did you mean|tensor"):
            ALTO([{"params": weights(), **group}])


def test_an_unknown_name_is_also_pythons_own_error():
    with pytest.raises(TypeError, match="did you mean 'lr'"):
        ALTO(weights(), lrs=0.1)


def test_foreign_group_keys_pass():
    """Schedulers and frameworks keep their own keys in groups."""
    foreign = {"initial_lr": 1.0, "wd_mult": 0.0, "lr_mult": 1.0, "name": "x", "is_expert_parallel": False, "step": 3}
    ALTO([{"params": weights(), **foreign, "max_lr": 1.0, "min_lr": 0.0, "pre_wd_mult": 1.0, "default_config": True}])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"lr": 1, "alpha": -5, "betas": [0, 0.9, 0.99]}, None),
        ({"lr": 1, "alpha": -5, "betas": [0.99, 0.9, 0.99], "weight_decay": 1, "eps": 0}, (0.0, 1e-6, 1e-10)),
        ({"lr": np.float32(0.5), "alpha": np.int64(-5), "eps": [1e-8, 0, 0]}, (1e-8, 0.0, 0.0)),
    ],
)  # fmt: skip
def test_what_json_and_numpy_give_is_taken(given, kept):
    if kept is None:
        with pytest.raises(ValueError, match="alpha=-5"):
            Hyperparameters(**given)
        return
    group = ALTO(weights(), **given).param_groups[0]
    assert group["eps"] == kept
    assert type(group["lr"]) is float
    assert type(group["betas"]) is tuple


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": math.nan}, "lr=nan is out of range"),
        ({"alpha": -200.0}, "alpha=-200 is out of range"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"betas": (0.5, 0.9, 0.99)}, r"beta1 was changed from 0.99 to 0.5 in mid-run"),
    ],
)
def test_bad_changes_in_mid_run_touch_nothing(change, message):
    (p,) = params = weights()
    optimizer = ALTO(params)
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = [p.detach().clone(), *(v.clone() for v in optimizer.state[p].values())]
    optimizer.param_groups[0].update(change)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    for a, b in zip(before, [p, *optimizer.state[p].values()], strict=True):
        assert torch.equal(a, b)


def test_changing_beta1_is_refused_also_after_a_checkpoint():
    (p,) = params = weights()
    optimizer = ALTO(params)
    p.grad = torch.ones_like(p)
    optimizer.step()
    fresh = ALTO(params)
    fresh.load_state_dict(optimizer.state_dict())
    fresh.param_groups[0]["betas"] = (0.9, 0.9, 0.99)
    with pytest.raises(ValueError, match=r"beta1 was changed from 0.99 to 0.9 .*Keep betas\[0\]"):
        fresh.step()


def test_beta1_is_free_while_there_is_no_grad_ema():
    (p,) = params = weights()
    optimizer = ALTO(params, alpha=0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.5, 0.9, 0.99)
    optimizer.step()


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_sparse_gradients_touch_nothing(error):
    dense, embedding = nn.Parameter(torch.ones(2, 2)), nn.Embedding(5, 3, sparse=True)
    for optimizer in (ALTO([dense, embedding.weight]), E(torch.optim.SGD([dense, embedding.weight], 0.1))):
        embedding(torch.tensor([1])).sum().backward()
        dense.grad = torch.ones_like(dense)
        with pytest.raises(error, match="does not support sparse gradients.*sparse=False"):
            optimizer.step()
        assert torch.equal(dense, torch.ones(2, 2))


def test_complex_parameters():
    with pytest.raises(ValueError, match="complex"):
        ALTO([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    optimizer = ALTO(weights())
    with pytest.raises(ValueError, match="complex"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1
    p = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="complex"):
        E(torch.optim.SGD([p], 0.1)).step()


def test_what_torch_refuses_is_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        ALTO([])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        ALTO(torch.ones(2))
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="more than one parameter group"):
        ALTO([{"params": [p]}, {"params": [p]}])


class TestCheckpoints:
    def optimizer(self, shape=(2, 2), steps=2, **options):
        p = nn.Parameter(torch.ones(shape))
        optimizer = ALTO([p], **options)
        for _ in range(steps):
            p.grad = torch.ones(shape)
            optimizer.step()
        return optimizer

    def refused(self, state_dict, message, **options):
        optimizer = self.optimizer(steps=1, **options)
        (p,) = optimizer.param_groups[0]["params"]
        before = {k: v.clone() for k, v in optimizer.state[p].items()}
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state_dict)
        assert all(torch.equal(optimizer.state[p][k], v) for k, v in before.items())  # all or nothing

    @pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "grad_ema", "step"])
    def test_a_missing_state_is_named(self, key):
        state_dict = self.optimizer().state_dict()
        del state_dict["state"][0][key]
        self.refused(state_dict, f"the checkpoint has no '{key}' for parameter 0 of group 0; .*Save again")

    def test_lamb_needs_no_grad_ema(self):
        state_dict = self.optimizer(alpha=0).state_dict()
        optimizer = self.optimizer()
        optimizer.load_state_dict(state_dict)
        assert optimizer.param_groups[0]["alpha"] == 0  # hyperparameters come from the checkpoint

    def test_adams_checkpoint(self):
        p = nn.Parameter(torch.ones(2, 2))
        p.grad = torch.ones(2, 2)
        adam = torch.optim.Adam([p])
        adam.step()
        self.refused(adam.state_dict(), "has no 'alpha', 'layerwise', 'bias_correction': it was not saved by ALTO")

    def test_another_shape(self):
        self.refused(
            self.optimizer((4,)).state_dict(), r"'exp_avg' for parameter 0 .* \(4,\), the parameter has \(2, 2\)"
        )

    def test_other_groups(self):
        optimizer = self.optimizer()
        optimizer.add_param_group({"params": weights()})
        self.refused(optimizer.state_dict(), r"parameter groups of \[1, 1\] tensors, this optimizer has \[1\]")

    def test_hyperparameters_out_of_range(self):
        state_dict = self.optimizer().state_dict()
        state_dict["param_groups"][0]["alpha"] = 1e9
        self.refused(state_dict, "alpha=1e\\+09 is out of range")


class TestE:
    def test_hyperparameters(self):
        for options, message in (
            ({"alpha": -100}, r"alpha=-100 is out of range: \|alpha\| must be below 1/\(1 - beta1\) = 100"),
            ({"beta1": 1.0}, r"beta1=1.0 is out of range"),
            ({"alpha": "x"}, r"alpha='x' must be a finite number"),
        ):
            with pytest.raises(ValueError, match=message):
                E(torch.optim.SGD(weights(), 0.1), **options)

    def test_what_cannot_be_adapted(self):
        with pytest.raises(ValueError, match=r"adapts a torch.optim.Optimizer, got a list"):
            E(weights())
        with pytest.raises(ValueError, match="E of E"):
            E(E(torch.optim.SGD(weights(), 0.1)))
        with pytest.raises(ValueError, match="ALTO with alpha != 0 is E of LAMB already"):
            E(ALTO(weights()))

    def test_changing_beta1(self):
        (p,) = params = weights()
        optimizer = E(torch.optim.SGD(params, 0.1))
        p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.param_groups[0]["e_beta1"] = 0.5
        with pytest.raises(ValueError, match=r"e_beta1 was changed from 0.99 to 0.5 in mid-run"):
            optimizer.step()

    def test_checkpoints(self):
        (p,) = params = weights()
        p.grad = torch.ones_like(p)
        adam = torch.optim.Adam(params)
        adam.step()
        optimizer = E(torch.optim.Adam(params))
        with pytest.raises(ValueError, match="saved without E. Load it into the base optimizer first"):
            optimizer.load_state_dict(adam.state_dict())
        optimizer.step()
        state_dict = optimizer.state_dict()
        del state_dict["state"][0]["grad_ema"]
        with pytest.raises(ValueError, match="has no 'grad_ema' for parameter 0 of group 0"):
            optimizer.load_state_dict(state_dict)


class TestLayouts:
    w = LogicalParameter("w", (3,))
    b = LogicalParameter("b", (2,))

    def test_overlap_and_overrun(self):
        with pytest.raises(ValueError, match=r"'b' at \[2, 4\) overlaps 'w' that ends at 3"):
            ShardLayout(5, [Segment(self.w, 0, 3), Segment(self.b, 2, 2)])
        with pytest.raises(ValueError, match="ends at 5, beyond the tensor"):
            ShardLayout(4, [Segment(self.w, 0, 3), Segment(self.b, 3, 2)])
        with pytest.raises(ValueError, match="overlaps the start"):
            ShardLayout(4, [Segment(self.w, -1, 3)])

    def test_a_layout_of_another_length(self):
        optimizer = ALTO(weights())
        (p,) = optimizer.param_groups[0]["params"]
        with pytest.raises(ValueError, match="of another length than its tensor of 4 elements"):
            optimizer.set_layouts({p: ShardLayout.whole(self.w, 3)})

    def test_a_tensor_without_one_order(self):
        p = torch.ones(2, 3).t()
        optimizer = ALTO([{"params": []}])
        with pytest.raises(ValueError, match="not contiguous"):
            optimizer.set_layouts({p: ShardLayout(6, [Segment(self.w, 0, 3)])})
        optimizer.set_layouts({p: ShardLayout.whole(LogicalParameter("m", (3, 2)), 6)})  # here order is immaterial

    def test_layouts_that_disagree(self):
        p, q = (nn.Parameter(torch.ones(2)) for _ in range(2))
        p.grad = q.grad = torch.ones(2)
        optimizer = ALTO([p, q])
        one, other = LogicalParameter("w", (4,)), LogicalParameter("w", (2, 2))
        optimizer.set_layouts({p: ShardLayout.whole(one, 2), q: ShardLayout.whole(other, 2)})
        with pytest.raises(ValueError, match="two layouts disagree on the parameter 'w'"):
            optimizer.step()


def test_a_gradient_of_another_shape():
    """torch checks on assignment; engines that set .grad on flat shards through .data can get around that."""
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    p.data = torch.ones(6)
    with pytest.raises(ValueError, match=r"a gradient of shape \(4,\) for a parameter of \(6,\)"):
        ALTO([p]).step()


def test_fsdp1_is_refused_and_pointed_to_fsdp2(tmp_path):
    """FSDP1's shards are slices of a flat buffer that look like whole parameters: the ratio would be wrong."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(nn.Linear(3, 3), device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = ALTO(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(ValueError, match=r"FSDP1.*fully_shard"):
            optimizer.step()
    finally:
        dist.destroy_process_group()


def test_a_kernel_for_other_devices_is_refused_before_anything_changes():
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimizer = ALTO([parameter], kernel="triton")
    with pytest.raises(ValueError, match=r'kernel="triton" cannot serve tensors on cpu: .*use kernel="auto"'):
        optimizer.step()
    assert not optimizer.state
    assert torch.equal(parameter, torch.ones(2, 2))
