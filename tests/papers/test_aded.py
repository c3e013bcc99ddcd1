"""ADED (arXiv 2407.12021): a matrix counted in a corpus drafts, and adapts while it is used.

The embedded reasoner, greedy, 12 held-out problems, 16 nodes; the corpus is 100 training problems
with solutions, or as many stories. The sheet's check: (i) best-first expansion of the matrix, (ii)
the search, (iii) search and updates; and a corpus of another kind. Measured when written, tau:
(i) 2.16, (ii) 2.11, (iii) 2.19; stories without and with updates 1.02 and 1.55, of 2.11 - 1.02
that is half brought back. Drafting took 9 % of a pass, both on a busy machine.
The paper's own figures (1.8 to 2.5 times faster, 7B to 33B models) need such models.
"""

from __future__ import annotations

import json

import pytest

import forerun
from forerun.controllers.fixed import Fixed
from forerun.drafters.aded import Aded
from forerun.engine.stats import Stats
from forerun.tasks.reasoning import ReasoningTask
from forerun.tasks.story import StoryTask

pytestmark = pytest.mark.paper

PROBLEMS, DOCUMENTS, NODES = 12, 100, 16
SETTINGS = {
    "(i) best first, no updates": ("problems", {"grower": "best_first", "increment": 0.0}),
    "(ii) search, no updates": ("problems", {"increment": 0.0}),
    "(iii) search and updates": ("problems", {}),
    "stories, no updates": ("stories", {"increment": 0.0}),
    "stories and updates": ("stories", {}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stats]:
    """Statistics by setting, on the same problems."""
    model, folder = forerun.load(), tmp_path_factory.mktemp("aded")
    train, story = ReasoningTask("train"), StoryTask(size=DOCUMENTS)
    solved = (train.example(i) for i in range(DOCUMENTS))
    corpora = {
        "problems": [e.prompt + e.reference for e in solved],
        "stories": [story.example(i).turns[0] for i in range(DOCUMENTS)],
    }
    for name, texts in corpora.items():
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), "utf-8")
    prompts = [ReasoningTask("heldout").example(i).prompt for i in range(PROBLEMS)]
    stats = {}
    for name, (corpus, options) in SETTINGS.items():
        drafter = Aded(
            corpus=(str(folder / f"{corpus}.jsonl"),), tokenizer=model.tokenizer, **options
        )
        results = model.generate(
            prompts,
            temperature=0,
            max_new_tokens=150,
            seed=1,
            drafter=drafter,
            controller=Fixed(nodes=NODES),
        )
        stats[name] = Stats()
        for result in results:
            stats[name].add(result.stats)
        print(f"{name}: tau {stats[name].tau:.2f}")
    return stats


def test_updates_help_and_the_search_is_about_best_first(found: dict[str, Stats]) -> None:
    first, search, updated = (found[name].tau for name in list(SETTINGS)[:3])
    assert updated > search
    assert search > 0.9 * first


def test_updates_bring_back_part_of_what_another_domain_loses(found: dict[str, Stats]) -> None:
    search, shifted, updated = (found[name].tau for name in [*SETTINGS][1:2] + [*SETTINGS][3:])
    print(f"lost {search - shifted:.2f}, brought back {updated - shifted:.2f}")
    assert search - shifted > 0.5
    assert updated - shifted > 0.25 * (search - shifted)


def test_the_search_costs_little_of_a_pass(found: dict[str, Stats]) -> None:
    """The sheet asks for a warning above 20 % of a pass: measured, said, and bounded loosely."""
    stats = found["(iii) search and updates"]
    share = stats.seconds["draft"] / stats.seconds["forward"]
    print(f"drafting {1e6 * stats.seconds['draft'] / stats.passes:.0f} us, {share:.0%} of a pass")
    assert share < 2  # the reasoner is small, and test machines are busy
