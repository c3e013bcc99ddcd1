"""Inflates a small llama checkpoint to 30M up to 8B weights with unchanged outputs.

An inflated model gives the answers of the small one at the cost of its new size, for realistic
timing; results on it are labelled. `padding.py` explains the added weights.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.assets import MODELS, embedded
from forerun.bench.padding import LAYER, SIZES, Padding, Part, Shape, grown, shape_of, tensors
from forerun.errors import CapacityError, ConfigError, DataError, ModelError, UnknownName
from forerun.models.draft_link import companion, name_companion
from forerun.models.families import Unsupported
from forerun.models.gguf_folder import linked_file
from forerun.models.load import DTYPES
from forerun.models.paths import located, model_folder
from forerun.models.shards import owners, shard_files

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
MARK = "inflated_from"  # in config.json
SHARD_BYTES = 1 << 29  # writing one takes about three times as much memory
Item = tuple[str, Part, bool]
TOKENIZER_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")


@dataclass(frozen=True)
class Inflated:
    """The written checkpoint."""

    folder: Path
    shape: Shape
    num_bytes: int
    seconds: float


def inflate(
    source: str | Path,
    target: str | Path,
    size: str,
    *,
    dtype: str = "bf16",
    seed: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Inflated:
    """Writes the inflated checkpoint of a folder, a hub id or "reasoner" atomically.

    report: called with the bytes written and their total. Raises UnknownName for a size, ModelError
    for a source that cannot be padded, CapacityError without disk space, ConfigError if `target`
    exists, DataError if it cannot be created or another process writes it.
    """
    start = time.perf_counter()
    if size.upper() not in SIZES:
        raise UnknownName(f"unknown size {size!r}; known: {', '.join(SIZES)}")
    if dtype not in DTYPES:
        raise UnknownName.of("dtype", dtype, DTYPES)
    folder = model_folder(located(str(source)))
    config, draft = _read_config(folder), _companion(folder)
    small = shape_of(config)
    pad = Padding(small, grown(small, size.upper()), DTYPES[dtype], seed)
    target = Path(target).expanduser()
    _check_room(target, pad.num_bytes)
    with _temporary_folder(target) as part:
        with ExitStack() as stack:
            _write_shards(part, pad, Weights(folder, stack), report)
        name = str(source) if located(str(source)) != str(source) else folder.name
        origin = _origin(config) or {"name": name, **asdict(small)}
        (part / "config.json").write_text(json.dumps(grown_config(config, pad, origin), indent=2))
        for file in sorted(folder.iterdir()):
            is_own = file.name == "config.json" or file.name.endswith(".index.json")
            if file.is_file() and file.suffix in TOKENIZER_SUFFIXES and not is_own:
                shutil.copyfile(file, part / file.name)
        if draft:
            name_companion(part, draft)
    written = sum(f.stat().st_size for f in target.iterdir())
    return Inflated(target, pad.big, written, time.perf_counter() - start)


def _origin(config: dict[str, Any]) -> dict[str, Any] | None:
    """The recorded source of an inflated model; None for an ordinary one."""
    found = config.get(MARK)
    sizes = Shape.__dataclass_fields__
    if not isinstance(found, dict) or found.keys() != {"name", *sizes}:
        return None
    return found if all(isinstance(found[name], int) for name in sizes) else None


def _companion(folder: Path) -> str | None:
    """The draft model that a model names, by a path valid in other folders."""
    draft = companion(folder)
    if draft is None:
        return None
    return next((name for name in MODELS if Path(embedded(name)) == draft), str(draft.resolve()))


def inflated_from(folder: Path) -> dict[str, Any] | None:
    """Name and shape of the source of an inflated checkpoint; None for an ordinary one."""
    try:
        return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get(MARK)
    except (OSError, ValueError, AttributeError):
        return None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); is it a model folder?") from None
    if linked := linked_file(folder):
        raise ModelError(f"{linked} is a GGUF file; inflate a checkpoint folder")
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(f"{folder} is of type {kind!r}; only {', '.join(FAMILIES)} can be padded")
    if config.get("quantization_config"):
        raise ModelError(f"{folder} is quantised; give the original checkpoint")
    return config


class Weights:
    """Tensors of a checkpoint by name, read on access."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._where: dict[str, Any] = {}
        try:
            files = shard_files(folder)
            opened = {p: stack.enter_context(safe_open(p, framework="pt")) for p in files}
            self._where = {name: opened[path] for name, path in owners(files).items()}
        except Unsupported as error:
            raise ModelError(f"{folder}: {error}") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{folder} cannot be read ({error}); download or copy it again"
            ) from None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._where:
            raise ModelError(f"{self.folder} has no tensor {name}; is the checkpoint complete?")
        try:
            return self._where[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{name} in {self.folder} cannot be read ({error})") from None

    def layer_parts(self) -> tuple[Part, ...]:
        """The parts of a layer that are required or present."""
        first = "model.layers.0."
        return tuple(p for p in LAYER if not p.is_optional or first + p.name in self._where)


def _write_shards(
    part: Path, pad: Padding, weights: Weights, report: Callable[[int, int], None]
) -> None:
    """Writes safetensors shards one by one, and their index."""
    shards, total = _shards(pad, weights.layer_parts())
    places: dict[str, str] = {}
    done = 0
    report(done, total)
    for number, items in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        made = {key: pad.grow(key, p, weights[key] if old else None) for key, p, old in items}
        save_file(made, part / name, metadata={"format": "pt"})
        places |= dict.fromkeys(made, name)
        report(done := done + sum(tensor.nbytes for tensor in made.values()), total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shards(pad: Padding, layer: tuple[Part, ...]) -> tuple[list[list[Item]], int]:
    """The tensors of each shard, and the total bytes."""
    shards: list[list[Item]] = [[]]
    used = total = 0
    for item in tensors(pad.big, pad.small, layer):
        size = math.prod(pad.shape(item[1])) * pad.dtype.itemsize
        if shards[-1] and used + size > SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(item)
        used, total = used + size, total + size
    return shards, total


def grown_config(config: dict[str, Any], pad: Padding, origin: dict[str, Any]) -> dict[str, Any]:
    """The large model's config.json, with its source."""
    big, out = pad.big, dict(config)
    out |= {
        "hidden_size": big.hidden,
        "num_hidden_layers": big.layers,
        "num_attention_heads": big.heads,
        "num_key_value_heads": big.kv_heads,
        "head_dim": big.head_dim,
        "intermediate_size": big.inner,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6) * pad.eps_factor,
        MARK: origin,
    }
    dtype = str(pad.dtype).removeprefix("torch.")
    out |= {key: dtype for key in ("dtype", "torch_dtype") if key in config} or {"dtype": dtype}
    if types := config.get("layer_types"):
        out["layer_types"] = [types[i % len(types)] for i in range(big.layers)]
    return out


def _check_room(target: Path, num_bytes: int) -> None:
    """Raises ConfigError if the target exists, CapacityError if the disk lacks space."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} exists; use another folder, or remove it")
    parent = next(p for p in target.absolute().parents if p.exists())
    needed, free = 1.02 * num_bytes + 16e6, shutil.disk_usage(parent).free
    free += sum(file.stat().st_size for file in _part(target).glob("*"))  # removed before writing
    if free < needed:
        raise CapacityError(
            f"the checkpoint takes {needed / 1e9:.1f} GB, but {parent} has {free / 1e9:.1f} GB "
            "free; free some, or use another disk"
        )


def _part(target: Path) -> Path:
    """The temporary folder next to `target`."""
    return target.absolute().with_name(f".{target.absolute().name}.forerun-inflate")


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """A folder that is renamed to `target` at the end of the block, unless it raises.

    Files left by a killed process are removed first.
    """
    part = _part(target)
    with _locked(part):
        try:
            for file in part.iterdir():
                file.unlink()
            yield part
            for file in part.iterdir():
                file.chmod(0o644)
            os.replace(part, target)
        except BaseException as error:
            shutil.rmtree(part, ignore_errors=True)
            if isinstance(error, OSError | SafetensorError):
                raise CapacityError(f"cannot write {target}: {error}") from None
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Creates and locks a folder, if the system supports locks. Raises DataError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot create {folder}: {error.strerror}; use another place") from None
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends
        yield
    except BlockingIOError:
        raise DataError(f"another process writes {folder}; wait, or use another place") from None
    finally:
        os.close(file)
