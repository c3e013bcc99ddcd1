"""Loads a `Target` from a folder, a hub id or a transformers model."""

from __future__ import annotations

import logging
import shlex
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forerun.errors import CapacityError, ConfigError, ModelError, in_a_line
from forerun.models import torchao
from forerun.models.checkpoint import load_decoder, shard_files, stored_dtype
from forerun.models.downloads import repair
from forerun.models.families import HEAD_SIZE, Plan, Unsupported, plan_for
from forerun.models.gguf_folder import LINK
from forerun.models.paths import (
    StoredConfig,
    check_config,
    check_device,
    check_folder,
    dtype_name,
    model_folder,
    read_config,
)
from forerun.models.shards import warn_of_two
from forerun.models.weight_update import update_decoder
from forerun.runner.free_memory import check_weights
from forerun.runner.model_runner import ModelRunner
from forerun.runner.native import kernels
from forerun.runner.native.weight_format import UNQUANTIZED, WeightFormat

if TYPE_CHECKING:
    from forerun.core.roles import Target
    from forerun.models.transformer import Transformer

log = logging.getLogger("forerun")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", LINK)
USUAL_TOKENS = 4096  # text length assumed in the memory check if no context is given
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def load_target(
    path_or_model: Any,
    *,
    dtype: Any = "auto",
    device: str = "auto",
    max_seqs: int = 16,
    context: int | None = None,
    weights: str = "auto",
    graphs: bool = True,
    is_draft: bool = False,
) -> Target:
    """A Target for a folder, a hub id or a loaded transformers model.

    dtype: bf16, fp16, fp32, or a torch dtype; "auto" is the checkpoint's. device: "auto" is CUDA if
    available. context: max sequence length, at most the model's own. weights: "int8" has a scale
    per output; on a CPU "int8:128" has one per 128 inputs; on a GPU also "fp8" and "int4".
    graphs: False runs all passes on torch on a GPU. is_draft: the model may have a reduced head, so
    its logits are those of some tokens only. Our decoder runs the families that it
    supports, transformers the rest. Raises ModelError with the cause.
    """
    dtype = dtype_name(dtype)
    _check_sizes(max_seqs, context, graphs)
    rounding = WeightFormat.parse(weights)
    if rounding != UNQUANTIZED:
        check_rounding(weights, rounding, path_or_model, choose_device(device), DTYPES.get(dtype))
    if not isinstance(path_or_model, str | Path):
        from forerun.models.hf import HFTarget

        return HFTarget(path_or_model, max_seqs=max_seqs, context=context)
    folder = model_folder(path_or_model)
    check_folder(folder)
    warn_of_two(folder)
    where = choose_device(device)
    try:
        decoder = _decoder(folder, path_or_model, context, dtype, where, weights, rounding)
    except Unsupported as reason:
        _check_transformers(folder, path_or_model, rounding, reason)
        from forerun.models.hf_load import load_hf

        check_files(folder, DTYPES.get(dtype), where)
        options = {"max_seqs": max_seqs, "context": context}
        return load_hf(folder, DTYPES.get(dtype), where, str(reason), **options)
    if decoder.head_map is not None and not is_draft:
        raise ModelError(
            f"{path_or_model} has a head for {decoder.config.head_size:,} of its "
            f"{decoder.config.vocab_size:,} tokens, so it can only draft; use it as drafter "
            "draft_model:model=..."
        )
    runner = ModelRunner(decoder, max_seqs=max_seqs, context=context, graphs=graphs)
    warn_of_context(runner, context or min(runner.context, USUAL_TOKENS))
    return runner


def _check_sizes(max_seqs: int, context: int | None, graphs: bool) -> None:
    """Raises ConfigError for values of the wrong type or too small."""
    if not isinstance(max_seqs, int) or max_seqs < 1:
        raise ConfigError(
            f"max_seqs, the number of sequences that may run at once, must be an integer of at "
            f"least 1, got {max_seqs!r}"
        )
    if context is not None and (not isinstance(context, int) or context < 2):
        raise ConfigError(
            f"context must be an integer of at least 2, got {context!r}; omit it for the model's "
            "own"
        )
    if not isinstance(graphs, bool):
        raise ConfigError(f"graphs must be True or False, got {graphs!r}; False runs on torch")


def _decoder(
    folder: Path,
    name: str | Path,
    context: int | None,
    dtype: str,
    device: torch.device,
    weights: str,
    rounding: WeightFormat,
) -> Transformer:
    """Our decoder with the weights of a folder. Raises Unsupported, ModelError, ConfigError."""
    plan, config = planned(folder, context)
    files = shard_files(folder)
    kind = choose_dtype(dtype, config, files)
    if rounding != UNQUANTIZED:
        check_rounding(weights, rounding, name, device, kind)
    decoder = load_decoder(plan, files, kind, device, rounding)
    decoder.update_weights = partial(update_decoder, decoder, plan, rounding=rounding)
    return decoder


def _check_transformers(
    folder: Path, name: str | Path, rounding: WeightFormat, reason: Unsupported
) -> None:
    """Says why transformers runs a model. Raises ModelError if it cannot run it either."""
    if not any(any(folder.glob(form)) for form in WEIGHT_FILES):
        raise ModelError(
            f"there are no weights in {folder} (model.safetensors, shards with "
            "model.safetensors.index.json, or pytorch_model.bin); "
            + repair(folder, "fetch the model again, or copy its weights there")
        ) from None
    if check_config(folder).get(HEAD_SIZE) is not None:
        raise ModelError(
            f"{name} has a reduced head, which only forerun's decoder runs, and that does not run "
            f"this model ({reason}); use the model before the head was reduced"
        ) from reason
    if rounding != UNQUANTIZED:
        raise ModelError(
            f"{name} cannot be held in {rounding.bits} bits, since transformers runs it "
            f"({reason}); use weights 'auto'"
        ) from reason
    log.info("%s runs on transformers: %s", name, reason)
    warn_of_bin(folder)


def check_files(folder: Path, dtype: torch.dtype | None, device: torch.device) -> None:
    """Raises CapacityError if the weights of a checkpoint do not fit into memory."""
    try:
        files = shard_files(folder)
    except Unsupported:
        return  # another format, with unknown size in memory
    if files[0].suffix != ".safetensors":
        return
    size = sum(path.stat().st_size for path in files)
    stored = stored_dtype(files)
    found = dtype or stored
    size = size * found.itemsize // stored.itemsize
    check_weights(size, device, f"at {found.itemsize} bytes each")


def warn_of_bin(folder: Path) -> None:
    """Warns of a checkpoint with .bin files only, and says how to convert it."""
    if any(folder.glob("*.safetensors")) or not any(folder.glob("pytorch_model*.bin")):
        return
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"[K.from_pretrained({str(folder)!r}).save_pretrained('converted') for K in (M, T)]"
    )
    log.warning(
        "%s has .bin weights, which go through transformers instead of forerun's decoder; to "
        "convert them to safetensors: python -c %s",
        folder,
        shlex.quote(code),
    )


def warn_of_context(runner: ModelRunner, tokens: int) -> None:
    """Warns if the KV cache of one text of `tokens` tokens does not fit into memory."""
    try:
        runner.check_room(1, tokens)
    except CapacityError as reason:
        log.warning("a text of %d tokens does not fit into memory: %s", tokens, reason)


def planned(folder: Path, context: int | None = None) -> tuple[Plan, Any]:
    """The plan to load a model into our decoder, and its config. Raises Unsupported, ModelError."""
    fields = check_config(folder)
    with suppress(Exception):  # transformers reports the error below
        stored = StoredConfig(fields)
        assert isinstance(stored.dtype, str)
        return plan_for(stored, context), stored
    config = read_config(folder)
    try:
        return plan_for(config, context), config
    except Unsupported:
        raise
    except Exception as cause:  # a field with an invalid type or value
        raise ModelError(f"{check_folder(folder)} cannot be used: {in_a_line(cause)}") from cause


def check_rounding(
    weights: str,
    rounding: WeightFormat,
    path_or_model: Any,
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    """Raises ConfigError for weights that cannot be quantised on this device."""
    if not isinstance(path_or_model, str | Path):
        raise ConfigError(
            f"weights {weights!r} need a checkpoint, and the model is loaded already; use 'auto'"
        )
    if device.type == "cpu" and rounding.has_cpu_kernel:
        if not kernels():
            raise ConfigError(
                f"weights {weights!r} need our kernels on a CPU ({kernels().why}); use 'auto'"
            )
        return
    if reason := torchao.why_not(rounding, device, dtype):
        raise ConfigError(f"weights {weights!r} cannot be used on {device}: {reason}")


def choose_device(name: str) -> torch.device:
    """The torch device with a name. Raises ConfigError if it is not available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name)
    try:
        device = torch.device(name)
    except RuntimeError as cause:  # a kind unknown to this build of torch
        raise ConfigError(f"device {name!r}: {in_a_line(cause)}; use cpu or cuda") from cause
    if device.type == "cuda" and not torch.cuda.is_available():
        why = "torch sees no GPU" if torch.version.cuda else "this torch is built for CPUs"
        raise ConfigError(
            f"device {name!r} is not available: {why}; use cpu, or see docs/gpu.md to install "
            "torch with CUDA"
        )
    try:
        torch.empty(1, device=device)
    except (RuntimeError, NotImplementedError) as cause:  # no such device
        raise ConfigError(f"device {name!r}: {in_a_line(cause)}; use cpu") from cause
    return device


def choose_dtype(name: str, config: Any, files: list[Path]) -> torch.dtype:
    """The dtype with a name; "auto" is the checkpoint's."""
    if name != "auto":
        return DTYPES[name]
    own = getattr(config, "dtype", None)
    own = getattr(torch, own, None) if isinstance(own, str) else own
    own = own if isinstance(own, torch.dtype) else stored_dtype(files)
    if own not in DTYPES.values():
        raise Unsupported(f"the checkpoint is in {own}")
    return own
