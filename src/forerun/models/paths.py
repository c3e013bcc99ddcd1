"""Checks before a model is loaded: its folder, config, dtype and device names.

Does not import torch, so errors are fast.
"""

from __future__ import annotations

import json
import logging
import re
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from forerun.assets import MODELS, embedded
from forerun.errors import ConfigError, ModelError, UnknownName, did_you_mean, in_a_line
from forerun.models.config_check import ABSENT
from forerun.models.downloads import downloads, find, pulled_folder, repair
from forerun.models.remote_code import check_code, is_trusted

log = logging.getLogger("forerun")
CONFIG = ("config.json",)  # files of a hub repository: of the config,
TOKENIZER = ("*.json", "*.model", "*.txt", "*.jinja")  # of the tokenizer,
WANTED = (*TOKENIZER, "*.safetensors")  # and all that are used
GGUF, GGUF_MAGIC = ".gguf", b"GGUF"
DTYPES = ("auto", "bf16", "fp16", "fp32")
TORCH_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# auto, and the devices of torch; extensions register further names
DEVICE = re.compile(r"auto|(cpu|cuda|mps|xpu|hpu|npu|xla|mtia|privateuseone)(:\d{1,3})?")


def dtype_name(given: Any) -> str:
    """Our name of a dtype, from our name, torch's name or a torch dtype.

    Raises UnknownName for an unsupported one.
    """
    name = str(given).removeprefix("torch.")
    name = TORCH_NAMES.get(name, name)
    if name not in DTYPES:
        raise UnknownName.of("dtype", name, DTYPES)
    return name


def check_device(name: str) -> None:
    """Raises ConfigError for a bad device name."""
    if not isinstance(name, str) or not DEVICE.fullmatch(name):
        raise ConfigError(
            f"expected device auto, cpu, cuda or cuda:N, got {name!r}; check the spelling"
        )


def known_names() -> list[str]:
    """Names of models: embedded ones, and those that can be pulled."""
    return [*MODELS, *(one.name for one in downloads())]


def located(name: str) -> str:
    """The local folder of an embedded model, a pulled model or a GGUF file; else the name itself.

    A local folder takes precedence over a pulled model of the same name, not over an embedded one;
    a warning says so once. Raises ModelError for a bad GGUF file.
    """
    if name in MODELS:
        if (Path(name) / "config.json").is_file():
            _warn_of_folder(name)
        return embedded(name)
    is_known = find(name) is not None or is_gguf(Path(name).expanduser())
    return str(model_folder(name)) if is_known and _is_here(name) else name


@cache
def _warn_of_folder(name: str) -> None:
    log.warning(
        f"{name} is the model that ships with forerun; for the folder {name} write {spelled(name)}"
    )


def spelled(folder: str | Path) -> str:
    """A folder as the name of a model: "./draft", since "draft" is an embedded model."""
    return f"./{folder}" if str(folder) in MODELS else str(folder)


def _is_here(name: str) -> bool:
    """Whether a name is a local folder, a file, or a pulled model."""
    known = find(name)
    return Path(name).expanduser().exists() or (known is not None and pulled_folder(known).is_dir())


def model_folder(name: str | Path, wanted: tuple[str, ...] = WANTED) -> Path:
    """The local folder of a model. Of a hub id the files `wanted` are downloaded if not cached.

    A GGUF file has a folder in our cache. Raises ModelError if the name is none of these.
    """
    if not str(name).strip():
        raise ModelError(
            "the name of the model is empty; give a folder, a hub id, a GGUF file, or one of "
            f"{', '.join(known_names())}"
        )
    try:
        folder = Path(name).expanduser()
        is_folder, is_file = folder.is_dir(), folder.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a NUL byte
        raise ModelError(
            f"no model folder can be called {str(name)[:80]!r}: {error!s:.80}; check the path"
        ) from None
    if is_folder:
        return folder
    if is_gguf(folder):
        return _of_gguf(folder, is_file)
    if folder.exists() and not is_file:
        raise ModelError(f"{name} is not a regular file; give a model folder or a GGUF file")
    if is_file:
        raise ModelError(
            f"{name} is a file, and no GGUF file; give the folder that holds config.json"
        )
    if known := find(str(name)):
        pulled = pulled_folder(known)
        if not pulled.is_dir():
            raise ModelError(f"{name} is not on this machine yet; run: forerun pull {name}")
        return pulled
    if not is_hub_id(str(name)):
        raise ModelError(
            f"there is no model folder {name}; "
            f"{did_you_mean(str(name), known_names(), 'check the path')}"
        )
    return _fetched(str(name), wanted)


def is_gguf(path: Path) -> bool:
    """Whether a path ends in .gguf, or is a file that begins as GGUF files do."""
    if path.suffix.lower() == GGUF:
        return True
    try:
        with path.open("rb") if path.is_file() else BytesIO() as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except (OSError, ValueError):  # not readable, or no possible path
        return False


def _of_gguf(path: Path, is_there: bool) -> Path:
    """The folder of a GGUF file. Raises ModelError for a bad or missing file."""
    if not is_there and path.exists():
        raise ModelError(f"{path} is not a regular file; give a GGUF file")
    if not is_there:
        raise ModelError(f"there is no file {path}; check the path")
    from forerun.models.gguf_folder import gguf_folder

    return gguf_folder(path)


@cache
def _fetched(name: str, wanted: tuple[str, ...]) -> Path:
    """The folder of a hub id with these files, requested once per process."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(wanted)))
    except Exception as cause:  # the hub client raises many kinds
        first = str(cause).strip().partition("\n")[0]
        advice = did_you_mean(name, known_names(), "check the spelling or the connection")
        raise ModelError(
            f"{name} is neither a local folder nor a model that the hub provides ({first}); "
            f"{advice}"
        ) from cause


def is_hub_id(name: str) -> bool:
    """Whether a name has the form NAME or OWNER/NAME."""
    parts = name.split("/")
    return len(parts) <= 2 and all(parts) and not name.startswith((".", "~", "/"))


def check_folder(folder: Path) -> Path:
    """The config file of a model folder. Raises ModelError if there is none."""
    path = folder / "config.json"
    if not path.is_file():
        advice = repair(folder, "is it a model folder?")
        raise ModelError(f"there is no config.json in {folder}; {advice}")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model. Raises ModelError for a damaged file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"expected a JSON object, got {type(content).__name__}")
    except (OSError, ValueError, RecursionError) as cause:
        raise ModelError(f"{path} cannot be used: {in_a_line(cause)}; {repair(path)}") from cause
    return content


def check_config(folder: Path) -> dict[str, Any]:
    """The config file of a model folder as a dict. Raises ModelError if it cannot be read."""
    return read_json(check_folder(folder))


class FieldNotStored(Exception):
    """A field is not in the config file; transformers may have a default for it."""


PER_LAYER = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


class StoredConfig:
    """The fields of a config.json, read without transformers, which takes seconds to import.

    Only for files written by transformers 5, which stores all fields in their final form. Fields
    that the model type never has are None. Any other missing field raises FieldNotStored, also in
    `getattr` with a default.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        if not fields.get("transformers_version", "").startswith("5."):
            raise FieldNotStored("not written by transformers 5")
        self.quantization_config = None  # not stored if the model has none
        self.__dict__.update(dict.fromkeys(ABSENT.get(fields.get("model_type", ""), ())))
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        raise FieldNotStored(name)


def read_config(folder: Path) -> Any:
    """The transformers config of a folder. Raises ModelError if it is absent or unknown."""
    fields = check_config(folder)
    from transformers import AutoConfig

    # transformers takes one size for all layers; a pruned model lists one per layer
    lists = {name: fields[name] for name in PER_LAYER if isinstance(fields.get(name), list)}
    try:
        if not lists:
            return AutoConfig.from_pretrained(folder, trust_remote_code=is_trusted())
        if "num_attention_heads" in lists and fields.get("head_dim") is None:
            raise ValueError("num_attention_heads is a list, so head_dim must be given; add it")
        sizes = {
            name: max((size for size in value if isinstance(size, int)), default=1)
            for name, value in lists.items()
        }
        config = AutoConfig.for_model(**(fields | sizes))
        config.per_layer = lists  # read by `families.by_layer`
        return config
    except Exception as cause:  # unknown type, invalid fields
        check_code(folder, cause)
        raise ModelError(f"{check_folder(folder)} cannot be used: {in_a_line(cause)}") from cause
