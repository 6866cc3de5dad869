"""Text to tokens, once (:mod:`.prepare`), and tokens to batches, at every step (:mod:`.samples`).

Reading needs numpy and torch alone; writing needs tokenizers and tqdm besides.
"""

from .samples import Samples

__all__ = ["Samples"]
