"""Text to token ids and back: bytes, a byte-level BPE trained on the corpus, or GPT-2's from files on this machine.

Nothing is ever downloaded. What a tokenizer needs is saved beside the data, so that it can be decoded later.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import MissingExtra
from ...extras import what_to_install
from ..integrity import checksum

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

END_OF_DOCUMENT = "<|endoftext|>"
SAVED_AS = "tokenizer.json"
_FILE_NAMES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))

#: OpenAI's files as tiktoken caches them: under the SHA-1 of the address, with the SHA-256 of what is inside.
_GPT2 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
_GPT2_ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"

#: Between a lone newline and a visible character GPT-2's pattern always begins a new word, so text may be cut there.
_CUT = re.compile(r"\S\n(?=\S)")
_PIECE = 1 << 16


class Tokenizer(Protocol):
    size: int
    """Ids are below it; the end of a document is one of them."""
    end_of_document: int

    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids of a text. They decode to it exactly, whatever it holds."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without ends of documents."""


class Bytes:
    """One token a byte of UTF-8."""

    size = 257
    end_of_document = 256

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.end_of_document).decode(errors="replace")


class BytePairs:
    """A byte-level BPE with GPT-2's pattern for words, by the tokenizers library."""

    def __init__(self, library: Library) -> None:
        vocabulary = library.get_vocab(with_added_tokens=False)
        missing = set(_library().pre_tokenizers.ByteLevel.alphabet()) - set(vocabulary)
        if missing:
            raise ValueError(
                f"the vocabulary lacks {len(missing)} of the 256 bytes, and text with them would be lost; "
                "use a byte-level one, like GPT-2's"
            )
        self._library = library
        # It is never made a special token of the library, for then a text that spells it out would contain it.
        self.end_of_document = vocabulary.get(END_OF_DOCUMENT, max(vocabulary.values()) + 1)
        self.size = max(*vocabulary.values(), self.end_of_document) + 1

    def encode(self, text: str) -> NDArray[np.int64]:
        encoded = self._library.encode_batch_fast(list(pieces(text)), add_special_tokens=False)
        return np.concatenate([np.array(piece.ids, dtype=np.int64) for piece in encoded])

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode([int(i) for i in ids if i != self.end_of_document], skip_special_tokens=False)

    def save(self, path: Path) -> None:
        self._library.save(str(path), pretty=False)


def pieces(text: str, size: int = _PIECE) -> Iterator[str]:
    """``text`` in pieces that encode to the same tokens as the whole: long texts take the library much memory."""
    start = 0
    while len(text) - start > size and (cut := _CUT.search(text, start + size)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def train(documents: Iterable[str], vocabulary: int) -> BytePairs:
    """A BPE of ``vocabulary`` tokens, the end of a document among them; fewer if the corpus has not so many.

    The same documents give the same one.
    """
    check_vocabulary(vocabulary)
    models, trainers = _library().models, _library().trainers
    library = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 1,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=_library().pre_tokenizers.ByteLevel.alphabet(),
    )
    library.train_from_iterator((piece for text in documents for piece in pieces(text)), trainer)
    return BytePairs(library)


def check_vocabulary(vocabulary: int) -> None:
    if not 257 <= vocabulary <= 2**31 - 1:
        raise ValueError(
            f"vocabulary={vocabulary} must lie between 257 (256 bytes and the end of a document) and 2**31 - 1"
        )


def from_files(vocabulary: Path, merges: Path) -> BytePairs:
    """The tokenizer of GPT-2's two files, whatever they are called.

    Raises:
        ValueError: one does not exist, or they are not what they should be.
    """
    for path, what in ((vocabulary, "vocabulary"), (merges, "merges")):
        if not path.is_file():
            raise ValueError(f"the tokenizer's {what} file {path} does not exist")
    try:
        model = _library().models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the library has no type of its own for it
        raise ValueError(f"{vocabulary} and {merges} are not a BPE's vocabulary and merges: {error}") from None
    return BytePairs(_byte_level(model))


def files_of(name: str) -> tuple[Path, Path]:
    """Where GPT-2's vocabulary and merges lie: in a directory of that name, or for "gpt2" in tiktoken's cache."""
    if name != "gpt2":
        directory = Path(name)
        for names in _FILE_NAMES:
            if all((directory / file).exists() for file in names):
                return directory / names[0], directory / names[1]
        return directory / _FILE_NAMES[0][0], directory / _FILE_NAMES[0][1]
    for cache in _tiktoken_caches():
        found = [cache / hashlib.sha1((_GPT2_ADDRESS + file).encode()).hexdigest() for file in _GPT2]
        if all(path.is_file() for path in found):
            for path, expected in zip(found, _GPT2.values(), strict=True):
                if checksum(path) != expected:
                    raise ValueError(f"{path}, from tiktoken's cache, is damaged; remove it and get it anew")
            return found[0], found[1]
    raise ValueError(
        "GPT-2's tokenizer is not in tiktoken's cache, and nothing is downloaded here. Where there is a network, "
        "either run python -c \"import tiktoken; tiktoken.get_encoding('gpt2')\" and keep its cache, or "
        f"get {' and '.join(_GPT2_ADDRESS + file for file in _GPT2)} into a directory and give --tokenizer DIRECTORY"
    )


def load(path: Path) -> BytePairs:
    """What :meth:`BytePairs.save` wrote."""
    try:
        return BytePairs(_library().Tokenizer.from_file(str(path)))
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"the tokenizer {path} cannot be read: {error}") from None


def _byte_level(model: Any) -> Library:
    tokenizers = _library()
    library: Library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    return library


def _tiktoken_caches() -> Iterator[Path]:
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if os.environ.get(variable):
            yield Path(os.environ[variable])
    yield Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tiktoken"
    yield Path(tempfile.gettempdir()) / "data-gym-cache"


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ModuleNotFoundError:
        raise MissingExtra(f"{what_to_install('tokenizers')}, or use --tokenizer bytes") from None
    return tokenizers
