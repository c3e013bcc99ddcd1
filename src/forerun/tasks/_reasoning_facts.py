"""Introductions of the reasoning task: the first quantity of each subject."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._reasoning_words import FRACTIONS, number
from ._reasoning_world import Node, Story, draw_divisor, draw_groups


def introduce(story: Story, level: int) -> None:
    for i, subject in enumerate(story.subjects):
        makers = [_given, _grouped] if i == 0 or story.rng.random() < 0.25 else _relations(i)
        makers = makers if level > 1 or i > 0 else [_given]
        while not story.rng.choice(makers)(story, subject):
            continue
    if story.rng.random() < 0.3:
        story.rng.shuffle(story.facts)


def _relations(num_known: int) -> list[Callable[[Story, str], bool]]:
    makers: list[Callable[[Story, str], bool]] = [_more, _fewer, _times, _part, _given]
    return makers + [_joint] if num_known > 1 else makers


def _first(story: Story, subject: str, fact: str, **node: Any) -> bool:
    """Registers a subject's first quantity; False if it is out of range."""
    made = Node(unit=story.unit, claim=story.clause("{s} {v}", s=subject), label=subject, **node)
    if not 1 <= made.value <= story.cap:
        return False
    story.current[subject] = story.add(made)
    story.facts.append(fact)
    return True


def _given(story: Story, s: str) -> bool:
    n = number(story.rng, 3, min(story.cap // 2, 600))
    fact = story.say(
        "[{s} {v} {n} {u}.|{s} {v} {n} {u} [at first|to begin with].|There are {n} {u} for {s}.]",
        s=s,
        n=n,
    )
    return _first(story, s, fact, value=n)


def _grouped(story: Story, s: str) -> bool:
    k, n = draw_groups(story)
    g = story.rng.choice(story.setting.groups)
    fact = story.say(
        "[{s} {v} {k} {g} of {n} {u} each.|{s} {v} {k} {g} with {n} {u} in each.]",
        s=s,
        k=k,
        g=g,
        n=n,
    )
    why = story.clause("[it is {k} {g} of {n} each|there are {k} {g} with {n} each]", k=k, g=g, n=n)
    return _first(story, s, fact, value=k * n, op="*", args=(k, n), why=why)


def _more(story: Story, s: str) -> bool:
    o, n = _other(story), number(story.rng, 2, max(3, story.cap // 4))
    fact = story.say(
        "[{s} {v} {n} more {u} than {o}.|{s} {v} {n} {u} more than {o}.]", s=s, o=o, n=n
    )
    why = story.clause(
        "[that is {n} more than {o}|{s} {v} {n} more than {o}|we add {n} to the {u} of {o}]",
        s=s,
        o=o,
        n=n,
    )
    x = story.value(o)
    return _first(
        story, s, fact, value=x + n, op="+", args=(x, n), needs=(story.current[o],), why=why
    )


def _fewer(story: Story, s: str) -> bool:
    o = _other(story)
    x = story.value(o)
    n = number(story.rng, 2, max(2, x - 1))
    fact = story.say(
        "[{s} {v} {n} fewer {u} than {o}.|{s} {v} {n} {u} less than {o}.]", s=s, o=o, n=n
    )
    why = story.clause(
        "[that is {n} less than {o}|{s} {v} {n} fewer than {o}|we take {n} from the {u} of {o}]",
        s=s,
        o=o,
        n=n,
    )
    return _first(
        story, s, fact, value=x - n, op="-", args=(x, n), needs=(story.current[o],), why=why
    )


def _times(story: Story, s: str) -> bool:
    o, k = _other(story), story.rng.choice((2, 2, 3, 3, 4, 5, 6))
    words = "[twice|two times|double]" if k == 2 else "{k} times"
    much = words.replace("|double", "") + " as many {u} as {o}"
    double = "|{s} {v} double the {u} of {o}." if k == 2 else ""
    fact = story.say("[{s} {v} " + much + "." + double + "]", s=s, o=o, k=k)
    why = story.clause(
        "[that is "
        + words
        + " the {u} of {o}|it is "
        + words
        + " the number of {o}|it is {k} times {o}]",
        o=o,
        k=k,
    )
    x = story.value(o)
    return _first(
        story, s, fact, value=k * x, op="*", args=(k, x), needs=(story.current[o],), why=why
    )


def _part(story: Story, s: str) -> bool:
    o = _other(story)
    k = draw_divisor(story, story.value(o))
    if k is None:
        return False
    word = FRACTIONS[k]
    fact = story.say(
        "[{s} {v} {word} as many {u} as {o}.|{s} {v} {word} of the number of {u} of {o}.]",
        s=s,
        o=o,
        word=word,
    )
    why = story.clause(
        "[that is {word} of {o}|it is {word} as many as {o}|we take {word} of the {u} of {o}]",
        o=o,
        word=word,
    )
    x = story.value(o)
    return _first(
        story, s, fact, value=x // k, op="/", args=(x, k), needs=(story.current[o],), why=why
    )


def _joint(story: Story, s: str) -> bool:
    a, b = story.rng.sample(sorted(story.current), 2)
    fact = story.say(
        "[{s} {v} as many {u} as {a} and {b} together.|{s} {v} the same as {a} and {b} combined.]",
        s=s,
        a=a,
        b=b,
    )
    why = story.clause(
        "[that is {a} and {b} together|we add {a} and {b}|it is {a} and {b} together]", a=a, b=b
    )
    x, y, needs = story.value(a), story.value(b), (story.current[a], story.current[b])
    return _first(story, s, fact, value=x + y, op="+", args=(x, y), needs=needs, why=why)


def _other(story: Story) -> str:
    return story.rng.choice(sorted(story.current))
