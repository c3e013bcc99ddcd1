"""What can be said of a model before it is loaded: its folder, its config, dtype and device names.

Nothing here needs torch, so that a wrong word is refused at once.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from forerun.assets import MODELS, embedded
from forerun.errors import ConfigError, ModelError, UnknownName, in_a_line, meant
from forerun.models.config_check import ABSENT
from forerun.models.downloads import downloads, find, pulled_folder

CONFIG = ("config.json",)  # of a hub repository: what is looked at before a model is loaded,
TOKENIZER = ("*.json", "*.model", "*.txt", "*.jinja")  # what its tokenizer is made of,
WANTED = (*TOKENIZER, "*.safetensors")  # and all that we use
GGUF = ".gguf"
DTYPES = ("auto", "bf16", "fp16", "fp32")
TORCH_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# auto, and what torch knows; the kinds of extensions have names of their own
DEVICE = re.compile(r"auto|(cpu|cuda|mps|xpu|hpu|npu|xla|mtia|privateuseone)(:\d{1,3})?")


def dtype_name(given: Any) -> str:
    """Our name of a number type; torch's own types and their names will do.

    Raises UnknownName for one that models cannot be loaded in.
    """
    name = str(given).removeprefix("torch.")
    name = TORCH_NAMES.get(name, name)
    if name not in DTYPES:
        raise UnknownName.of("dtype", name, DTYPES)
    return name


def check_device(name: str) -> None:
    """Raises ConfigError for what is not the name of a device."""
    if not isinstance(name, str) or not DEVICE.fullmatch(name):
        raise ConfigError(
            f"expected device auto, cpu, cuda or cuda:N, got {name!r}; check the spelling"
        )


def known_names() -> list[str]:
    """Models that are named without a path: embedded ones, and those that can be pulled."""
    return [*MODELS, *(one.name for one in downloads())]


def located(name: str) -> str:
    """What a model's name stands for here; the name itself, where that is for the loader to find.

    Of an embedded or a pulled model that is its folder, of a GGUF file the folder made of it; a
    folder here wins over a pulled model of that name. Raises ModelError for a bad GGUF file.
    """
    if name in MODELS:
        return embedded(name)
    is_known = find(name) is not None or str(name).lower().endswith(GGUF)
    return str(model_folder(name)) if is_known and _is_here(name) else name


def _is_here(name: str) -> bool:
    """Whether a name is that of a folder, a file, or a pulled model."""
    known = find(name)
    return Path(name).expanduser().exists() or (known is not None and pulled_folder(known).is_dir())


def model_folder(name: str | Path, wanted: tuple[str, ...] = WANTED) -> Path:
    """The local folder of a model; `wanted` of a hub id is fetched, or found in the hub's cache.

    A GGUF file has one in our cache. Raises ModelError for what is none of these.
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
    if folder.suffix.lower() == GGUF:
        return _of_gguf(folder, is_file)
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
            f"there is no model folder {name}; {meant(str(name), known_names(), 'check the path')}"
        )
    return _fetched(str(name), wanted)


def _of_gguf(path: Path, is_there: bool) -> Path:
    """The folder that stands for a GGUF file. Raises ModelError for a bad one, or for none."""
    if not is_there:
        raise ModelError(f"there is no file {path}; check the path")
    from forerun.models.gguf_folder import gguf_folder

    return gguf_folder(path)


@cache
def _fetched(name: str, wanted: tuple[str, ...]) -> Path:
    """The folder of a hub id with these files, asked for once per process."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(wanted)))
    except Exception as cause:  # the hub client raises many kinds
        first = str(cause).strip().partition("\n")[0]
        advice = meant(name, known_names(), "check the spelling or the connection")
        raise ModelError(
            f"{name} is neither a folder here nor a model that the hub could deliver ({first}); "
            f"{advice}"
        ) from cause


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id: NAME or OWNER/NAME."""
    parts = name.split("/")
    return len(parts) <= 2 and all(parts) and not name.startswith((".", "~", "/"))


def check_folder(folder: Path) -> Path:
    """The config file of a model folder. Raises ModelError if there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"there is no config.json in {folder}; is it a model folder?")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file of a model says. Raises ModelError for one that is damaged."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(said, dict):
            raise ValueError(f"expected a JSON object, got {type(said).__name__}")
    except (OSError, ValueError, RecursionError) as cause:
        raise ModelError(
            f"{path} cannot be used: {in_a_line(cause)}; fetch or copy it again"
        ) from cause
    return said


def check_config(folder: Path) -> dict[str, Any]:
    """The config file of a model folder as a dict. Raises ModelError if it cannot be read."""
    return read_json(check_folder(folder))


class Unsaid(Exception):
    """A config file does not tell this; the class of transformers may have a default for it."""


PER_LAYER = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


class Written:
    """What a config.json says in so many words, without transformers: its import takes seconds.

    Only for files that a transformers 5 has written, which writes all fields, and as they are
    used. Fields that this kind of model never has are None unless the file has them. Whatever else
    is asked for is `Unsaid`, even where the asker has a default.
    """

    def __init__(self, said: dict[str, Any]) -> None:
        if not said.get("transformers_version", "").startswith("5."):
            raise Unsaid("an older form, or another writer's")
        self.quantization_config = None  # is absent where there is none
        self.__dict__.update(dict.fromkeys(ABSENT.get(said.get("model_type", ""), ())))
        self.__dict__.update(said)

    def __getattr__(self, name: str) -> Any:
        raise Unsaid(name)


def read_config(folder: Path) -> Any:
    """The transformers config of a folder. Raises ModelError if it is absent or unknown."""
    said = check_config(folder)
    from transformers import AutoConfig

    # transformers takes one size for all layers; a pruned model lists one per layer
    lists = {name: said[name] for name in PER_LAYER if isinstance(said.get(name), list)}
    try:
        if not lists:
            return AutoConfig.from_pretrained(folder)
        if "num_attention_heads" in lists and said.get("head_dim") is None:
            raise ValueError("num_attention_heads is a list, so head_dim must be given; add it")
        sizes = {
            name: max((size for size in value if isinstance(size, int)), default=1)
            for name, value in lists.items()
        }
        config = AutoConfig.for_model(**(said | sizes))
        config.per_layer = lists  # read by `families.by_layer`
        return config
    except Exception as cause:  # unknown type, invalid fields
        raise ModelError(f"{check_folder(folder)} cannot be used: {in_a_line(cause)}") from cause
