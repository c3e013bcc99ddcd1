"""A draft from `forerun train draft` is an ordinary checkpoint: other libraries load and use it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import forerun
from forerun.assets import embedded
from forerun.bench.peers import workers
from forerun.bench.peers.client import WorkerProcess
from forerun.bench.peers.install import env_of, problem, python_of
from forerun.cli.main import main
from forerun.core.sampling import Sampling

PEERS_DIR = Path(os.environ.get("PEERS_DIR", ".peers"))
QUESTION = "Question: Ann has 5 apples and buys 7 more."
TINY = "--num-prompts 10 --max-tokens 16 --layers 1 --probe-steps 2 --max-steps 12 --gamma 3"
CONFIG = {  # what llama.cpp's converter reads for a Llama
    *("architectures", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of the embedded reasoner after a few steps."""
    out = tmp_path_factory.mktemp("draft") / "draft"
    options = [*TINY.split(), "--threads", "1", "--micro-tokens", "512", "--out", str(out)]
    assert main(["train", "draft", "--model", "reasoner", *options]) == 0
    return out


@pytest.mark.slow
def test_transformers_loads_it_and_drafts_with_it(draft: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = AutoModelForCausalLM.from_pretrained(embedded("reasoner"), dtype=torch.float32)
    small = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(draft)
    ids = tokenizer(QUESTION, return_tensors="pt").input_ids
    assert ids[0].tolist() == forerun.load().tokenizer.encode(QUESTION)
    calls = []
    small.register_forward_hook(lambda *_: calls.append(1))
    how: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(ids, **how)
    assert torch.equal(target.generate(ids, assistant_model=small, **how), plain) and calls
    assert small.generate(ids, max_new_tokens=4, do_sample=False).shape[1] == ids.shape[1] + 4


@pytest.mark.slow
def test_vllm_loads_it_and_drafts_with_it(draft: Path) -> None:
    """Needs `make peers`. A greedy text is the target's own, and drafts are proposed."""
    if reason := problem(PEERS_DIR, "vllm"):
        pytest.skip(f"vLLM {reason}")
    model = forerun.load("reasoner", dtype="fp32")
    prompt = model.tokenizer.encode(QUESTION)
    plain = model.generate([prompt], Sampling(temperature=0, max_new_tokens=24), drafter="none")[0]
    path = Path(next(iter(workers.__path__))) / "vllm.py"
    python, env = python_of(PEERS_DIR, "vllm"), env_of(PEERS_DIR, "vllm")
    process = WorkerProcess(python, path, threads=1, env=env)
    target = {"model": str(Path(embedded("reasoner")).absolute()), "draft": str(draft)}
    numbers = {"context": 256, "num_seqs": 1, "cache_bytes": 1 << 28, "options": {"tokens": 3}}
    asked: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    asked |= {"max_new_tokens": 24, "ends": [*model.tokenizer.eos_ids], "seeds": [0]}
    try:
        process.request("load", 900, mode="draft", dtype="float32", **target, **numbers)
        fields = {"prompt": prompt, "sampling": asked, "batch": False, "options": {}}
        found = process.request("run", 900, mode="draft", **fields)
    finally:
        process.close()
    (sample,) = found["samples"]
    assert sample["tokens"] == plain.samples[0].tokens
    assert sample["drafted"] > 0


@pytest.mark.slow
def test_it_has_the_names_that_the_converter_of_llama_cpp_reads(draft: Path) -> None:
    """`convert_hf_to_gguf.py` maps tensors by the tables of the gguf package."""
    gguf = pytest.importorskip("gguf")
    config = json.loads((draft / "config.json").read_text())
    assert config.keys() >= CONFIG and config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] and "draft_vocab_size" not in config
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    held = load_file(draft / "model.safetensors")
    found = {table.get_name(name, try_suffixes=(".weight",)) for name in held}
    assert None not in found and len(found) == len(held)
    assert {"token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight"} <= found
    assert "output.weight" not in found  # the head is the embedding
    assert (draft / "tokenizer.json").exists() and (draft / "tokenizer_config.json").exists()
