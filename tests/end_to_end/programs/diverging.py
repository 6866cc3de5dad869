"""The command line with an engine that can take no third step; started by torchrun."""

import torch.distributed as dist

from alto_distributed.__main__ import main
from alto_distributed.errors import Diverged
from alto_distributed.pretrain import trainer
from tests.helpers.light_engine import LightEngine


class Diverging(LightEngine):
    def __init__(self, run):
        dist.init_process_group("gloo")
        super().__init__(run)
        self.steps = 0

    def train(self, micro_batches, lr):
        self.steps += 1
        if self.steps == 3:
            raise Diverged("gradients overflow: lower optimizer.lr")
        return super().train(micro_batches, lr)


if __name__ == "__main__":
    trainer.build = Diverging
    main()
