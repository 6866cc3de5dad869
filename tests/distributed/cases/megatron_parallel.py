"""Megatron's pipelines, experts and context parallelism, held to training by one rank with whole parameters."""

import torch
import torch.distributed as dist

from tests.helpers.cases import each, some, worlds
from tests.helpers.megatron_gpt import (
    Job,
    Layout,
    Megatron,
    alto_config,
    check_norms,
    check_parity,
    parallel,
    parallel_state,
)

# -- pipelines -----------------------------------------------------------------------------------------


def both_copies_are_equal(engine):
    """The tied embedding is on the first and on the last stage: the same bits after training."""
    weights = dict(engine.named_parameters())["embedding.word_embeddings.weight"].detach()
    group = parallel_state.get_embedding_group()
    copies = [torch.empty_like(weights) for _ in range(group.size())]
    dist.all_gather(copies, weights.contiguous(), group=group)
    assert len(copies) == 2
    assert torch.equal(*copies)


@worlds(2, 4)
@some({"PP": True, "PP, replicated": False})
def case_pipeline_with_tied_embedding(label, setting):
    """On four ranks, each stage is data parallel."""
    check_parity(label, Job(), Layout(pipeline=2), distributed=setting, then=both_copies_are_equal)


PIPELINES = {
    "untied, scheduled": (Job(tied=False, scheduled=True), Layout(pipeline=2), {}),
    "virtual stages": (
        Job(layers=4),
        Layout(pipeline=2, virtual=2),
        {"overlap": True, "then": both_copies_are_equal},
    ),
}


@worlds(2)
@some(PIPELINES)
def case_pipeline_variants(label, setting):
    job, layout, options = setting
    check_parity(label, job, layout, **options)


@worlds(4)
def case_param_gather_overlaps_the_step_of_the_next_chunk():
    """Megatron then has an optimizer for each virtual stage. On fewer ranks no stage would be data parallel."""
    job = Job(layers=4, clip=0.0, steps=2)  # clip: the global norm would be summed in another order
    layout = Layout(pipeline=2, virtual=2)
    ends = []
    for overlapped in (False, True):
        config = alto_config(job, overlap_param_gather_with_optimizer_step=overlapped)
        with parallel(layout):
            engine = Megatron(job, layout, overlap=True, optimizer=config)
            engine.assert_straddles()
            assert all(wrapper.data_parallel_group.size() == 2 for wrapper in engine.wrappers)
            engine.train()
            assert len(engine.wrappers) == 1 + overlapped
            engine.synchronize()
            ends.append({name: p.detach().clone() for name, p in engine.named_parameters()})
    assert all(torch.equal(ends[1][name], weights) for name, weights in ends[0].items())


@worlds(4)
def case_pipeline_of_tensor_parallel_stages():
    check_parity("PP and TP", Job(), Layout(pipeline=2, tensor=2), then=both_copies_are_equal)


# -- context parallelism -------------------------------------------------------------------------------


@worlds(2, exhaustive=[4])
def case_context_parallel():
    """Context-parallel ranks shard the optimizer as data-parallel ones do, so norms run over both."""

    def shards_lie_over_all(engine):
        assert engine.wrappers[0].data_parallel_group.size() == dist.get_world_size()

    check_parity("CP", Job(), Layout(context=2), then=shards_lie_over_all)


@worlds(exhaustive=[4])
def case_context_and_tensor_parallel():
    check_parity("CP and TP", Job(), Layout(context=2, tensor=2))


# -- experts -------------------------------------------------------------------------------------------

EXPERTS = Job(experts=4)
# Without these the experts' buffer would be cut between two parameters.
SOME_EXPERTS_FROZEN = Job(experts=4, trained=r"^(?!decoder.layers.1.mlp.experts.local_experts.[02].linear_fc2)")


def experts_are_apart(engine):
    """Dense and expert parameters have optimizers of their own, over groups of their own."""
    dense, experts = engine.wrappers
    assert not any(group["is_expert_parallel"] for group in dense.optimizer.param_groups)
    assert all(group["is_expert_parallel"] for group in experts.optimizer.param_groups)


ON_TWO_RANKS = {
    "EP": (EXPERTS, Layout(expert=2), {"then": experts_are_apart}),
    "EP, replicated": (EXPERTS, Layout(expert=2), {"distributed": False, "then": experts_are_apart}),
    "nothing but experts is trained": (Job(experts=4, trained="local_experts"), Layout(expert=2), {}),
    "whole experts, cut weights": (EXPERTS, Layout(tensor=2, sequence_parallel=True), {}),
}


@worlds(2)
@some(ON_TWO_RANKS)
def case_experts(label, setting):
    job, layout, options = setting
    check_parity(label, job, layout, **options)


@worlds(4)
def case_experts_over_data_parallel_ranks():
    """Each expert is on two ranks, which share its optimizer state; the dense parameters' is shared by four."""

    def groups_differ_in_size(engine):
        experts_are_apart(engine)
        assert [wrapper.data_parallel_group.size() for wrapper in engine.wrappers] == [4, 2]

    check_parity("EP", SOME_EXPERTS_FROZEN, Layout(expert=2), then=groups_differ_in_size)


WITH_TENSOR_PARALLEL = {
    "TP2, EP2, ETP2": (EXPERTS, Layout(tensor=2, expert=2, expert_tensor=2, sequence_parallel=True)),
    "TP1, EP2, ETP2": (EXPERTS, Layout(expert=2, expert_tensor=2)),
    "TP2, EP2, ETP1": (SOME_EXPERTS_FROZEN, Layout(tensor=2, expert=2, expert_tensor=1, sequence_parallel=True)),
}


@worlds(exhaustive=[4])
@each(WITH_TENSOR_PARALLEL)
def case_experts_with_tensor_parallel_ranks_of_their_own(label, setting):
    """The experts' tensor-parallel group is not that of the dense parameters, in either direction."""
    check_parity(label, *setting)


NORMS = {
    "EP2": Layout(expert=2),
    "TP2, EP2, ETP1": Layout(tensor=2, expert=2, expert_tensor=1, sequence_parallel=True),
}


@worlds(4)
@each(NORMS)
def case_no_expert_is_summed_with_another(setting):
    """Experts of different ranks share names there, and must not share norms; nor are replicas summed."""
    check_norms(EXPERTS, setting)


MODERN = Job(layers=1, experts=4, modern_router=True, steps=4)


@worlds(2, exhaustive=[4])
def case_a_shared_expert_and_a_router_with_bias():
    shared_expert_over(2)


@worlds(exhaustive=[4])
def case_a_shared_expert_beside_one_expert_a_rank():
    shared_expert_over(4)


def shared_expert_over(size):
    """As without expert parallelism: each expert has its ratio, wherever it is."""
    with parallel(Layout()):
        engine = Megatron(MODERN, Layout()).train()
        expected = {name: p.detach().clone() for name, p in engine.named_parameters()}
        bias = router_bias(engine)
    assert any("shared_experts" in name for name in expected)
    layout = Layout(expert=size)
    with parallel(layout):
        engine = Megatron(MODERN, layout).train()
        experts_are_apart(engine)
        assert torch.equal(router_bias(engine), bias)
        assert bias.any()  # it has moved
        for name, p in engine.named_parameters():
            gap = (p.detach() - expected[name]).abs().max() / expected[name].abs().max()
            assert gap <= 1e-6, (name, gap)


def router_bias(engine):
    (found,) = [module.expert_bias for module in engine.chunks[0].modules() if hasattr(module, "expert_bias")]
    return found.detach().clone()
