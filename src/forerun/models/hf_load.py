"""Loads a folder with transformers, and checks that all weights were loaded.

transformers initialises missing weights at random; here they are an error. A surplus tensor is an
error if it belongs inside a part of the model (a layer, a norm, the head). Otherwise it is named in
a warning: another head or an image tower is not needed for text.
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
from forerun.models.end_ids import unusable_pad
from forerun.models.gguf import GgufFile
from forerun.models.gguf_folder import linked_file
from forerun.models.gguf_names import hf_tensors
from forerun.models.hf import HFTarget
from forerun.models.remote_code import check_code, is_trusted
from forerun.models.weight_map import IGNORED, listed, missing_message

log = logging.getLogger("forerun")
_loading = threading.Lock()  # loading changes global state: torch's default dtype, a tqdm hook


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
            changed: dict[str, Any] = {"pad_token_id": None} if unusable_pad(folder) else {}
            model = load_whole(AutoModelForCausalLM, folder, dtype=dtype or "auto", **changed)
    except ModelError:
        raise
    except Exception as cause:  # missing files, unknown types, missing packages
        check_code(folder, cause)
        first = str(cause).strip().partition("\n")[0]
        raise ModelError(
            f"{folder} runs neither on forerun's decoder ({reason}) nor on transformers: {first}"
        ) from cause
    return HFTarget(model.to(device), reason=reason, watch="none", **options)


def load_gguf(folder: Path, path: Path, dtype: torch.dtype | None) -> Any:
    """The transformers model of a GGUF file, described by the config in `folder`."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=is_trusted())
    kind = getattr(transformers, config.architectures[0])
    dtype = dtype or config.dtype
    state = dict(hf_tensors(GgufFile(path), dtype))
    return load_whole(kind, None, config=config, state_dict=state, dtype=dtype)


def load_whole(kind: Any, folder: Path | str | None, **options: Any) -> Any:
    """`kind.from_pretrained(folder, **options)`. Raises ModelError for incomplete checkpoints."""
    with _loading, quiet():
        model, report = kind.from_pretrained(
            folder,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_whole` raises for them
            trust_remote_code=is_trusted(),
            **options,
        )
    check_whole(folder, model, report)
    return model


def check_whole(folder: Path | str | None, model: Any, report: dict[str, Any]) -> None:
    """Raises ModelError if weights of the model are missing, or tensors of its parts are unused.

    report: loading info of transformers.
    """
    if report["missing_keys"]:
        raise ModelError(missing_message(sorted(report["missing_keys"])))
    for name, found, wanted in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"tensor {name} has shape {list(found)}, but config.json requires {list(wanted)}; "
            "check that config.json belongs to this checkpoint"
        )
    surplus = sorted(name for name in report["unexpected_keys"] if not name.endswith(IGNORED))
    if own := inside(surplus, model):
        raise ModelError(
            f"the checkpoint holds {listed(own)}, for which the model of its config.json has no "
            "place; check that config.json belongs to it (number of layers, biases, norms)"
        )
    if surplus:
        log.warning(
            "%s holds %s, which are not part of %s; ignoring them",
            folder,
            listed(surplus),
            type(model).__name__,
        )


def inside(names: Iterable[str], model: Any) -> list[str]:
    """The tensors inside a part of a model: a layer list, a norm, the head.

    The model itself and its base model do not count. Names may lack the base model's prefix.
    """
    base = model.base_model_prefix
    parts = {name for name, _ in model.named_modules()} - {"", base}

    def is_inside(name: str) -> bool:
        words = name.split(".")
        return any(".".join(words[:end]) in parts for end in range(1, len(words)))

    return [name for name in names if is_inside(name) or is_inside(f"{base}.{name}")]


@contextmanager
def quiet() -> Iterator[None]:
    """Hides progress bars and warnings of transformers within the context, unless at DEBUG."""
    from transformers.utils import logging as theirs

    if log.isEnabledFor(logging.DEBUG):
        yield
        return
    # missing in the first releases of transformers 5
    set_hook = getattr(theirs, "set_tqdm_hook", lambda hook: None)
    level = theirs.get_verbosity()
    before = set_hook(lambda make, args, options: theirs.EmptyTqdm(*args, **options))
    theirs.set_verbosity(max(level, logging.ERROR))
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        set_hook(before)
