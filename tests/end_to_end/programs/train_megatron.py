"""A user's training script as they come: it knows megatron-core, and not which optimizer it is told to use.

    torchrun --nproc-per-node 2 train_megatron.py --optimizer adam --steps 20

Data parallel, with the distributed optimizer. Rank 0 prints a line of JSON every step, and what trained at the end.
"""

import argparse
import json

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

VOCABULARY, LENGTH, SAMPLES = 17, 8, 16


def build_model():
    config = TransformerConfig(
        num_layers=1,
        hidden_size=24,
        num_attention_heads=3,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    model.broadcast_params()
    return model


def global_batch(step):
    """A random token, and then each follows from the one before, so there is something to learn."""
    tokens = [torch.randint(0, VOCABULARY, (SAMPLES,), generator=torch.Generator().manual_seed(step))]
    while len(tokens) < LENGTH + 1:
        tokens.append((3 * tokens[-1] + 1) % VOCABULARY)
    return torch.stack(tokens, 1)


def forward_step(batches, model):
    tokens = next(batches).chunk(dist.get_world_size())[dist.get_rank()]
    unseen = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    losses = model(tokens[:, :-1], torch.arange(LENGTH)[None], unseen, labels=tokens[:, 1:].contiguous())
    return losses, lambda losses: (losses.mean(), losses.detach().mean())


def mean_over_ranks(loss):
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def train(model, optimizer, steps):
    """The number and the loss of each step, once the optimizer has taken it."""
    batches = map(global_batch, range(steps))
    for step in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        (loss,) = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=[model],
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=SAMPLES // dist.get_world_size(),
            forward_only=False,
        )
        optimizer.step()
        yield step, mean_over_ranks(loss)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    model = build_model()
    config = OptimizerConfig(
        optimizer=args.optimizer, lr=args.lr, weight_decay=1e-4, use_distributed_optimizer=True, clip_grad=1.0
    )
    optimizer = get_megatron_optimizer(config, [model])

    for step, loss in train(model, optimizer, args.steps):
        if dist.get_rank() == 0:
            print(json.dumps({"step": step, "loss": loss}), flush=True)
    if dist.get_rank() == 0:
        (wrapper,) = optimizer.chained_optimizers
        elements = sum(param.numel() for group in wrapper.param_groups for param in group["params"])
        whole = sum(param.numel() for param in model.parameters())
        names = {"wrapper": type(wrapper).__name__, "optimizer": type(wrapper.optimizer).__name__}
        print(json.dumps({"world": dist.get_world_size(), "share": elements / whole, **names}), flush=True)


if __name__ == "__main__":
    from alto_distributed.sharding.shutdown import leave

    main()
    leave()
