"""Work for the CPU while (a) runs: the padded reasoner on disk, and Numba's kernels compiled."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .report import Report
from .setting import Setting

SIZE = "1B"
READY, FAILED = "ready", "failed"  # files that say how the model came out


def run(report: Report, setting: Setting) -> None:
    """Writes the model that (c) and (d) decode with; meanwhile compiles kernels."""
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write_model, report, setting)
        if not setting.is_smoke:
            start = time.perf_counter()
            compile_kernels()
            report.add("Numba's kernels", time.perf_counter() - start, "s")
        written.result()


def write_model(report: Report, setting: Setting) -> None:
    """The checkpoint, and a file that says how that went."""
    start = time.perf_counter()
    try:
        if setting.is_smoke:
            tiny_model(setting.model)
        else:
            from forerun.bench.inflate import inflate

            inflate("reasoner", setting.model, SIZE)
    except BaseException as fault:
        (setting.work / FAILED).write_text(f"{type(fault).__name__}: {fault}")
        raise
    (setting.work / READY).touch()
    report.add("the model on disk", time.perf_counter() - start, "s")


def tiny_model(folder: Path) -> None:
    """A random model of a few thousand weights with the reasoner's tokenizer.

    Of its passes only attention is ours: an interpreter runs that in a moment.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 768}
    config = Qwen3Config(**sizes, max_position_embeddings=512, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    copy_tokenizer(folder)


def copy_tokenizer(folder: Path) -> None:
    """The reasoner's tokenizer for another model."""
    from forerun.assets import embedded

    source = Path(embedded("reasoner"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)


def compile_kernels() -> None:
    """What a run with each method enters, on the small reasoner; Numba keeps it on disk."""
    import forerun
    from forerun.verifiers import _gpu as tensor_walk

    tensor_walk.warm_up()
    model = forerun.load("reasoner", device="cpu", max_seqs=2)
    for drafter in ("none", "stand", "auto"):
        model.generate(["Problem: 2 + 3\nSolution:\n"], drafter=drafter, max_new_tokens=8, n=2)


def wait_for_model(setting: Setting, seconds: float) -> None:
    """Until the model is there. Raises RuntimeError if it failed, TimeoutError after `seconds`."""
    end = time.monotonic() + seconds
    while not (setting.work / READY).exists():
        if (failed := setting.work / FAILED).exists():
            raise RuntimeError(f"the model was not written: {failed.read_text()}")
        if time.monotonic() > end:
            raise TimeoutError(f"the model was not written within {seconds:.0f} s")
        time.sleep(0.2)
