"""What training reads: documents as tokens, batches, mixtures, text files, tokenizers, problems."""

from typing import TYPE_CHECKING

from forerun.utils.renamed import renamed

if not TYPE_CHECKING:
    __getattr__ = renamed(
        __name__,
        **{
            name: f"training.data.documents.{name}"
            for name in ("Batches", "Documents", "Micro", "load_documents", "save_documents")
        },
    )
