"""What the parts share: models, texts, prompts with the target's answers, and decoding.

Prompts are of three domains. The target's answers to them are generated once. Of ten prompts, one
is for tests and one to choose learning rates and checkpoints; both are of held-out texts.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from scripts import Row, Store

import forerun
from forerun.api import Model
from forerun.controllers.fixed import Fixed
from forerun.drafters.draft_model import DraftModel
from forerun.errors import ConfigError
from forerun.training.data.documents import Documents, joined
from forerun.training.data.texts import Texts
from forerun.training.drafts.acceptance import held_out_acceptance
from forerun.training.drafts.data import GRID, DraftData, Prompt
from forerun.training.drafts.measure import frozen
from forerun.training.drafts.phases import TWO, Budget, Phase, Trainer
from forerun.training.export import save
from forerun.training.language_model import build_model
from forerun.training.progress import silent
from forerun.training.recipes.workbench import MODELS

CORPORA = {"prose": "*.txt.gz", "code": "*.tar.gz"}  # in the folder corpora of the data
DOMAINS = (*CORPORA, "questions")
HELD_OUT = 0.05  # as in `forerun train workbench`
PROMPT, ANSWER = 48, 48  # tokens
NUM_PROMPTS, QUICK_PROMPTS = 480, 60
TEST, TUNE = 0, 5  # of ten prompts
PRETRAIN, QUICK_PRETRAIN = 250, 3  # steps of 4096 tokens
MICRO = 512  # tokens per micro-batch; a step has two


@dataclass(frozen=True)
class PartSizes:
    """What a part measures; parts add their own. seeds: runs of each row."""

    seeds: int


S = TypeVar("S", bound=PartSizes)


@dataclass
class Bench:
    """What a part is run with. out: where results go."""

    out: Path
    data: Path
    workbench: Path
    quick: bool = False

    def part(
        self, part: str, full: S, quick: S, names: Sequence[str] = ("target", "draft")
    ) -> tuple[S, Store]:
        """The sizes and the rows of a part.

        With other sizes or models (`names`) earlier rows are dropped.
        """
        sizes = quick if self.quick else full
        models = [self.folder(name) / "model.safetensors" for name in names]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in models)).hexdigest()
        options = {"sizes": asdict(sizes), "workbench": digest[:16]}
        return sizes, Store(self.out / f"{part}.json", json.loads(json.dumps(options)))

    def write(self, part: str, *blocks: str) -> None:
        """Prints tables and writes them as `<part>.md`."""
        text = "\n\n".join(block for block in blocks if block) + "\n"
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{part}.md").write_text(text, encoding="utf-8")
        print(text, end="", flush=True)

    @cached_property
    def target(self) -> Model:
        """The target of the workbench."""
        return forerun.load(str(self.folder("target")), max_seqs=32)

    @cached_property
    def teacher(self) -> Any:
        """The target as a transformers module."""
        return frozen(str(self.folder("target")))

    def folder(self, name: str) -> Path:
        """The folder of a model of the workbench. Raises ConfigError if it is missing."""
        found = self.workbench / name
        if not (found / "config.json").exists():
            raise ConfigError(
                f"there is no model in {found}; make it with `forerun train workbench`, or give "
                "another folder with --workbench"
            )
        return found

    def draft(self) -> Any:
        """The draft of the workbench."""
        return frozen(str(self.folder("draft")))

    def new_draft(self, seed: int, size: Any = None) -> Any:
        """A draft with random weights, of the workbench's shape by default."""
        return build_model(
            size or MODELS["draft"].size,
            self.target.tokenizer.inner,
            seed,
            vocab_size=self.teacher.config.vocab_size,
        )

    def texts(self, domain: str, length: int = PROMPT + ANSWER) -> Texts:
        """The corpora of a domain, in pieces of `length` tokens."""
        folder = self.out / "corpora" / domain
        for file in sorted((self.data / "corpora").glob(CORPORA[domain])):
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
        return Texts(folder, length, HELD_OUT)

    def training_text(self, domain: str) -> Path:
        """A file with the texts of a domain that are not held out."""
        path = self.out / "texts" / f"{domain}.txt"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(self.texts(domain).trained()), encoding="utf-8")
        return path

    @cached_property
    def held_out(self) -> Documents:
        """The held-out pieces of the corpora, of up to 256 tokens."""
        cut = [self.texts(name, 256).pieces(self.target.tokenizer.inner)[1] for name in CORPORA]
        return joined([documents for each in cut for documents in each.values() if len(documents)])

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts, domains in turn; those for tests and for choices are of held-out texts."""
        sources = {domain: self._sources(domain) for domain in DOMAINS}
        found, num = list[Prompt](), QUICK_PROMPTS if self.quick else NUM_PROMPTS
        for i in range(num):
            domain = DOMAINS[i % len(DOMAINS)]
            trained, held = sources[domain]
            text, answer = next(held if i % 10 in (TEST, TUNE) else trained)
            found.append(Prompt(text, answer, domain))
        return found

    def _sources(self, domain: str) -> tuple[Iterator[tuple[str, str]], Iterator[tuple[str, str]]]:
        """(Prompt, answer) pairs of a domain to train on, and held-out ones."""
        if domain == "questions":
            pairs = iter(self._shuffled(questions(self.data)))
            return pairs, pairs
        trained, held = self.texts(domain).pieces(self.target.tokenizer.inner)
        parts = [trained], [*held.values()]
        return tuple(iter(self._shuffled([*self._pairs(part)])) for part in parts)  # type: ignore

    def _pairs(self, parts: Sequence[Documents]) -> Iterator[tuple[str, str]]:
        decode = self.target.tokenizer.inner.decode
        for part in parts:
            for i in np.flatnonzero(part.lengths() == PROMPT + ANSWER):
                ids = part.document(int(i))
                yield decode(ids[:PROMPT]), decode(ids[PROMPT:])

    def _shuffled(self, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))]

    @cached_property
    def material(self) -> DraftData:
        """The prompts and the target's answers; `held` are the answers for choices."""
        made = DraftData(
            target=self.target,
            prompts=self.prompts,
            folder=self.out / "answers",
            width=256,
            max_tokens=ANSWER,
            micro_tokens=MICRO,
        )
        made.generate(0, 32)
        self.test, made.held = self._of(made, TEST), self._of(made, TUNE)
        made.trained = np.flatnonzero(~np.isin(made.numbers % 10, (TEST, TUNE)))
        made.kept = [i for i in range(len(self.prompts)) if i % 10 not in (TEST, TUNE)]
        return made

    def _of(self, made: DraftData, which: int) -> np.ndarray:
        """The answers at temperature 1 to a tenth of the prompts."""
        found = np.flatnonzero(made.numbers % 10 == which)
        return found[np.arange(len(found)) % len(GRID) == len(GRID) - 1]

    def material_of(self, seed: int, micro: int = MICRO) -> DraftData:
        """The same with batches of another seed or size."""
        made = copy.copy(self.material)
        made.seed, made.micro_tokens = seed, micro
        return made

    def trainer(
        self, key: str, model: Any, steps: int, seed: int, *, rate: float = 1.0, micro: int = MICRO
    ) -> Trainer:
        """A trainer with a folder of its own; it keeps the weights that do best at choices."""
        budget = Budget(max_steps=steps, rate=rate, seed=seed)
        state = self.out / "state" / key
        return Trainer(model, self.teacher, self.material_of(seed, micro), budget, state)

    def distilled(self, key: str, model: Any, phase: Phase, trainer: Trainer) -> dict[str, float]:
        """Trains one phase; returns the acceptance at choices of the weights that are kept."""
        trainer.run(phase, silent)
        trainer.best.restore(model)
        shutil.rmtree(self.out / "state" / key)
        return trainer.acceptance()

    def pretrained(self, name: str, text: Path) -> Path:
        """The folder of a draft that was pre-trained on one text only; made if it is missing."""
        out = self.out / "pretrained" / name
        if not (out / "config.json").exists():
            model, key, share = self.new_draft(0), f"pretrained-{name}", TWO[0]
            steps = QUICK_PRETRAIN if self.quick else PRETRAIN
            trainer = self.trainer(key, model, round(steps / share), 0, micro=2048)
            phase = Phase("pretrain", share, trainer.material.text(text), "ce")
            self.distilled(key, model, phase, trainer)
            save(model, out, tokenizer=self.target.tokenizer.inner)
        return out

    def prose_draft(self) -> Any:
        """A draft that was pre-trained on prose only, as a module to train."""
        folder = self.pretrained("prose", self.training_text("prose"))
        return frozen(str(folder)).train().requires_grad_(True)

    def acceptance(self, draft: Any) -> dict[str, float]:
        """Acceptance on the answers for tests: all, of equal argmax (greedy), by domain."""
        made = self.material
        return held_out_acceptance(
            draft.eval(), self.teacher, made.records, self.test, made.domains, 4096
        )

    def decoded(self, draft: Any, temperature: float, gamma: int, seed: int) -> Row:
        """Tokens and passes of each prompt for tests, with drafts of gamma tokens."""
        prompts = self.material.ids[TEST::10]
        with tempfile.TemporaryDirectory() as name:
            save(draft, Path(name) / "draft", tokenizer=self.target.tokenizer.inner)
            drafter = DraftModel(
                model=f"{name}/draft", tokenizer=self.target.tokenizer, target=self.target.target
            )
            results = self.target.generate(
                prompts,
                drafter=drafter,
                controller=Fixed(nodes=gamma, depth=gamma),
                temperature=temperature,
                max_new_tokens=ANSWER,
                seed=seed,
                batch=16,
            )
        stats = [result.stats for result in results]
        return {"tokens": [s.generated for s in stats], "passes": [s.passes for s in stats]}


def questions(data: Path) -> list[tuple[str, str]]:
    """Questions in words with their answers: GSM8K and MBPP."""
    found = []
    for name, question, answer in (("gsm8k_test", "question", "answer"), ("mbpp", "text", "code")):
        with gzip.open(data / "prompts" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        found += [(f"Question: {row[question]}\nAnswer:", f" {row[answer]}") for row in rows]
    return found
