"""The peer's half of `benchmarks/index.py`, run by a Python that has the package infini-gram.

    PEER_PYTHON benchmarks/index_peer.py FOLDER QUERIES.json KIND THREADS

FOLDER holds `tokenized.0` and `offset.0` in the package's format. Builds the suffix array with the
package's own code unless it exists. Then times queries of one kind, one by one, with the package's
defaults: first on files that the system dropped from memory, then on cached ones. Prints one JSON
object with the answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from index_timing import cold_and_warm


def build(folder: Path, threads: int) -> float:
    """Seconds that the package takes for its suffix array."""
    from infini_gram import indexing

    args = argparse.Namespace(
        save_dir=str(folder),
        temp_dir=str(folder),
        worker_id=0,
        workers=1,
        shards=1,
        mem=2,
        cpus=threads,
        token_width=2,
    )
    start = perf_counter()
    with contextlib.redirect_stdout(sys.stderr), contextlib.chdir(os.getcwd()):
        indexing.build_sa(args)
    return perf_counter() - start


ASKS: dict[str, Any] = {
    "count": lambda engine, q: engine.count(input_ids=q)["count"],
    "ntd": lambda engine, q: engine.ntd(prompt_ids=q)["prompt_cnt"],
    "infgram_ntd": lambda engine, q: engine.infgram_ntd(prompt_ids=q)["suffix_len"],
}


def main() -> None:
    if len(sys.argv) != 5:
        print(__doc__.splitlines()[0])
        return
    folder, queries = Path(sys.argv[1]).resolve(), json.loads(Path(sys.argv[2]).read_text())
    name, threads = sys.argv[3], int(sys.argv[4])
    seconds = build(folder, threads)
    from infini_gram.engine import InfiniGramEngine

    def opened() -> Any:
        return partial(ASKS[name], InfiniGramEngine(index_dir=str(folder), eos_token_id=eos))

    eos = queries["eos"]
    found = cold_and_warm(name, opened, folder, queries)
    size = sum((folder / file).stat().st_size for file in ("tokenized.0", "table.0"))
    facts = {"version": version("infini-gram"), "sort_seconds": seconds, "bytes": size}
    print(json.dumps(facts | found))


if __name__ == "__main__":
    main()
