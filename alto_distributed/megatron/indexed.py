"""Token files in Megatron's indexed format, written by Megatron's own builder.

Reading them takes no Megatron: see :mod:`alto_distributed.pretrain.data.files`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron.core
import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from numpy.typing import NDArray

VERSION = str(megatron.core.__version__)


class Writer:
    """Documents, one after the other, into ``prefix.bin`` and ``prefix.idx``.

    Args:
        prefix: the files' path without the ends of their names. What was there is overwritten.
        dtype: of a token on disk.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix = prefix
        self._limits = np.iinfo(dtype)
        self._builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype.type)
        self.documents = 0
        self.tokens = 0

    def add(self, document: NDArray[Any]) -> None:
        """Append a document.

        Raises:
            ValueError: a token does not fit into the dtype, or the document has more tokens than the index can count.
        """
        if document.size and not (document.min() >= 0 and document.max() <= self._limits.max):
            raise ValueError(  # the builder would wrap it around
                f"token {document.max()} does not fit into {self._limits.dtype}, which ends at {self._limits.max}"
            )
        if document.size > np.iinfo(np.int32).max:
            raise ValueError(f"a document has {document.size} tokens, and the format ends at 2**31 - 1; cut it up")
        self._builder.add_document(document, [document.size])
        self.documents += 1
        self.tokens += int(document.size)

    def close(self) -> None:
        """Write the index. Without it, the files are not readable."""
        self._builder.finalize(f"{self._prefix}.idx")
