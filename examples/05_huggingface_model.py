"""Run any Hugging Face causal LM: compare greedy text of forerun and of transformers.

    python examples/05_huggingface_model.py [MODEL] ["a prompt"]

MODEL is a folder, a hub id, or a name that `forerun models` lists. The default is the embedded
reasoner, which is an ordinary Hugging Face checkpoint.
"""

import argparse
import sys
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import forerun
from forerun.assets import embedded
from forerun.models.paths import is_gguf, located
from forerun.tasks.reasoning import ReasoningTask

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("path", nargs="?", default=embedded("reasoner"), help="folder, hub id or name")
parser.add_argument("prompt", nargs="?", default=ReasoningTask("heldout").example(2).prompt)
given = parser.parse_args()
prompt, length = given.prompt, 100

try:
    if is_gguf(Path(given.path)):
        sys.exit(f"error: transformers needs a folder, got the file {given.path}; give a folder")
    path = located(given.path)  # the folder of a name
    model = forerun.load(path, dtype="fp32")
    model.generate(prompt, max_new_tokens=8, temperature=0)  # warm-up: compiles kernels once
except forerun.ForerunError as error:
    sys.exit(f"error: {error}")
start = time.perf_counter()
(ours,) = model.generate(prompt, max_new_tokens=length, temperature=0)
ours_seconds = time.perf_counter() - start

tokenizer = AutoTokenizer.from_pretrained(path)
reference = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
# forerun takes sampling parameters from the call only, so drop those of the checkpoint
reference.generation_config = GenerationConfig(
    eos_token_id=list(model.tokenizer.eos_ids) or None, pad_token_id=tokenizer.pad_token_id
)
inputs = tokenizer(prompt, return_tensors="pt")
reference.generate(**inputs, max_new_tokens=8, do_sample=False)  # warm-up, as above
start = time.perf_counter()
theirs = reference.generate(**inputs, max_new_tokens=length, do_sample=False)
their_seconds = time.perf_counter() - start
their_tokens = theirs[0, inputs["input_ids"].shape[1] :].tolist()

print(ours.text)
print(f"forerun       {len(ours.samples[0].tokens) / ours_seconds:6.1f} tokens/s")
print(f"transformers  {len(their_tokens) / their_seconds:6.1f} tokens/s")
agree = sum(a == b for a, b in zip(ours.samples[0].tokens, their_tokens, strict=False))
print(f"{agree} of {len(their_tokens)} tokens agree")
