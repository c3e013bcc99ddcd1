"""Questions of the reasoning task, each with the computation that answers it."""

from __future__ import annotations

from forerun.utils.text import joined

from ._reasoning_words import WORTH_UNITS
from ._reasoning_world import Node, Shape, Story


def ask(story: Story, shape: Shape) -> None:
    asks = [_ask_one, _ask_total, _ask_total, _ask_difference]
    asks += [_ask_worth, _ask_share] if story.setting.price else [_ask_share]
    if shape.steps[1] > 6:
        asks = [
            _ask_total,
            _ask_total,
            _ask_all,
            _ask_all,
            _ask_worth if story.setting.price else _ask_all,
            _ask_difference,
        ]
    story.rng.choice(asks)(story)


def _ask_one(story: Story) -> None:
    s = story.rng.choice(story.subjects)
    story.goal = story.current[s]
    end = "[ in the end| now| at the end|]" if story.events else ""
    story.question = story.say("How many {u} {aux} {s} {base}" + end + "?", s=s)


def _total(story: Story, chosen: list[str]) -> int:
    """The node that adds the quantities of the chosen subjects."""
    args, needs = tuple(story.value(s) for s in chosen), tuple(story.current[s] for s in chosen)
    each = joined([f"{s} {story.value(s)}" for s in chosen], "and")
    claim = story.clause("[together they have|the total is|the sum is|together that makes]")
    why = story.clause("[we add|we put together|we take together] {each}", each=each)
    return story.add(
        Node(sum(args), "+", args, needs, claim, "[total|together|sum]", why, story.unit)
    )


def _ask_total(story: Story) -> None:
    chosen = story.rng.sample(
        story.subjects, 2 if len(story.subjects) < 4 else story.rng.randint(2, 3)
    )
    story.goal = _total(story, chosen)
    template = (
        "[How many {u} do {names} have together?|What is the total number of {u} of {names}?]"
    )
    story.question = story.say(template, names=joined(chosen, "and"))


def _ask_all(story: Story) -> None:
    story.goal = _total(story, story.subjects)
    story.question = story.say(
        "[How many {u} are there in all?|What is the total number of {u}?"
        "|How many {u} are there altogether?]"
    )


def _ask_difference(story: Story) -> None:
    a, b = story.rng.sample(story.subjects, 2)
    a, b = (a, b) if story.value(a) >= story.value(b) else (b, a)
    args, needs = (story.value(a), story.value(b)), (story.current[a], story.current[b])
    claim = "[the difference is|the gap is|that is a difference of]"
    whys = "[{a} {v} {x} and {b} {y}|we compare {x} for {a} and {y} for {b}]"
    why = story.clause(whys, a=a, b=b, x=args[0], y=args[1])
    story.goal = story.add(
        Node(args[0] - args[1], "-", args, needs, claim, "difference", why, story.unit)
    )
    template = (
        "[How many more {u} {aux} {a} {base} than {b}?"
        "|What is the difference in {u} between {a} and {b}?]"
    )
    story.question = story.say(template, a=a, b=b)


def _ask_worth(story: Story) -> None:
    whole = story.rng.random() < 0.5
    base = (
        _total(story, story.rng.sample(story.subjects, 2))
        if whole
        else story.current[story.rng.choice(story.subjects)]
    )
    x = story.nodes[base].value
    top = max(2, min(25 if story.cap > 900 else 9, story.cap // max(1, x)))
    n, word = story.rng.randint(2, top), story.setting.worth
    unit = WORTH_UNITS[word]
    claim = f"[the {word} is|that comes to|this makes]"
    why = story.clause(
        "[{n} {unit} for each|each counts {n} {unit}|we multiply by {n}]", n=n, unit=unit
    )
    story.goal = story.add(Node(x * n, "*", (n, x), (base,), claim, word, why, unit))
    owners = [s for s in story.subjects if story.current[s] in story.nodes[base].needs]
    owner = joined(owners, "and") if whole else None
    owner = owner or next(s for s in story.subjects if story.current[s] == base)
    asked = (
        "[What is the total {word} for the {u} of {owner}?"
        "|How large is the {word} of all {u} of {owner}, in {unit}?]"
    )
    story.question = story.say(
        story.setting.price + " " + asked, n=n, word=word, unit=unit, owner=owner
    )


def _ask_share(story: Story) -> None:
    s = story.rng.choice(story.subjects)
    x = story.value(s)
    choices = [k for k in range(2, 10) if x % k == 0 and x > k]
    if not choices:
        return _ask_one(story)
    k = story.rng.choice(choices)
    claim = "[each part is|each one gets|one share is]"
    why = story.clause(
        "[we split {x} into {k}|there are {k} equal parts|we divide by {k}]", x=x, k=k
    )
    story.goal = story.add(
        Node(x // k, "/", (x, k), (story.current[s],), claim, "each", why, story.unit)
    )
    template = (
        "[The {u} of {s} are split into {k} equal parts. How many {u} are in each part?"
        "|If {k} people share the {u} of {s} equally, how many does each get?]"
    )
    story.question = story.say(template, s=s, k=k)
