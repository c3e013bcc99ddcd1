"""Turns the llama2.c file of stories260K into an ordinary Hugging Face folder.

Example: python tests/convert_stories260k.py stories260K.bin tok512.bin OUT
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, processors

HEADER = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")


def read(path: Path) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Header and tensors of a llama2.c checkpoint (version 0: seven int32, then fp32 arrays)."""
    raw = path.read_bytes()
    head = dict(zip(HEADER, struct.unpack("7i", raw[:28]), strict=True))
    d, f, n = head["dim"], head["hidden_dim"], head["n_layers"]
    kv = d // head["n_heads"] * head["n_kv_heads"]
    data, at = np.frombuffer(raw, dtype=np.float32, offset=28), 0
    shapes = {
        "embed": (abs(head["vocab_size"]), d),
        "attn_norm": (n, d),
        "q": (n, d, d),
        "k": (n, kv, d),
        "v": (n, kv, d),
        "o": (n, d, d),
        "mlp_norm": (n, d),
        "gate": (n, f, d),
        "down": (n, d, f),
        "up": (n, f, d),
        "norm": (d,),
    }
    tensors = {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensors[name] = torch.from_numpy(data[at : at + size].reshape(shape).copy())
        at += size
    assert head["vocab_size"] > 0, "the head is tied"
    return head, tensors


def halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama2.c rotates neighbouring rows of a head; Hugging Face rotates its two halves."""
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def convert(source: Path, tokenizer: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors and tokenizer.json to `folder`."""
    head, t = read(source)
    names = {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    out = {"model.embed_tokens.weight": t["embed"], "model.norm.weight": t["norm"]}
    for i in range(head["n_layers"]):
        at = f"model.layers.{i}."
        out |= {f"{at}{long}.weight": t[short][i].clone() for short, long in names.items()}
        out[f"{at}self_attn.q_proj.weight"] = halves(t["q"][i], head["n_heads"])
        out[f"{at}self_attn.k_proj.weight"] = halves(t["k"][i], head["n_kv_heads"])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": head["dim"],
        "intermediate_size": head["hidden_dim"],
        "num_hidden_layers": head["n_layers"],
        "num_attention_heads": head["n_heads"],
        "num_key_value_heads": head["n_kv_heads"],
        "vocab_size": head["vocab_size"],
        "max_position_embeddings": head["seq_len"],
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    build_tokenizer(tokenizer).save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def pieces(path: Path) -> list[tuple[str, float]]:
    """Token strings and scores of a llama2.c tokenizer (spaces as U+2581, as SentencePiece)."""
    raw, at, found = path.read_bytes(), 4, []
    while at < len(raw):
        score, length = struct.unpack("fi", raw[at : at + 8])
        text = raw[at + 8 : at + 8 + length].decode()
        found.append((text.strip("\n") if text.strip("\n") else text, score))
        at += 8 + length
    texts = [text if text.startswith("<") else text.replace(" ", "\u2581") for text, _ in found]
    return [(text, score) for text, (_, score) in zip(texts, found, strict=True)]


def build_tokenizer(path: Path) -> Tokenizer:
    """A byte-fallback BPE whose merges are ranked by the scores of their results."""
    found = pieces(path)
    ids = {text: i for i, (text, _) in enumerate(found)}
    ranked = sorted(found, key=lambda item: -item[1])
    merges = [
        (text[:cut], text[cut:])
        for text, _ in ranked
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    model = models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", ids["<s>"])]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:4]))
