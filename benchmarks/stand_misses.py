"""Where STAND's drafts end on real prompts, and what its variants accept. Counts, no seconds.

    python benchmarks/stand_misses.py --models smollm2 qwen-coder --half tuning

The prompts are Spec-Bench questions of --data-dir, equally many of each category; a seeded draw
puts each into the tuning or the reporting half. `--half fresh` takes questions of neither half, and
as many problems of GSM8K, HumanEval and MBPP. The model answers each prompt --answers times
without drafts, and the most probable tokens of every position are kept. Then every drafter drafts
along the same answers, one after the other. A draft is accepted as far as it equals the answer.
So all drafters are compared on the same texts, and no measured cost decides.

The first table is tau: of all answers, of the first and of the second half of each prompt's, and by
category; its ratio to the first drafter (--pairs: to the drafter before it, for every second one),
as the geometric mean over prompts with a 95 % interval, with the number of prompts on which it is
higher; and drafted nodes per pass. The second table says at what token the
walk through each tree of the first drafter ended, in per cent of the passes:

    no context    the memory has no entry for the last token
    no candidate  the next token is not among the stored ones
    wrong rank    it is stored, but its node was not drafted
    tree ended    the whole path was accepted, and the tree had no node below it

flat: per cent of the ends at which the target's largest probability is below 0.5. first: per cent
of the passes that fall on the first answer, before the memory knows one. tokens: mean length of an
answer.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scripts

import forerun
from forerun import registry
from forerun.api import Model
from forerun.bench.metrics import geometric_mean, interval
from forerun.bench.replay.replay import agreed
from forerun.core.dice import SeededDice
from forerun.core.mixins import forget
from forerun.core.records import Plan, Sequence, Step, Verdict
from forerun.core.roles import Drafter
from forerun.core.sampling import Sampling, softmax
from forerun.drafters.stand import Stand
from forerun.errors import DataError
from forerun.models.chat_template import TemplateError
from forerun.tasks.gsm8k import Gsm8kTask
from forerun.tasks.humaneval import HumanEvalTask
from forerun.tasks.mbpp import MbppTask
from forerun.tasks.spec_bench import Question, SpecBenchTask

QUESTIONS = "prompts/spec_bench_question.jsonl"
CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
HALVES = ("tuning", "reporting")
FRESH = "fresh"  # prompts of neither half
FRESH_TASKS = {  # category -> task and file
    "gsm8k": (Gsm8kTask, "prompts/gsm8k_test.jsonl.gz"),
    "humaneval": (HumanEvalTask, "prompts/HumanEval.jsonl.gz"),
    "mbpp": (MbppTask, "prompts/mbpp.jsonl.gz"),
}
CAUSES = ("no context", "no candidate", "wrong rank", "tree ended")
FLAT = 0.5  # of the target's largest probability, below which a law counts as flat
HALF_SIZE = 1  # questions of each category in a half, in the published tables
KEPT = 32  # most probable tokens of every position
PLANS = {  # name -> nodes, depth, min acceptance of a node
    "16": (16, 8, 0.0),
    "32": (32, 16, 0.0),
    "16, 0.1": (16, 8, 0.1),
    "16, 0.2": (16, 8, 0.2),
}
DRAFTERS = (
    "stand",
    "stand:context=2",
    "stand:context=6",
    "stand:context=8",
    "stand:choice=top",
    "stand:tree=template",
    "stand:entries=20",
    "stand:scope=tenant",
    "stand:seed_from_prompt=true",
    "stand:copy_prompt=true",
    "stand:copy_prompt=true,scope=tenant",
    "suffix",
    "fuse:parts=suffix+stand",
    "fuse:parts=prompt_lookup+stand",
)


@dataclass
class Answer:
    """Tokens [n] of an answer, and the most probable tokens [n, KEPT] at each position."""

    tokens: list[int] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    probs: list[np.ndarray] = field(default_factory=list)  # as sampled from
    raw: list[np.ndarray] = field(default_factory=list)  # at temperature 1


@dataclass
class Recorded:
    """A prompt and its answers."""

    category: str
    prompt: list[int]
    answers: list[Answer]


class KnownLaws:
    """The kept probabilities of an answer from a position on, in the form drafters read."""

    def __init__(self, answer: Answer, at: int) -> None:
        self.answer, self.at, self.top_entries = answer, at, self

    def entries(self, nodes: list[int], num: int, *, is_raw: bool) -> tuple[np.ndarray, np.ndarray]:
        """As `TopEntries.entries`; nodes lie on the path of the answer."""
        kept, part = self.answer, slice(self.at, self.at + len(nodes))
        ids, probs = np.array(kept.ids[part]), np.array((kept.raw if is_raw else kept.probs)[part])
        return ids[:, :num].astype(np.int32), probs[:, :num].astype(np.float32)


@dataclass
class Counts:
    """What one drafter did on some answers."""

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    flat: int = 0

    @property
    def tau(self) -> float:
        return self.tokens / max(self.passes, 1)

    def add(self, other: Counts) -> None:
        self.tokens, self.passes = self.tokens + other.tokens, self.passes + other.passes
        self.drafted, self.flat = self.drafted + other.drafted, self.flat + other.flat
        self.causes += other.causes


def by_category(path: Path) -> dict[str, list[Question]]:
    """The Spec-Bench questions of each category."""
    if not path.is_file():
        scripts.skip(f"no {path}; give --data-dir")
    found: dict[str, list[Question]] = {}
    for question in SpecBenchTask(path).questions:
        found.setdefault(question.group, []).append(question)
    if missing := set(CATEGORIES) - found.keys():
        raise DataError(f"{path} has no question of {', '.join(sorted(missing))}")
    return found


def halves(path: Path, per_category: int) -> dict[str, list[Question]]:
    """The questions of the two halves, `per_category` of each category in each."""
    questions = by_category(path)
    found: dict[str, list[Question]] = {half: [] for half in HALVES}
    for category in CATEGORIES:
        drawn = random.Random(category).sample(questions[category], 2 * per_category)
        for i, half in enumerate(HALVES):
            found[half] += drawn[i * per_category : (i + 1) * per_category]
    return found


def fresh(data: Path, per_category: int) -> list[Question]:
    """Questions of neither half, and problems that are no question of Spec-Bench."""
    questions, seen = by_category(data / QUESTIONS), halves(data / QUESTIONS, HALF_SIZE)
    used = {question.id for half in seen.values() for question in half}
    asked = "\n".join(turn for some in questions.values() for q in some for turn in q.turns)
    pools = {name: [q for q in questions[name] if q.id not in used] for name in CATEGORIES}
    for name, (task, file) in FRESH_TASKS.items():
        if not (data / file).is_file():
            scripts.skip(f"no {data / file}; give --data-dir")
        examples = [one for one in task(data / file).examples if one.source not in asked]
        pools[name] = [Question(one.id, name, one.turns) for one in examples]
    draws = [random.Random(f"{FRESH} {name}").sample(pools[name], per_category) for name in pools]
    return [question for drawn in draws for question in drawn]


def prompts(
    model: Model, questions: list[Question], tokens: int
) -> Iterator[tuple[str, list[int]]]:
    """Category and ids of each question's first turn, cut on the left to leave room for answers."""
    room = model.target.context - tokens
    for question in questions:
        try:
            ids = model.tokenizer.chat(question.turns[0])
        except TemplateError:  # a base model
            ids = model.tokenizer.encode(question.turns[0] + "\n\n")
        yield question.group, ids[-room:]


def record(model: Model, questions: list[Question], options: argparse.Namespace) -> list[Recorded]:
    """The answers of a model without drafts, all answers to a prompt at once."""
    found = []
    for at, (category, ids) in enumerate(prompts(model, questions, options.tokens)):
        answers = [Answer() for _ in range(options.answers)]

        def keep(step: Step, answers: list[Answer] = answers) -> None:
            for i, seq in enumerate(step.seqs):
                add_position(answers[seq.index], step.emitted[i][0], step.laws[i])

        model.generate(
            [ids],
            n=options.answers,
            temperature=options.temperature,
            max_new_tokens=options.tokens,
            seed=at,
            drafter="none",
            on_step=keep,
        )
        found.append(Recorded(category, ids, answers))
    return found


def add_position(answer: Answer, token: int, laws: Any) -> None:
    """Keeps a token and the top of its distribution."""
    probs, logits = laws[-1], laws.logits(-1)
    top = np.argpartition(-logits, KEPT)[:KEPT]
    top = top[np.argsort(-logits[top], kind="stable")]
    answer.tokens.append(token)
    answer.ids.append(top)
    answer.probs.append(probs[top].copy())
    answer.raw.append(softmax(logits)[top])


def follow(drafter: Drafter, seq: Sequence, answer: Answer, plan: Plan) -> Counts:
    """Drafts along one answer: accepts what equals it, adds the next token, lets it learn."""
    counts, text = Counts(), answer.tokens
    drafter.start(seq)
    while seq.num_left:
        at = seq.num_generated
        (tree,) = drafter.propose([seq], [plan.within(seq.num_left - 1)], [seq.dice])
        nodes = agreed(tree, text, at)
        emitted = text[at : at + len(nodes) + 1]
        end = at + len(nodes)
        if isinstance(drafter, Stand) and end < len(text):
            children = tree.children(nodes[-1] if nodes else -1)
            context = seq.tokens + emitted[:-1]
            counts.causes[cause(drafter, seq, context, text[end], len(children))] += 1
            counts.flat += bool(answer.probs[end][0] < FLAT)
        seq.tokens += emitted
        laws: Any = KnownLaws(answer, at)
        verdict = Verdict(nodes, emitted[-1])
        drafter.observe(Step([seq], [plan], [tree], [laws], [verdict], [emitted]))
        counts.tokens, counts.passes = counts.tokens + len(emitted), counts.passes + 1
        counts.drafted += len(tree)
    drafter.finish(seq)
    return counts


def cause(drafter: Stand, seq: Sequence, context: list[int], token: int, children: int) -> str:
    """Why the walk ended before `token`; asked before the drafter learns from the step."""
    found = drafter.memory(seq).lookup(context, drafter.temper(seq))
    if found is None:
        return CAUSES[0]
    if token not in found.ids:
        return CAUSES[1]
    return CAUSES[2] if children else CAUSES[3]


class Row:
    """A drafter with a plan on all recorded prompts."""

    def __init__(self, model: Model, spec: str, plan: str, found: list[Recorded], t: float) -> None:
        self.spec, self.plan = spec, plan
        self.by_prompt: list[Counts] = []
        self.by_category: dict[str, Counts] = {}
        self.total, self.first, self.last = Counts(), Counts(), Counts()
        nodes, depth, least = PLANS[plan]
        drafter = registry.make("drafter", spec, **model.offers)
        drafter.bind(model.target)
        for group, one in enumerate(found):
            own = Counts()
            for index, answer in enumerate(one.answers):
                seq = sequence(one, answer, group, index, t)
                counts = follow(drafter, seq, answer, Plan(nodes, depth, min_acceptance=least))
                own.add(counts)
                if index == 0:
                    self.first.add(counts)
                if 2 * index >= len(one.answers):
                    self.last.add(counts)
            forget(drafter, group)
            self.by_prompt.append(own)
            self.by_category.setdefault(one.category, Counts()).add(own)
            self.total.add(own)

    def text(self, base: Row) -> str:
        pairs = zip(self.by_prompt, base.by_prompt, strict=True)
        ratios = [own.tau / other.tau for own, other in pairs]
        low, high = interval(ratios) or (0.0, math.inf)
        taus = [c.tau for c in (self.total, self.first, self.last)]
        taus += [counts.tau for counts in self.by_category.values()]
        cells = [f"{tau:.2f}" for tau in taus]
        cells += [f"{geometric_mean(ratios):.3f} ({low:.3f} to {high:.3f})"]
        cells += [f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"]
        cells += [f"{self.total.drafted / self.total.passes:.1f}"]
        return f"| `{self.spec}` | {self.plan} | " + " | ".join(cells) + " |"


def sequence(one: Recorded, answer: Answer, group: int, index: int, temperature: float) -> Sequence:
    """The sequence of an answer before its first token."""
    law, size = Sampling(temperature=temperature), len(answer.tokens)
    dice = SeededDice(1000 * group + index)
    return Sequence(list(one.prompt), len(one.prompt), law, dice, size, group=group, index=index)


def print_ends(row: Row, found: list[Recorded]) -> None:
    """The table of causes."""
    print("\n| category | " + " | ".join(CAUSES) + " | flat | first | tokens |")
    print("|---|" + "---:|" * (len(CAUSES) + 3))
    for category, counts in [*row.by_category.items(), ("all", row.total)]:
        shares = [counts.causes[name] / counts.passes for name in CAUSES]
        shares.append(counts.flat / max(sum(counts.causes.values()), 1))
        some = [one for one in found if category in (one.category, "all")]
        lengths = [len(answer.tokens) for one in some for answer in one.answers]
        first = sum(len(one.answers[0].tokens) for one in some) / sum(lengths)
        shares.append(first)
        cells = [f"{100 * share:.0f}" for share in shares]
        print(f"| {category} | " + " | ".join(cells) + f" | {np.mean(lengths):.0f} |", flush=True)


def main() -> None:
    parser = scripts.parser(__doc__)
    default = Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--models", nargs="+", default=["smollm2"], help="names or folders")
    parser.add_argument("--data-dir", type=Path, default=default, help="folder of real data")
    parser.add_argument(
        "--half", choices=(*HALVES, FRESH), default=HALVES[0], help="of the prompts"
    )
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), help="specs")
    parser.add_argument("--pairs", action="store_true", help="compare each second with the first")
    parser.add_argument("--per-category", type=scripts.count, default=1, help="prompts in a half")
    parser.add_argument("--answers", type=scripts.count, default=16, help="to each prompt")
    parser.add_argument("--tokens", type=scripts.count, default=200, help="of an answer at most")
    parser.add_argument("--temperature", type=scripts.measure, default=0.6)
    options = parser.parse_args()
    if options.half == FRESH:
        questions = fresh(options.data_dir, options.per_category)
    else:
        questions = halves(options.data_dir / QUESTIONS, options.per_category)[options.half]
    for name in options.models:
        model = forerun.load(name)
        found = record(model, questions, options)
        print_drafters(f"{Path(name).name}, {options.half}", model, found, options)


def print_drafters(
    title: str, model: Model, found: list[Recorded], options: argparse.Namespace
) -> None:
    """The tables of one model."""
    groups = dict.fromkeys(one.category for one in found)
    heads = ("drafter", "nodes", "tau", "first", "second half", *groups)
    heads += ("ratio", "higher on", "drafted")
    print(f"\n## {title}\n\n| " + " | ".join(heads) + " |")
    print("|---|---|" + "---:|" * (len(heads) - 2), flush=True)
    first, *others = options.drafters
    plans = ["16"] if options.pairs else list(PLANS)
    base: Row | None = None
    works = [(first, plan) for plan in plans] + [(spec, "16") for spec in others]
    for number, (spec, plan) in enumerate(works):
        row = Row(model, spec, plan, found, options.temperature)
        if base is None or options.pairs and number % 2 == 0:
            base = row
        print(row.text(base), flush=True)
    if base is not None and not options.pairs and sum(base.total.causes.values()):
        print_ends(base, found)


if __name__ == "__main__":
    scripts.run(main)
