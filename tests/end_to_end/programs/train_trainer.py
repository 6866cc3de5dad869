"""A user's Hugging Face script as they come: Trainer, or a loop of their own with Accelerate.

    torchrun --nproc-per-node 2 train_trainer.py --deepspeed ds.json --learning_rate 0.05 --weight_decay 1e-4
    accelerate launch --use_deepspeed --deepspeed_config_file ds.json train_trainer.py --own_loop ...

The model is a small GPT-2 with random weights, the data are made up: nothing is downloaded. Rank 0 prints one
line of JSON.
"""

import argparse
import json
import tempfile

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from alto_distributed import ALTO, param_groups

VOCABULARY, LENGTH, BATCH = 32, 16, 8


def build_model(make=GPT2LMHeadModel):
    torch.manual_seed(1234)
    small = dict(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    return make(GPT2Config(**small, bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def dataset(samples=1024):
    """A random token, and then each follows from the one before."""
    tokens = [torch.randint(0, VOCABULARY, (samples,), generator=torch.Generator().manual_seed(5))]
    while len(tokens) < LENGTH:
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    rows = torch.stack(tokens, 1)
    labels = rows.clone()
    labels[:, 0] = -100  # nothing predicts the first token; Trainer would count it as a label
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def report(engine, losses, **more):
    basic = engine.basic_optimizer
    content = {
        "losses": losses,
        "wrapper": type(engine.optimizer).__name__,
        "optimizer": type(basic).__name__,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in basic.param_groups],
        "world": engine.world_size,
        "clip": engine.gradient_clipping(),
        **more,
    }
    if engine.global_rank == 0:
        print("REPORT " + json.dumps(content), flush=True)


def with_trainer(args):
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory, deepspeed=args.deepspeed, learning_rate=args.learning_rate,
            weight_decay=args.weight_decay, per_device_train_batch_size=BATCH, max_steps=args.steps, logging_steps=1,
            lr_scheduler_type="constant", train_sampling_strategy="sequential", save_strategy="no", report_to="none",
        )  # fmt: skip
        # With stage 3, Transformers builds what it loads under deepspeed.zero.Init.
        model = build_model(AutoModelForCausalLM.from_config) if args.zero_init else build_model()
        seen = {"dimensions": sorted({p.ndim for p in model.parameters()})}
        given = (ALTO(param_groups(model)), None) if args.give_alto else (None, None)
        trainer = Trainer(model=model, args=arguments, train_dataset=dataset(), optimizers=given)
        trainer.train()
        if args.zero_init:
            readings = trainer.deepspeed.basic_optimizer.diagnostics()
            seen["ratios"] = {name: reading.trust_ratio for name, reading in readings.items()}
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        report(trainer.deepspeed, losses, **seen)


def with_accelerate(args):
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    # accelerate launch hands the JSON over by itself; under other launchers the plugin does.
    plugin = DeepSpeedPlugin(hf_ds_config=args.deepspeed) if args.deepspeed else None
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = build_model()
    optimizer = DummyOptim(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    batches = torch.utils.data.DataLoader(dataset(), batch_size=BATCH)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for _, batch in zip(range(args.steps), batches, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    report(model, losses)
    accelerator.end_training()


if __name__ == "__main__":
    from alto_distributed.sharding.shutdown import leave
    from tests.helpers.launcher import without_compiling

    without_compiling()
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="DeepSpeed's launcher gives it; nobody else")
    parser.add_argument("--deepspeed")
    parser.add_argument("--own_loop", action="store_true")
    parser.add_argument("--give_alto", action="store_true", help="as Trainer(optimizers=...)")
    parser.add_argument("--zero_init", action="store_true", help="the model is born sharded")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--weight_decay", type=float, required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        # Accelerate knows DeepSpeed's ranks on accelerators only; on CPU each takes itself for the only one and sees
        # all of the data. This is all that two CPU ranks need to be treated as two GPUs are.
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
    (with_accelerate if args.own_loop else with_trainer)(args)
    leave()
