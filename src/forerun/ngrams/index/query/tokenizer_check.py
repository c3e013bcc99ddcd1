"""Checks that an index was built with the tokenizer of its queries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forerun.errors import ConfigError
from forerun.ngrams.index.build import encoders
from forerun.ngrams.index.build import manifest as store

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer
    from forerun.ngrams.index.query.engine import Index


def check_encoder(path: Path, manifest: store.Manifest, encoder: encoders.Encoder) -> None:
    """Raises ConfigError unless the index was built with a tokenizer of the same vocabulary.

    An index of ids, or of a function, accepts any tokenizer with enough ids.
    """
    built, top = manifest.tokenizer, max(shard.top for shard in manifest.shards)
    if encoder.fingerprint == built["fingerprint"]:
        return
    if not built["fingerprint"] and (encoder.size is None or top < encoder.size):
        return
    raise ConfigError(
        f"the index in {path} was built with tokenizer {built['name']!r} ({built['vocabulary']} "
        f"ids), not with {encoder.name!r} ({encoder.size} ids); use that tokenizer, or build a new "
        "index"
    )


def check_tokenizer(index: Index, tokenizer: Tokenizer | None) -> None:
    """Raises ConfigError if the index on disk was built with another vocabulary."""
    if index.manifest is None or tokenizer is None:
        return
    built = index.manifest.tokenizer
    if built["fingerprint"] and built["fingerprint"] != encoders.fingerprint(
        tokenizer.vocabulary()
    ):
        raise ConfigError(
            f"the index was built with tokenizer {built['name']!r} ({built['vocabulary']} ids), "
            f"not with the target's ({tokenizer.vocab_size} ids); build it with --tokenizer and "
            "the target's folder"
        )
