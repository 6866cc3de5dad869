"""A rank that notes who it is, and that it was asked to end. torchrun ... orphan.py NOTES"""

import os
import signal
import sys
import time
from pathlib import Path

from alto_distributed.pretrain.runtime.launch_env import end_with_launcher

notes, rank = Path(sys.argv[1]), os.environ["RANK"]


def ended(*_):
    (notes / f"ended-{rank}").touch()
    sys.exit(0)


signal.signal(signal.SIGTERM, ended)
end_with_launcher()
(notes / f"began-{rank}").write_text(str(os.getpid()))
time.sleep(120)
