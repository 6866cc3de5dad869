"""Text to token ids and back: bytes, a byte-level BPE trained on the corpus, or one from files on this machine.

Nothing is ever downloaded. What a tokenizer needs is saved beside the data, so that it can be decoded later.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import MissingExtra, one_line
from ...extras import what_to_install
from ..integrity import checksum

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

END_OF_DOCUMENT = "<|endoftext|>"
SAVED_AS = "tokenizer.json"
#: What tokenizers call the end of a document, in the order in which they are looked for.
_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
_FILE_NAMES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))

#: OpenAI's files as tiktoken caches them: under the SHA-1 of the address, with the SHA-256 of what is inside.
_GPT2 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
_GPT2_ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"

#: Between a lone newline and a visible character GPT-2's pattern always begins a new word, so text may be cut there.
_CUT = re.compile(r"\S\n(?=\S)")
_CANNOT_ENCODE = (
    "the tokenizer cannot encode a text (--tokenizer names another, such as one with a token for the unknown)"
)
_PIECE = 1 << 16
_AT_ONCE = 8  # pieces: the library keeps a hundred bytes for each of their tokens

#: Each merge that is trained goes through all words with its pair. Text has few that are longer than a line, so a few
#: of those are trained on; a file of a single word would take very long.
_LONG_WORD = re.compile(r"[^\W\d_]{100,}|\d{100,}|(?:[^\w\s]|_){100,}|\s{100,}")
_LONG_WORDS = 1 << 16  # characters in all


class Tokenizer(Protocol):
    size: int
    """Ids are below it; the end of a document is one of them."""
    end_of_document: int

    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids of a text. They decode to it exactly, whatever it holds."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without ends of documents."""

    def library(self) -> Library:
        """The same as a tokenizer of the tokenizers library, a new one each time."""


class Bytes:
    """One token a byte of UTF-8."""

    size = 257
    end_of_document = 256

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.end_of_document).decode(errors="replace")

    def library(self) -> Library:
        # The alphabet has a character for each byte: itself if it is visible in Latin-1, or else one from 256 on.
        visible = [b for b in range(256) if b in range(33, 127) or b in range(161, 173) or b in range(174, 256)]
        others = [b for b in range(256) if b not in visible]
        letters = {**{chr(b): b for b in visible}, **{chr(256 + n): b for n, b in enumerate(others)}}
        return _byte_level(_library().models.BPE(vocab=letters, merges=[]))


class _OfLibrary:
    """What the tokenizers below share: one of the tokenizers library inside."""

    _library: Library
    end_of_document: int

    def decode(self, ids: Sequence[int]) -> str:
        with _refused("the tokenizer cannot decode ids"):
            return self._library.decode([int(i) for i in ids if i != self.end_of_document], skip_special_tokens=False)

    def library(self) -> Library:
        copied: Library = _library().Tokenizer.from_str(self._library.to_str())
        return copied

    def save(self, path: Path) -> None:
        self._library.save(str(path), pretty=False)


class BytePairs(_OfLibrary):
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
        waiting, ids = pieces(text), [np.zeros(0, np.int64)]
        while some := list(itertools.islice(waiting, _AT_ONCE)):
            with _refused(_CANNOT_ENCODE):
                encoded = self._library.encode_batch_fast(some, add_special_tokens=False)
            ids += [np.array(piece.ids, dtype=np.int64) for piece in encoded]
        return np.concatenate(ids)


class Pretrained(_OfLibrary):
    """Any tokenizer of the tokenizers library, as it was saved. What it cannot express, its text loses.

    Args:
        library: of its file.
        end_of_document: the id that ends a document; None for the token that the tokenizer has for it, or a new one.
    """

    def __init__(self, library: Library, end_of_document: int | None = None) -> None:
        library.no_truncation()
        library.no_padding()
        # As the text that they are: one that spells them out must not contain them.
        library.encode_special_tokens = True
        known = library.get_vocab(with_added_tokens=True)
        if not known:
            raise ValueError("the tokenizer has no tokens")
        found = (known[token] for token in _ENDS if token in known)
        own = next(found, max(known.values()) + 1)
        self._library = library
        self.end_of_document = own if end_of_document is None else end_of_document
        self.size = max(*known.values(), self.end_of_document) + 1

    def encode(self, text: str) -> NDArray[np.int64]:
        with _refused(_CANNOT_ENCODE):
            encoded = self._library.encode(text, add_special_tokens=False)
        return np.array(encoded.ids, dtype=np.int64)


def pieces(text: str, size: int = _PIECE) -> Iterator[str]:
    """``text`` in pieces that encode to the same tokens as the whole: long texts take the library much memory."""
    start = 0
    while len(text) - start > size and (cut := _CUT.search(text, start + size)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def train(documents: Iterable[str], vocabulary: int) -> BytePairs:
    """A BPE of ``vocabulary`` tokens, the end of a document among them; fewer if the corpus has not so many.

    The same documents give the same one. Of words from 100 characters on it sees the first 65,536 characters.
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
    texts = _with_few_long_words(documents)
    # The library takes 256 of them into its memory at a time.
    library.train_from_iterator((piece for text in texts for piece in pieces(text, _PIECE >> 4)), trainer)
    return BytePairs(library)


def _with_few_long_words(documents: Iterable[str]) -> Iterator[str]:
    """The documents, but a space in place of each word from 100 characters on, once there have been enough of them."""
    room = _LONG_WORDS

    def kept(word: re.Match[str]) -> str:
        nonlocal room
        room -= len(word.group())
        return word.group() if room >= 0 else " "

    for text in documents:
        yield _LONG_WORD.sub(kept, text)


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
    with _refused(f"{vocabulary} and {merges} are not a BPE's vocabulary and merges"):
        model = _library().models.BPE.from_file(str(vocabulary), str(merges))
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
    return BytePairs(_read(path))


def pretrained(path: Path, end_of_document: int | None = None) -> Pretrained:
    """A tokenizer.json, with the end of a document that :class:`Pretrained` chooses, or a given one.

    Raises:
        ValueError: it cannot be read.
    """
    return Pretrained(_read(path), end_of_document)


def saved_in(name: str) -> Path | None:
    """The tokenizer.json that a name stands for: the file itself, or a directory with it and without GPT-2's files."""
    path = Path(name)
    if path.is_file():
        return path
    has_gpt2 = any(all((path / file).exists() for file in names) for names in _FILE_NAMES)
    return path / SAVED_AS if (path / SAVED_AS).is_file() and not has_gpt2 else None


def _read(path: Path) -> Library:
    with _refused(f"the tokenizer {path} cannot be read"):
        library: Library = _library().Tokenizer.from_file(str(path))
    return library


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    """An answer of the library in one line: it has no type of its own for it, and its panics are no Exceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MissingExtra):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {one_line(error)}") from None


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
