"""A peer as a contestant, with the same token ids, sampling, threads and dtype as local methods.

Prompts are tokenised and texts decoded here by the checkpoint's tokenizer. A dead worker is
restarted for the next prompt; the caller limits the restarts.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.bench.contestants import (
    CacheDemand,
    Outcome,
    PeerError,
    Setup,
    SkippedPeer,
    warm_up_sampling,
)
from forerun.bench.peers.catalog import PEERS, WORKERS, Name
from forerun.bench.peers.client import WorkerProcess
from forerun.bench.peers.install import DEFAULT_FOLDER, env_of, problem, python_of
from forerun.bench.peers.sizing import (
    DEFAULT_DEMAND,
    MemoryNeed,
    context_of,
    memory_need,
    num_cells,
    remember,
)
from forerun.bench.results import SampleRecord
from forerun.core.sampling import Sampling
from forerun.models.gguf_folder import linked_file

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer
    from forerun.tasks.base import Example

LOAD_TIMEOUT_S, RUN_TIMEOUT_S, HELLO_TIMEOUT_S = 1800.0, 900.0, 60.0  # loading may compile
SUPPORTED = (  # fields of Sampling that peers take
    *("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "stop_token_ids"),
    *("ignore_eos", "seed", "n", "logprobs"),
)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass
class SharedWorker:
    """A worker process and its users: modes of one peer may share a model."""

    key: tuple
    users: int = 0
    process: WorkerProcess | None = None
    loaded: set[str] = field(default_factory=set)  # modes
    resident: int = 0  # bytes after the last warm-up

    def alive(self, python: Path, worker: Path, threads: int, env: dict[str, str]) -> WorkerProcess:
        """The running worker, started if necessary. Raises PeerError."""
        if self.process is None or not self.process.is_alive:
            self.loaded.clear()
            self.process = WorkerProcess(python, worker, threads=threads, env=env)
        return self.process

    def leave(self) -> None:
        """Removes one user; the last one ends the process."""
        self.users -= 1
        if self.users == 0:
            _shared.pop(self.key, None)
            if self.process:
                self.process.close()


_shared: dict[tuple, SharedWorker] = {}


class PeerContestant:
    """One mode of a peer. Raises SkippedPeer if it cannot start, PeerError if it fails."""

    def __init__(self, parts: Name, name: str, setup: Setup) -> None:
        self.name, self.parts, self.setup = name, parts, setup
        self.kind = PEERS[parts.peer]
        self.python = python_of(self.folder, parts.peer)
        self.worker = WORKERS / f"{parts.peer}.py"
        self.tokens: list[list[int]] = []  # of the last run's samples
        self._starts = 0  # number of model loads
        self.demand = DEFAULT_DEMAND
        self.resident: int | None = None  # bytes of the process after the warm-up
        self._host: SharedWorker | None = None
        self._warmed: dict[str, Any] | None = None
        self._has_converted = False  # at its last start

    @property
    def host(self) -> tuple:
        """Key of its process; modes of some peers share one."""
        own = () if self.kind.shares_model else (self.parts.mode, *self.parts.options.items())
        setup = self.setup
        return self.python, self.worker, setup.model, setup.dtype, setup.device, own

    @property
    def is_batched(self) -> bool:
        return self.parts.batch

    def size_for(self, demand: CacheDemand) -> None:
        """Sets the size of its cache and the longest sequence."""
        self.demand = demand

    @property
    def need(self) -> MemoryNeed:
        """Estimated memory of its process. Raises SkippedPeer for an unsuitable draft."""
        return memory_need(
            self.parts.peer, self._models(), self._dtype(), self._num_cells(), self.folder
        )

    def memory_needed(self) -> int:
        """The estimate minus what its process holds; 0 for a model on a GPU."""
        if self.setup.device != "cpu":
            return 0
        shared = _shared.get(self.host)
        return max(0, self.need.total - (shared.resident if shared else 0))

    def memory_plan(self) -> dict[str, int]:
        """Requested, estimated and measured sizes for the manifest."""
        found = {
            "num_seqs": self.demand.num_seqs,
            "context": self._context(),
            "cache_bytes": self.need.cache,
            "estimate_bytes": self.need.total,
        }
        return found if self.resident is None else found | {"process_bytes": self.resident}

    @property
    def restarts(self) -> int:
        """Number of restarts."""
        return max(0, self._starts - 1)

    @property
    def folder(self) -> Path:
        """The folder of the environments."""
        return self.setup.environments or DEFAULT_FOLDER

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's."""
        from forerun.models.tokenizer import Tokenizer

        return Tokenizer.load(self.setup.model)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json."""
        return json.loads((Path(self.setup.model) / "config.json").read_text())

    def versions(self) -> dict[str, str]:
        """Versions of Python and packages; under "note" the remarks of the worker."""
        hello = self._process().request("hello", HELLO_TIMEOUT_S)
        notes = {"note": "; ".join(hello["notes"])} if hello["notes"] else {}
        return {"python": hello["python"], **hello["versions"], **notes}

    def start(self) -> None:
        """Starts the worker and loads the mode."""
        if linked := linked_file(Path(self.setup.model)):
            raise SkippedPeer(
                f"peers need a checkpoint folder, and {linked.name} is a GGUF file; use the "
                "original checkpoint"
            )
        mode = self.kind.mode(self.parts.mode)
        if reason := problem(self.folder, self.parts.peer, mode.extra):
            raise SkippedPeer(reason)
        if self.setup.device.partition(":")[0] not in self.kind.devices:
            raise SkippedPeer(
                f"it runs on {'/'.join(self.kind.devices)}, the model is on {self.setup.device}; "
                "use --device cpu"
            )
        if self._host is None:
            self._host = _shared.setdefault(self.host, SharedWorker(self.host))
            self._host.users += 1
        try:
            self._ready()
        except BaseException:
            self.close()
            raise

    def warm_up(self, example: Example, sampling: Sampling) -> None:
        """A short run with the batch size of the counted ones."""
        few = warm_up_sampling(sampling)
        few = replace(few, n=sampling.n) if self.parts.batch else few
        self._warmed = self._run_fields(example.prompt, few)
        answer = self._ready().request("warm_up", RUN_TIMEOUT_S, **self._warmed)
        self.resident = answer["memory"].get("process")
        if self._host:
            self._host.resident = self.resident or 0
        self._remember_base()

    def _remember_base(self) -> None:
        """Stores the memory of the libraries, if one mode is loaded and nothing was converted.

        After a conversion the whole checkpoint stays in the process.
        """
        if self._host is None or self._has_converted or len(self._host.loaded) > 1:
            return
        base = (self.resident or 0) - self.need.weights - self.need.cache
        if base > 0 and self.setup.device == "cpu":
            remember(self.folder, self.parts.peer, base)

    def run(self, example: Example, sampling: Sampling) -> Outcome:
        """Decodes one prompt sampling.n times; tokenising and detokenising are not timed."""
        answer = self._ready().request(
            "run", RUN_TIMEOUT_S, **self._run_fields(example.prompt, sampling)
        )
        self.tokens = [sample["tokens"] for sample in answer["samples"]]
        samples = [self._record(sample) for sample in answer["samples"]]
        return Outcome(answer["seconds"], samples, answer["prefill_seconds"], answer["memory"])

    def first_tokens(self, prompt: str | list[int], sampling: Sampling, n: int) -> list[int]:
        """The first token of n samples."""
        fields = self._run_fields(prompt, replace(sampling, n=n, min_new_tokens=0))
        return self._ready().request("first_tokens", RUN_TIMEOUT_S, **fields)["tokens"]

    def close(self) -> None:
        """Releases the worker; the last user ends it."""
        if self._host:
            self._host.leave()
            self._host = None

    def _process(self) -> WorkerProcess:
        if self._host is None:
            raise PeerError(f"{self.name} has not been started")
        env = env_of(self.folder, self.parts.peer)
        return self._host.alive(self.python, self.worker, self.setup.threads, env)

    @property
    def cache(self) -> Path:
        """The folder of converted and compiled models."""
        return (self.folder / "cache" / self.parts.peer).absolute()

    def _ready(self) -> WorkerProcess:
        """The worker with this mode loaded, warmed up again after a restart."""
        process = self._process()
        assert self._host
        if self.parts.mode not in self._host.loaded:
            process.request("load", LOAD_TIMEOUT_S, **self._load_fields())
            self._host.loaded.add(self.parts.mode)
            self._starts += 1
            if self._warmed:
                process.request("warm_up", RUN_TIMEOUT_S, **self._warmed)
        return process

    def _load_fields(self) -> dict[str, Any]:
        model, *draft = self._models()
        cache = self.cache / digest(model) if self.kind.converts else self.cache
        self._has_converted = self.kind.converts and not any(cache.glob("*"))
        cache.mkdir(parents=True, exist_ok=True)
        return {
            "mode": self.parts.mode,
            "model": str(model),
            "dtype": self._dtype(),
            "threads": self.setup.threads,
            "device": self.setup.device,
            "context": self._context(),
            "num_seqs": self.demand.num_seqs,
            "num_cells": self._num_cells(),
            "cache_bytes": self.need.cache,
            "cache": str(cache),
            "draft": str(draft[0]) if draft else None,
            "options": dict(self.parts.options),
        }

    def _models(self) -> list[Path]:
        """The checkpoint, and the draft of the mode if it has one."""
        model = Path(self.setup.model).absolute()
        needs_draft = self.kind.mode(self.parts.mode).needs_draft
        return [model, self._draft()] if needs_draft else [model]

    def _num_cells(self) -> int:
        return num_cells(self.kind, self.demand, self._context())

    def _dtype(self) -> str:
        """ "bfloat16", "float16" or "float32": as requested, or the checkpoint's own."""
        own = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        return DTYPES.get(self.setup.dtype, own)

    def _context(self) -> int:
        """Tokens of the longest sequence."""
        own = self.config.get("max_position_embeddings", 2048)
        return context_of(self.demand, min(self.setup.context or own, own))

    def _draft(self) -> Path:
        """The named draft, or the embedded one; its vocabulary must be that of the model."""
        from forerun.assets import embedded

        folder = Path(self.parts.draft or embedded("draft"))
        try:
            same = _vocabulary(folder) == _vocabulary(Path(self.setup.model))
        except (OSError, KeyError, ValueError) as error:
            raise SkippedPeer(f"no tokenizer.json to compare in {folder}") from error
        if not same:
            raise SkippedPeer(
                f"the draft in {folder} has a different vocabulary than the model; use "
                f"{self.parts.peer}:{self.parts.mode},draft=FOLDER"
            )
        return folder.absolute()

    def _run_fields(self, prompt: str | list[int], sampling: Sampling) -> dict[str, Any]:
        """Fields of a run request. Raises SkippedPeer for unsupported sampling options."""
        plain = Sampling()
        for name in Sampling.__dataclass_fields__:
            value = getattr(sampling, name)
            if name not in SUPPORTED and value != getattr(plain, name) and name != "min_new_tokens":
                raise SkippedPeer(f"peers do not support {name}={value!r}")
        if sampling.min_new_tokens > 1:
            raise SkippedPeer("peers do not support min_new_tokens")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        room = self._context() - len(ids)
        if room < 1:
            raise PeerError(f"{self.name}: {len(ids)} prompt tokens leave no room in the context")
        seed = secrets.randbits(31) if sampling.seed is None else sampling.seed
        ends = () if sampling.ignore_eos else self.tokenizer.eos_ids
        return {
            "mode": self.parts.mode,
            "prompt": ids,
            "batch": self.parts.batch,
            "options": dict(self.parts.options),
            "sampling": {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "max_new_tokens": min(sampling.max_new_tokens, room),
                "ends": [*dict.fromkeys([*ends, *sampling.stop_token_ids])],
                "seeds": [seed + k for k in range(sampling.n)],
            },
        }

    def _record(self, sample: dict[str, Any]) -> SampleRecord:
        tokens = sample["tokens"]
        return SampleRecord(
            tokens=len(tokens),
            passes=sample.get("passes"),
            drafted=sample.get("drafted"),
            accepted=sample.get("accepted"),
            per_position=sample.get("per_position", []),
            finish=sample["finish"],
            text=self.tokenizer.decode([t for t in tokens if t not in self.tokenizer.eos_ids]),
        )


def digest(folder: Path) -> str:
    """A hash of a checkpoint, weights included."""
    found = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        found.update(path.name.encode())
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]


def _vocabulary(folder: Path) -> Any:
    return json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
