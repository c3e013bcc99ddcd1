"""Loads a folder with transformers, whole or not at all: it would make up what a checkpoint lacks.

What a checkpoint holds beyond the model is refused where it belongs inside one of the model's parts
(a layer, a norm, the head), and named in a warning where it belongs to none (another head, a tower
for images): the model's own text does not need those.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from forerun.errors import ModelError
from forerun.models.gguf import GgufFile
from forerun.models.gguf_folder import linked_file
from forerun.models.gguf_names import hf_tensors
from forerun.models.hf import HFTarget
from forerun.models.weight_map import IGNORED, lacking, listed

log = logging.getLogger("forerun")
_loading = threading.Lock()  # transformers sets torch's default dtype while it loads, and we a hook


def load_hf(
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    reason: str,
    **options: Any,
) -> HFTarget:
    """The transformers model of a folder as a Target. Raises ModelError if it cannot be loaded."""
    from transformers import AutoModelForCausalLM

    linked = linked_file(folder)
    try:
        if linked:
            model = load_gguf(folder, linked, dtype)
        else:
            model = load_whole(AutoModelForCausalLM, folder, dtype=dtype or "auto")
    except ModelError:
        raise
    except Exception as cause:  # missing files, unknown types, packages that are not installed
        first = str(cause).strip().partition("\n")[0]
        raise ModelError(
            f"{folder} runs neither on forerun's decoder ({reason}) nor on transformers: {first}"
        ) from cause
    return HFTarget(model.to(device), reason=reason, **options)


def load_gguf(folder: Path, path: Path, dtype: torch.dtype | None) -> Any:
    """The transformers model of a GGUF file, described by the config in `folder`."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    dtype = dtype or config.dtype
    state = dict(hf_tensors(GgufFile(path), dtype))
    return load_whole(kind, None, config=config, state_dict=state, dtype=dtype)


def load_whole(kind: Any, folder: Path | str | None, **options: Any) -> Any:
    """`kind.from_pretrained(folder, **options)`. Raises ModelError for what would be made up."""
    with _loading, quiet():
        model, report = kind.from_pretrained(
            folder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused by name
            **options,
        )
    check_whole(folder, model, report)
    return model


def check_whole(folder: Path | str | None, model: Any, report: dict[str, Any]) -> None:
    """Raises ModelError if weights were made up, or some of the model's own were left out.

    report: loading info of transformers, without what the model's class declares to be harmless.
    """
    if report["missing_keys"]:
        raise ModelError(lacking(sorted(report["missing_keys"])))
    for name, found, wanted in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"tensor {name} has shape {list(found)}, and the config wants {list(wanted)}; is "
            "config.json of this checkpoint?"
        )
    surplus = sorted(name for name in report["unexpected_keys"] if not name.endswith(IGNORED))
    if own := inside(surplus, model):
        raise ModelError(
            f"the checkpoint holds {listed(own)}, for which the model of its config.json has no "
            "place; is config.json its own (as many layers, the same biases and norms)?"
        )
    if surplus:
        log.warning(
            "%s holds %s, which are no part of %s; they are left out",
            folder,
            listed(surplus),
            type(model).__name__,
        )


def inside(names: Iterable[str], model: Any) -> list[str]:
    """The tensors with names inside a part of a model: a list of layers, a norm, the head.

    The whole and its base model are no parts. Names may lack the prefix of the base model.
    """
    base = model.base_model_prefix
    parts = {name for name, _ in model.named_modules()} - {"", base}

    def is_inside(name: str) -> bool:
        words = name.split(".")
        return any(".".join(words[:end]) in parts for end in range(1, len(words)))

    return [name for name in names if is_inside(name) or is_inside(f"{base}.{name}")]


@contextmanager
def quiet() -> Iterator[None]:
    """Within, transformers draws no progress bars and gives no warnings: its report of a load.

    Unless our log is at DEBUG.
    """
    from transformers.utils import logging as theirs

    if log.isEnabledFor(logging.DEBUG):
        yield
        return
    # the first releases of 5 have no such hook
    set_hook = getattr(theirs, "set_tqdm_hook", lambda hook: None)
    level = theirs.get_verbosity()
    before = set_hook(lambda make, args, options: theirs.EmptyTqdm(*args, **options))
    theirs.set_verbosity(max(level, logging.ERROR))
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        set_hook(before)
