"""``python -m alto_distributed pretrain --engine ...`` with DEVICE=pretend, on the accelerator of helpers/pretend."""

import sys

from alto_distributed.__main__ import main
from tests.helpers import devices

if __name__ == "__main__":
    devices.install(sys.argv[sys.argv.index("--engine") + 1])
    main()
