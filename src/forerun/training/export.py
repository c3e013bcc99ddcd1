"""Trained models as Hugging Face folders: bf16 safetensors, configuration, tokenizer."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes all files beside the folder first, then moves them in one by one."""
    folder.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        half = copy.deepcopy(model).bfloat16()
        half.generation_config = GenerationConfig(
            do_sample=True,
            top_k=0,  # or transformers would take 50: as it stands, the law is that of `Sampling`
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        half.save_pretrained(part)
        tokenizer.save_pretrained(part)
        _tidy(part / "tokenizer_config.json")
        for file in sorted(part.iterdir()):
            file.chmod(0o644)
            os.replace(file, folder / file.name)
    finally:
        with suppress(OSError):
            shutil.rmtree(part)


def _tidy(path: Path) -> None:
    """Names the class that every version of transformers knows; drops traces of the loading."""
    config = json.loads(path.read_text())
    for trace in ("is_local", "local_files_only"):
        config.pop(trace, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")
