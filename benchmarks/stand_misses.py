"""Where STAND's drafts end on real prompts, and what its variants accept. Counts, no seconds.

    python benchmarks/stand_misses.py --models smollm2 qwen-coder --half tuning

The prompts are Spec-Bench questions of --data-dir, equally many of each category; a seeded draw
puts each into the tuning or the reporting half. Every drafter of --drafters answers each prompt
--answers times, one answer after the other, with a tree of fixed size, so that no measured cost
decides. The first table is tau by drafter, of all answers and of the first and the last ones. The
second table says, for the first drafter that is STAND, at what token each walk through a tree
ended, in per cent of the passes:

    no context    the memory has no entry for the last token
    no candidate  the emitted token is not among the stored ones
    wrong rank    it is stored, but its node was not drafted
    tree ended    the whole path was accepted, and the tree had no node below it

flat: share of the ends with the target's largest probability below 0.5. tokens: mean length of an
answer.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import scripts

import forerun
from forerun.api import Model
from forerun.core.records import Step
from forerun.drafters.stand import Stand
from forerun.engine.stats import Stats
from forerun.errors import DataError
from forerun.models.chat_template import TemplateError
from forerun.tasks.spec_bench import Question, SpecBenchTask

QUESTIONS = "prompts/spec_bench_question.jsonl"
CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
HALVES = ("tuning", "reporting")
CAUSES = ("no context", "no candidate", "wrong rank", "tree ended")
FLAT = 0.5  # of the target's largest probability, below which a law counts as flat
DRAFTERS = (
    "stand",
    "stand:context=8",
    "stand:tree=template",
    "stand:scope=tenant",
    "stand:seed_from_prompt=true",
    "stand:entries=20",
    "suffix",
    "fuse:parts=suffix+stand",
    "auto",
)


@dataclass
class Ends:
    """Counts of one category."""

    causes: Counter[str] = field(default_factory=Counter)
    flat: int = 0
    passes: int = 0
    answers: int = 0
    tokens: int = 0


class WatchedStand(Stand):
    """STAND that counts why its drafts end; it looks before it learns from a step."""

    name = "stand"
    ends: Ends

    def observe(self, step: Step) -> None:
        for i in range(len(step.seqs)):
            self._count_end(step, i)
        super().observe(step)

    def _count_end(self, step: Step, i: int) -> None:
        seq, tree, verdict = step.seqs[i], step.trees[i], step.verdicts[i]
        self.ends.passes += 1
        if len(step.emitted[i]) <= len(verdict.nodes):  # the text ended with an accepted token
            return
        node = verdict.nodes[-1] if verdict.nodes else -1
        stop = step.start(i) + len(verdict.nodes)
        self.ends.flat += bool(step.laws[i][node].max() < FLAT)
        found = self.memory(seq).lookup(seq.tokens[:stop], self.temper(seq))
        if found is None:
            self.ends.causes["no context"] += 1
        elif verdict.token not in found.ids:
            self.ends.causes["no candidate"] += 1
        elif len(tree.children(node)):
            self.ends.causes["wrong rank"] += 1
        else:
            self.ends.causes["tree ended"] += 1


def halves(path: Path, per_category: int) -> dict[str, list[Question]]:
    """The questions of the two halves, `per_category` of each category in each."""
    if not path.is_file():
        scripts.skip(f"no {path}; give --data-dir")
    by_category: dict[str, list[Question]] = {}
    for question in SpecBenchTask(path).questions:
        by_category.setdefault(question.group, []).append(question)
    if missing := set(CATEGORIES) - by_category.keys():
        raise DataError(f"{path} has no question of {', '.join(sorted(missing))}")
    found: dict[str, list[Question]] = {half: [] for half in HALVES}
    for category in CATEGORIES:
        drawn = random.Random(category).sample(by_category[category], 2 * per_category)
        for i, half in enumerate(HALVES):
            found[half] += drawn[i * per_category : (i + 1) * per_category]
    return found


def prompts(model: Model, questions: list[Question]) -> Iterator[tuple[str, list[int]]]:
    """Category and token ids of each question's first turn, with room for its answers."""
    for question in questions:
        try:
            ids = model.tokenizer.chat(question.turns[0])
        except TemplateError:  # a base model
            ids = model.tokenizer.encode(question.turns[0] + "\n\n")
        yield question.group, ids


def run(model: Model, drafter: str, questions: list[Question], options: argparse.Namespace) -> Row:
    """Answers all questions with one drafter."""
    row = Row(drafter)
    for at, (category, ids) in enumerate(prompts(model, questions)):
        given: str | Stand = drafter
        if drafter == "stand":  # one object per question: it forgets by itself in scope group
            given = WatchedStand()
            given.ends = row.ends.setdefault(category, Ends())
        (result,) = model.generate(
            [ids],
            n=options.answers,
            batch=1,
            temperature=options.temperature,
            max_new_tokens=options.tokens,
            seed=at,
            drafter=given,
            controller=options.controller,
        )
        row.add(category, result.samples)
    return row


class Row:
    """What one drafter did."""

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter
        self.total, self.first, self.last = Stats(), Stats(), Stats()
        self.by_category: dict[str, Stats] = {}
        self.ends: dict[str, Ends] = {}

    def add(self, category: str, samples: list[forerun.Sample]) -> None:
        for sample in samples:
            self.total.add(sample.stats)
            self.by_category.setdefault(category, Stats()).add(sample.stats)
            (self.first if sample.index == 0 else Stats()).add(sample.stats)
            if sample.index >= len(samples) // 2:
                self.last.add(sample.stats)
            if category in self.ends:
                self.ends[category].answers += 1
                self.ends[category].tokens += len(sample.tokens)

    def text(self) -> str:
        taus = [self.total.tau, self.first.tau, self.last.tau]
        taus += [self.by_category[c].tau for c in CATEGORIES]
        accepted = self.total.accepted / max(self.total.drafted, 1)
        cells = [f"{tau:.2f}" for tau in taus] + [f"{100 * accepted:.0f} %"]
        return f"| `{self.drafter}` | " + " | ".join(cells) + " |"


def print_ends(row: Row) -> None:
    print("\n| category | " + " | ".join(CAUSES) + " | flat | tokens |")
    print("|---|" + "---:|" * (len(CAUSES) + 2))
    for category, ends in row.ends.items():
        shares = [100 * ends.causes[cause] / max(ends.passes, 1) for cause in CAUSES]
        flat = 100 * ends.flat / max(sum(ends.causes.values()), 1)
        length = ends.tokens / max(ends.answers, 1)
        cells = [f"{share:.0f}" for share in (*shares, flat)]
        print(f"| {category} | " + " | ".join(cells) + f" | {length:.0f} |", flush=True)


def main() -> None:
    parser = scripts.parser(__doc__)
    default = Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--models", nargs="+", default=["smollm2"], help="names or folders")
    parser.add_argument("--data-dir", type=Path, default=default, help="folder of real data")
    parser.add_argument("--half", choices=HALVES, default=HALVES[0], help="of the prompts")
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), help="specs")
    parser.add_argument("--per-category", type=scripts.count, default=1, help="prompts in a half")
    parser.add_argument("--answers", type=scripts.count, default=16, help="to each prompt")
    parser.add_argument("--tokens", type=scripts.count, default=200, help="of an answer at most")
    parser.add_argument("--temperature", type=scripts.measure, default=0.6)
    parser.add_argument("--controller", default="fixed:nodes=16,depth=8")
    options = parser.parse_args()
    questions = halves(options.data_dir / QUESTIONS, options.per_category)[options.half]
    for name in options.models:
        model = forerun.load(name)
        print(f"\n## {Path(name).name}, {options.half} half\n")
        heads = ("drafter", "tau", "first", "last half", *CATEGORIES, "accepted")
        print("| " + " | ".join(heads) + " |\n|---|" + "---:|" * (len(heads) - 1), flush=True)
        rows = []
        for drafter in options.drafters:
            rows.append(run(model, drafter, questions, options))
            print(rows[-1].text(), flush=True)
        for row in rows:
            if row.ends:
                print_ends(row)


if __name__ == "__main__":
    scripts.run(main)
