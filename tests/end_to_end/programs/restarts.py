"""A rank that kills itself in the first start of its job. torchrun ... restarts.py NOTES"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from alto_distributed.pretrain.runtime.rendezvous import rendezvous_again
from alto_distributed.sharding.shutdown import shutdown

notes = Path(sys.argv[1])
count = os.environ["TORCHELASTIC_RESTART_COUNT"]  # of this rank's agent
rendezvous_again(30)
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
ranks = torch.ones(1)
dist.all_reduce(ranks)
begun = len(list(notes.glob("killed-*")))
dist.barrier()
(notes / f"start-{begun}-rank-{dist.get_rank()}").write_text(count)
if begun == 0:
    if dist.get_rank() == 1:
        (notes / "killed-1").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # until torchrun ends it: its agent restarts it, and does not count that as a failure of its own
dist.all_reduce(ranks)
shutdown()
(notes / f"ended-{begun}-rank-{os.environ['RANK']}").write_text(str(ranks.item()))
