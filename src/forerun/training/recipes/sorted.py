"""A sorted draft: one model with first layers that draft alone, for targets of several sizes.

Kavehzadeh et al., "S2D: Sorted Speculative Decoding for More Efficient Deployment of Nested Large
Language Models", 2024. All depths learn together, with a shared norm and head. No target is needed
to train; the sub-model is chosen when the draft meets its target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

import forerun
from forerun.api import Model
from forerun.drafters._sub_model import RatedExit, fastest, rated_exits, sub_runners
from forerun.errors import ConfigError
from forerun.models.draft_link import check_vocabulary, load_draft
from forerun.models.identity import tokenizer_hash
from forerun.models.paths import located
from forerun.models.sub_models import Exits, write_exits
from forerun.models.tokenizer import Tokenizer
from forerun.registry import ModelName
from forerun.training.data.documents import Batches, Documents, Micro
from forerun.training.drafts.data import MAX_TEXT_TOKENS, running_text, text_hash
from forerun.training.drafts.measure import frozen, write_json
from forerun.training.drafts.shapes import shape
from forerun.training.drafts.sorted import SortedModel
from forerun.training.export import save
from forerun.training.language_model import build_model, has_linear_head
from forerun.training.loop import LoopOptions, Progress
from forerun.training.progress import Watch
from forerun.training.recipes.base import LoopRecipe

WIDTH = 256  # tokens per row
HELD_OUT = 20  # every twentieth row is held out


@dataclass(kw_only=True, eq=False)
class Sorted(LoopRecipe):
    """Trains a draft with first layers that draft alone, from text; it serves several targets.

    corpus: file or folder of running text.
    model: a target; the draft has its tokenizer.
    targets: more targets with the same tokenizer, for the report.
    exits: depths of the sub-models, in ascending order; the last is the depth of the draft.
    hidden: width of the draft.
    init: a model that gives the first layers to start from; none starts from random weights.
    micro_tokens: padded tokens per micro-batch; a step has two.
    rate: factor of all learning rates.
    """

    may_change: ClassVar[frozenset[str]] = LoopRecipe.may_change | {"targets", "rate"}
    minimums = LoopRecipe.minimums | {"hidden": 32, "micro_tokens": 1, "rate": 1e-6}

    corpus: Path
    model: ModelName = "reasoner"
    targets: tuple[ModelName, ...] = ()
    exits: tuple[int, ...] = (2, 4, 6)
    hidden: int = 128
    init: ModelName | None = None
    micro_tokens: int = 4096
    rate: float = 1.0
    minutes: float | None = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        depths = list(self.exits)
        if not depths or depths[0] < 1 or depths != sorted(set(depths)):
            raise ConfigError(
                f"exits must be depths in ascending order from 1 on, got {depths}; e.g. "
                "--exits 2 --exits 4 --exits 6"
            )

    def fixed(self) -> dict[str, Any]:
        tokenizer = Tokenizer.load(located(self.model))
        return {"tokenizer_hash": tokenizer_hash(tokenizer), "corpus_hash": text_hash(self.corpus)}

    def loop_options(self) -> LoopOptions:
        options = super().loop_options()
        rates = {name: self.rate * getattr(options, name) for name in ("matrix_rate", "other_rate")}
        return LoopOptions(**vars(options) | rates)

    def prepare(self, out: Path, watch: Watch) -> None:
        self.target = forerun.load(self.model, max_seqs=1)
        self.others = {name: self.load_target(name) for name in self.targets}
        width = min(WIDTH, self.target.target.context)
        rows = running_text(self.target.tokenizer, self.corpus, width, MAX_TEXT_TOKENS)
        places = np.arange(len(rows))
        held = places[places % HELD_OUT == 0]
        self.text = max((rows.document(int(i)).tolist() for i in held), key=len)
        self.module = self.start()
        self.trained = SortedModel(self.module, self.batches_of(rows, places), self.exits)

    def load_target(self, name: str) -> Model:
        """Another target. Raises ConfigError if it has another tokenizer."""
        found = forerun.load(name, max_seqs=1)
        self.check_tokenizer(name, found.tokenizer)
        return found

    def check_tokenizer(self, name: str, tokenizer: Tokenizer) -> None:
        """Raises ConfigError if another model's tokenizer is not the target's."""
        names, fix = f"{name} and {self.model}", "use models of one family"
        check_vocabulary(self.target.tokenizer, tokenizer, names, fix)

    def batches_of(self, rows: Documents, places: np.ndarray) -> Batches:
        """Batches of all rows that are not held out."""
        kept = places[places % HELD_OUT > 0]
        if not len(kept):
            raise ConfigError(
                f"{self.corpus} has {len(rows)} row of {WIDTH} tokens, and one is held out; give "
                "more text"
            )
        return Batches(rows, self.micro_tokens, prompt_weight=1.0, only=kept, seed=self.seed)

    def start(self) -> PreTrainedModel:
        """The draft before training: random, or the first layers of `init`."""
        depth = self.exits[-1]
        if self.init is None:
            tokenizer = self.target.tokenizer
            return build_model(
                shape(self.hidden, depth),
                tokenizer.inner,
                self.seed,
                vocab_size=self.target.target.vocab_size,
                max_position_embeddings=self.target.target.context,
                eos_token_id=min(tokenizer.eos_ids, default=None),
            )
        self.check_tokenizer(self.init, Tokenizer.load(located(self.init)))
        found = frozen(self.init).train().requires_grad_(True)
        if not has_linear_head(found):
            raise ConfigError(
                f"{self.init} is a {found.config.model_type}, and sorted drafts start from llama, "
                "mistral, qwen2 and qwen3; use such a model, or drop --init"
            )
        layers = found.model.layers
        if len(layers) < depth:
            raise ConfigError(
                f"{self.init} has {len(layers)} layers that can be taken, and the last exit is "
                f"{depth}; use lower exits"
            )
        found.model.layers, config = layers[:depth], found.config
        config.num_hidden_layers = depth
        if getattr(config, "layer_types", None) is not None:  # the kind of every layer
            config.layer_types = config.layer_types[:depth]
        return found

    def batches(self, start: int) -> Iterator[list[Micro]]:
        return self.trained.batches(start)

    def loss(self, micro: Micro) -> Tensor:
        return self.trained.loss(micro)

    def parameters(self) -> dict[str, Parameter]:
        return self.trained.parameters()

    def save(self, out: Path) -> None:
        save(self.module, out, tokenizer=self.target.tokenizer.inner)
        write_exits(out, Exits(self.exits, tuple(self.text)))

    def report(self, out: Path, progress: Progress) -> list[str]:
        draft = load_draft(str(out), "auto", "auto", 1, self.target.tokenizer)
        assert draft.exits is not None
        parts = sub_runners(draft, draft.exits)
        lines, found = super().report(out, progress), dict[str, list[RatedExit]]()
        for name, model in {self.model: self.target, **self.others}.items():
            found[name] = rated_exits(parts, draft.exits.text, model.target)
            lines.append(f"{name}: {described(found[name])}")
        write_json(
            out / "draft.json", {name: [e._asdict() for e in f] for name, f in found.items()}
        )
        return lines


def described(found: list[RatedExit]) -> str:
    """The sub-models for a target, and which is chosen."""
    shown = [
        f"{one.layers} layers alpha {one.alpha:.3f} c {one.c:.3f} speed-up {one.speedup:.2f}"
        for one in found
    ]
    return f"{'; '.join(shown)}; {fastest(found).layers} layers are chosen"
