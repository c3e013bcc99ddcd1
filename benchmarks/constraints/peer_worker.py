"""Constrained decoding by another library, in a Python that has it: for part_peers.py.

    python peer_worker.py ENGINE < request.json > answer.json

ENGINE: llguidance or xgrammar (logits processors of transformers), or vllm. The request has the
folder of the model, problems with prompt ids and a JSON schema, and settings of the sampling; the
answer has a text, its tokens and seconds for each problem. forerun is not imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]


def main() -> None:
    request, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries and their processes print
    engine = {"llguidance": hugging_face, "xgrammar": hugging_face, "vllm": vllm}[sys.argv[1]]
    json.dump(engine(sys.argv[1], request), out)


def hugging_face(engine: str, request: dict[str, Any]) -> list[Answer]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(request["threads"])
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.bfloat16).eval()
    processor = {"llguidance": llguidance, "xgrammar": xgrammar}[engine](tokenizer, model)
    answers = []
    for problem in [request["problems"][0], *request["problems"]]:  # the first one twice: warm-up
        ids = torch.tensor([problem["ids"]])
        torch.manual_seed(request["seed"])
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=[processor(problem["schema"])],
            max_new_tokens=request["tokens"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            eos_token_id=request["eos_ids"],
            pad_token_id=request["eos_ids"][0],
        )[0, ids.shape[1] :].tolist()
        answers.append(answer_of(out, time.perf_counter() - start, request, tokenizer.decode))
    return answers[1:]


def llguidance(tokenizer: Any, model: Any) -> Callable[[Any], Any]:
    """Makes a logits processor of a schema, by the library's own functions."""
    import llguidance.hf
    import llguidance.numpy
    import numpy as np
    import torch
    from llguidance import LLMatcher

    size = model.config.vocab_size
    vocabulary = llguidance.hf.from_tokenizer(tokenizer, n_vocab=size)

    def make(schema: Any) -> Any:
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        words = llguidance.numpy.allocate_token_bitmask(1, size)
        is_begun: list[bool] = []

        def process(ids: Any, scores: Any) -> Any:
            if is_begun:
                matcher.consume_token(int(ids[0, -1]))
            is_begun.append(True)
            llguidance.numpy.fill_next_token_bitmask(matcher, words, 0)
            # its own apply_token_bitmask_inplace compiles with torch for a minute
            bits = np.unpackbits(words.view(np.uint8)[0], bitorder="little")[:size]
            return scores.masked_fill(~torch.from_numpy(bits.view(bool)), -torch.inf)

        return process

    return make


def xgrammar(tokenizer: Any, model: Any) -> Callable[[Any], Any]:
    import xgrammar as xgr

    info = xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    compiler = xgr.GrammarCompiler(info)

    def make(schema: Any) -> Any:
        compiled = compiler.compile_json_schema(json.dumps(schema))
        return xgr.contrib.hf.LogitsProcessor(compiled)

    import xgrammar.contrib.hf  # noqa: F401

    return make


def vllm(engine: str, request: dict[str, Any]) -> list[Answer]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    longest = max(len(problem["ids"]) for problem in request["problems"])
    llm = LLM(
        model=request["model"],
        dtype="bfloat16",
        max_model_len=longest + request["tokens"] + 16,
        max_num_seqs=1,
        kv_cache_memory_bytes=1 << 29,
        seed=request["seed"],
    )
    answers = []
    for problem in [request["problems"][0], *request["problems"]]:
        given = SamplingParams(
            temperature=1.0,
            max_tokens=request["tokens"],
            seed=request["seed"],
            structured_outputs=StructuredOutputsParams(json=problem["schema"]),
        )
        start = time.perf_counter()
        prompt = {"prompt_token_ids": problem["ids"]}
        out = llm.generate([prompt], given, use_tqdm=False)[0].outputs[0]
        seconds = time.perf_counter() - start
        answer = answer_of(list(out.token_ids), seconds, request, lambda *_, **__: "")
        answers.append(answer | {"text": out.text})
    return answers[1:]


def answer_of(
    tokens: list[int], seconds: float, request: dict[str, Any], decode: Callable[..., str]
) -> Answer:
    ends = [i for i, token in enumerate(tokens) if token in request["eos_ids"]]
    text = decode(tokens[: ends[0]] if ends else tokens, skip_special_tokens=True)
    is_whole = bool(ends) or len(tokens) < request["tokens"]
    return {"text": text, "tokens": len(tokens), "seconds": seconds, "ended": is_whole}


if __name__ == "__main__":
    main()
