"""Reads record batches of Parquet and Arrow files and of Hugging Face datasets, by pyarrow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, install_extra


def is_dataset(path: Path) -> bool:
    """Whether the folder is a Hugging Face dataset written by `save_to_disk`."""
    return path.is_dir() and any(
        (path / name).is_file() for name in ("dataset_dict.json", "state.json")
    )


def table_batches(path: Path) -> Iterator[tuple[Any, float]]:
    """Record batches of a Parquet or Arrow file, each with the share of the file read so far."""
    _arrow()
    if path.suffix == ".parquet":
        from pyarrow import parquet

        file = parquet.ParquetFile(path)
        count = max(1, file.num_row_groups)
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(row_groups=[group]):
                yield batch, (group + 1) / count
        return
    from pyarrow import ipc, memory_map

    with memory_map(str(path)) as source:
        for batch in ipc.open_stream(source):
            yield batch, source.tell() / max(1, source.size())


def dataset_batches(path: Path) -> Iterator[tuple[Any, float]]:
    """Record batches of all splits of a dataset folder, in file order."""
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        folders = [path / split for split in splits]
    else:
        folders = [path]
    files = []
    for folder in folders:
        state = json.loads((folder / "state.json").read_text())
        files += [folder / row["filename"] for row in state["_data_files"]]
    for i, file in enumerate(files):
        for batch, share in table_batches(file):
            yield batch, (i + share) / len(files)


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(
            f"Parquet files and datasets need the package pyarrow; {install_extra('index')}"
        ) from None
    return pyarrow
