"""A draft model for a real target, trained from nothing, and drafts with another tokenizer.

    python benchmarks/real_drafts.py --model smollm2 --data-dir DATA --out runs/draft-smollm2
    python benchmarks/real_drafts.py --model qwen-coder --other smollm2 --out runs/draft-qwen
    python benchmarks/real_drafts.py --out runs/draft-smollm2 --table    # of what there is so far

1. Prompts: the tuning half of suite `real`, tasks in turn; their task is the domain.
2. `forerun train draft`: prose and code of the data, then the target's own answers. The weights at
   the end of each phase become a draft of their own.
3. `forerun compress vocab-trim` of the trained draft.
4. `forerun bench run` on the held-out half of the suite, one interleaved run for each mode: plain,
   the draft of each phase, the trimmed one, `stand` and `auto`. With --other, a model with
   another tokenizer, also OmniDraft, TLI and SLEM with it.

Without --minutes nothing is trained. The same command resumes; a finished draft is not trained
again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import real
import scripts
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafts.common import CORPORA
from forerun.bench.suite import find_suite
from forerun.bench.suite_examples import half_of, questions
from forerun.tasks import get_task
from forerun.tasks.base import Example
from forerun.training.checkpoints import load_checkpoint
from forerun.training.data.texts import Texts
from forerun.training.export import save

LONG = {"long_documents"}  # prompts that are longer than a row of training
IN_SUITE = "sherlock"  # a text that the suite asks about
PHASES = ("pretrain", "continue", "align")
CROSS_VOCAB = ("", ",method=tli", ",method=slem")  # OmniDraft, TLI, SLEM
MODES = ("greedy", "sampled")


def tuning_prompts(data: Path) -> Iterator[dict[str, str]]:
    """Prompts of the tuning half of suite `real`, its tasks in turn."""
    by_task = {}
    for one in find_suite("real").tasks:
        if one.task not in LONG:
            task = get_task(one.text(data))
            examples = (task.example(first) for first, *_ in questions(task))
            by_task[one.task] = [text(e) for e in examples if half_of(e) == "tuning"]
    for i in range(max(map(len, by_task.values()))):
        for name, texts in by_task.items():
            if i < len(texts):
                yield {"prompt": texts[i], "domain": name}


def text(example: Example) -> str:
    """What the user says first."""
    return example.turns[0] if example.turns else example.prompt


def write_prompts(options: argparse.Namespace) -> Path:
    """The file with the prompts."""
    path = options.out / "prompts.jsonl"
    if not path.exists():
        rows = [json.dumps(row) + "\n" for row in tuning_prompts(options.data_dir)]
        rows = rows[: options.prompts]
        random.Random(0).shuffle(rows)  # every tenth is held out, of each task some
        path.write_text("".join(rows), encoding="utf-8")
    return path


def write_text(options: argparse.Namespace, domain: str) -> Path:
    """The corpora of a domain as one text file, without the text of the suite."""
    path, links = options.out / f"{domain}.txt", options.out / "corpora" / domain
    if not path.exists():
        links.mkdir(parents=True, exist_ok=True)
        for file in sorted((options.data_dir / "corpora").glob(CORPORA[domain])):
            link = links / file.name
            if IN_SUITE not in file.name and not link.exists():
                link.symlink_to(file.resolve())
        path.write_text("\n".join(Texts(links, 256, 0.01).trained()), encoding="utf-8")
    return path


def train(options: argparse.Namespace, prompts: Path) -> None:
    """The draft in --out/draft, and one for each phase in --out/PHASE."""
    out = options.out / "draft"
    if not (out / "draft.json").exists():
        words = ["train", "draft", "--model", options.model, "--minutes", str(options.minutes)]
        words += ["--prompts", str(prompts), "--num-prompts", str(options.prompts)]
        for name, domain in (("corpus", "prose"), ("code", "code")):
            words += [f"--{name}", str(write_text(options, domain))]
        words += ["--max-tokens", str(options.answer), "--out", str(out)]
        forerun(*words, *(["--resume"] if (out / "state").exists() else []))
    for phase in PHASES:
        state = out / "state" / f"{phase}.pt"
        if state.exists() and not (options.out / phase / "config.json").exists():
            model = AutoModelForCausalLM.from_pretrained(out)
            found = model.load_state_dict(load_checkpoint(state)["parameters"], strict=False)
            assert found.missing_keys == ["lm_head.weight"] and not found.unexpected_keys  # tied
            save(model, options.out / phase, tokenizer=AutoTokenizer.from_pretrained(out))


def trim(options: argparse.Namespace, prompts: Path) -> None:
    """The draft with a reduced head, in --out/trimmed."""
    draft, out = options.out / "draft", options.out / "trimmed"
    if (draft / "config.json").exists() and not (out / "config.json").exists():
        rows = prompts.read_text(encoding="utf-8").splitlines(keepends=True)
        few = options.out / "calibration.jsonl"
        few.write_text("".join(rows[: options.calibration]), encoding="utf-8")
        words = ["--draft", str(draft), "--model", options.model, "--calibrate", str(few)]
        forerun("compress", "vocab-trim", *words, "--out", str(out))


def methods(options: argparse.Namespace) -> list[str]:
    """The methods of the comparison, with the drafts that there are."""
    names = ["plain"]
    for name in (*PHASES, "draft", "trimmed"):
        if (options.out / name / "config.json").exists():
            names.append(f"draft_model:model={options.out / name}")
    if options.other:
        names += [f"cross_vocab:model={options.other}{how}" for how in CROSS_VOCAB]
    return [*names, "stand", "auto"]


def compare(options: argparse.Namespace, mode: str) -> None:
    """One interleaved run on the held-out half of the suite."""
    words = ["--suite", "real", "--mode", mode, "--model", options.model, "--dtype", "bf16"]
    words += ["--data-dir", str(options.data_dir), "--methods", ",".join(methods(options))]
    words += ["--examples", str(options.examples), "--max-new-tokens", str(options.answer)]
    words += ["--tasks", options.tasks] if options.tasks else []
    forerun("bench", "run", *words, "--out", str(options.out / mode))


def forerun(*words: str) -> None:
    """A command of forerun; what it prints goes to stderr."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "forerun", *words]
    subprocess.run(command, check=True, env=env, stdout=sys.stderr)


def by_phase(folder: Path) -> Iterator[str]:
    """Held-out acceptance of each phase by domain, a Markdown table."""
    facts = json.loads((folder / "draft" / "draft.json").read_text(encoding="utf-8"))
    stages = facts["stages"]
    names = list(next(iter(stages.values())))
    yield "| phase | " + " | ".join(names) + " |"
    yield "|---|" + "---:|" * len(names)
    for phase, found in stages.items():
        yield f"| {phase} | " + " | ".join(f"{found[name]:.3f}" for name in names) + " |"
    yield ""
    shape = facts["shape"]
    yield (
        f"{shape['parameters']:,} parameters, {shape['size']['layers']} layers; "
        f"c {facts['c']:.3f}, tau {facts['tau']:.2f} with drafts of {facts['gamma']}."
    )


def main() -> None:
    parser = scripts.parser(__doc__)
    default = Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--model", help="target: name or folder")
    parser.add_argument("--out", type=Path, help="folder of drafts and runs")
    parser.add_argument("--data-dir", type=Path, default=default, help="folder of real data")
    parser.add_argument("--minutes", type=scripts.measure, help="training time of all phases")
    parser.add_argument("--prompts", type=scripts.count, default=900, help="to train on at most")
    parser.add_argument("--calibration", type=scripts.count, default=300, help="to trim with")
    parser.add_argument("--answer", type=scripts.count, default=160, help="tokens at most")
    parser.add_argument("--examples", type=scripts.count, default=2, help="prompts of a task")
    parser.add_argument("--tasks", help="to compare on, with commas; all of the suite by default")
    parser.add_argument("--other", help="name or folder of a model with another tokenizer")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES, help="to compare")
    parser.add_argument("--table", action="store_true", help="print the tables, run nothing")
    options = parser.parse_args()
    if not options.out or not (options.table or options.model):
        scripts.skip("it takes hours for a model; give --model and --out")
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        prompts = write_prompts(options)
        if options.minutes:
            train(options, prompts)
        trim(options, prompts)
        for mode in options.modes:
            compare(options, mode)
    if (options.out / "draft" / "draft.json").exists():
        print("\n".join(by_phase(options.out)))
    for mode in options.modes:
        if (options.out / mode / "records.jsonl").is_file():
            print(f"\n### {real.TITLES[mode]}\n")
            print("\n".join(real.table(options.out / mode)), flush=True)


if __name__ == "__main__":
    scripts.run(main)
