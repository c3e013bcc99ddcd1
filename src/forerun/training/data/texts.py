"""Text files as training documents: pieces of equal length, the end of each file held out."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from forerun.errors import DataError

from .documents import Documents

KINDS = ".txt", ".txt.gz", ".tar.gz"  # archives hold files of source code


@dataclass(frozen=True)
class Texts:
    """The text files of a folder; each is a domain, named like the file.

    length: of a piece, in tokens. held_out: share that is not trained on, at the end of a text; of
    an archive whole texts.
    """

    folder: Path
    length: int
    held_out: float = 0.05

    def domains(self) -> dict[str, list[str]]:
        """The texts of each file: one, or those in an archive. Raises DataError."""
        found = {}
        for path in sorted(self.folder.glob("*")):
            kind = next((kind for kind in KINDS if path.name.endswith(kind)), None)
            if kind and (texts := _read(path, kind)):
                found[path.name.removesuffix(kind)] = texts
        if not found:
            raise DataError(
                f"{self.folder} has no text in files {', '.join(KINDS)}; give a folder with some"
            )
        return found

    def trained(self) -> Iterator[str]:
        """The parts of all texts that are trained on."""
        for texts in self.domains().values():
            yield from (part[0] for part in self._cut(texts))

    def pieces(self, tokenizer: PreTrainedTokenizerFast) -> tuple[Documents, dict[str, Documents]]:
        """The pieces to train on, and the held-out pieces of each domain."""
        trained, held_out = [], {}
        for name, texts in self.domains().items():
            train, rest = zip(*self._cut(texts), strict=True)
            trained += self._tokenise(tokenizer, train)
            held_out[name] = Documents.of(self._tokenise(tokenizer, rest))
        return Documents.of(trained), held_out

    def _cut(self, texts: list[str]) -> list[tuple[str, str]]:
        """(Trained part, held-out part) of each text; of an archive, one text in 1 / held_out."""
        if len(texts) == 1:
            at = texts[0].rfind("\n", 0, int((1 - self.held_out) * len(texts[0]))) + 1
            return [(texts[0][:at], texts[0][at:])]
        every = round(1 / self.held_out)
        return [("", t) if i % every == every - 1 else (t, "") for i, t in enumerate(texts)]

    def _tokenise(
        self, tokenizer: PreTrainedTokenizerFast, texts: tuple[str, ...]
    ) -> list[tuple[list[int], int]]:
        """(Ids, no prompt) of the pieces of texts; a text ends in an end token."""
        found = []
        for text in tokenizer.backend_tokenizer.encode_batch([text for text in texts if text]):
            ids = [*text.ids, tokenizer.eos_token_id]
            found += [(ids[i : i + self.length], 0) for i in range(0, len(ids), self.length)]
        return found


def _read(path: Path, kind: str) -> list[str]:
    try:
        if kind == ".tar.gz":
            with tarfile.open(path) as archive:
                files = sorted((m for m in archive if m.isfile()), key=lambda m: m.name)
                found = [archive.extractfile(file).read() for file in files]  # type: ignore[union-attr]
        else:
            data = path.read_bytes()
            found = [gzip.decompress(data) if kind.endswith(".gz") else data]
        return [text for each in found if (text := _book(each.decode("utf-8-sig"))).strip()]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, tarfile.TarError) as error:
        raise DataError(f"{path} cannot be read as text ({error}); repair or remove it") from error


def _book(text: str) -> str:
    """A text without the header and licence of Project Gutenberg, and with plain line breaks."""
    text = text.replace("\r\n", "\n")
    lines = text.split("\n")
    marks = [i for i, line in enumerate(lines) if line.startswith("*** ")]
    starts = [i for i in marks if lines[i].startswith("*** START OF")]
    ends = [i for i in marks if lines[i].startswith("*** END OF")]
    first, last = starts[-1] + 1 if starts else 0, ends[0] if ends else len(lines)
    return "\n".join(lines[first:last]).strip("\n") + "\n"
