"""Functions of the code task: templates filled with names."""

from __future__ import annotations

import random
import re

ITEMS = (
    ("order", "orders"), ("user", "users"), ("book", "books"), ("ticket", "tickets"),
    ("sensor", "sensors"), ("invoice", "invoices"), ("player", "players"), ("parcel", "parcels"),
    ("room", "rooms"), ("route", "routes"), ("sample", "samples"), ("event", "events"),
)  # fmt: skip
NUMBERS = ("price", "weight", "age", "score", "size", "length", "rank", "cost", "speed", "height")
LABELS = ("name", "colour", "city", "kind", "owner", "status", "label", "origin")
NAMES = ("value", "entry", "element", "record", "current", "piece", "part", "candidate")
LIMITS = ("limit", "bound", "threshold", "cutoff", "level")
RESULTS = ("result", "found", "kept", "output", "collected")

FUNCTIONS = (
    '''def {items}_above({items}, {limit}):
    """Return the {items} whose {number} is greater than {limit}."""
    {result} = []
    for {item} in {items}:
        if {item}.{number} > {limit}:
            {result}.append({item})
    return {result}
''',
    '''def total_{number}({items}):
    """Return the sum of {number} over all {items}."""
    total = 0
    for {item} in {items}:
        total += {item}.{number}
    return total
''',
    '''def {items}_by_{label}({items}):
    """Return a dictionary from each {label} to the list of its {items}."""
    {result} = {{}}
    for {item} in {items}:
        {result}.setdefault({item}.{label}, []).append({item})
    return {result}
''',
    '''def largest_{number}({items}):
    """Return the {item} with the largest {number}, or None if there is none."""
    best = None
    for {item} in {items}:
        if best is None or {item}.{number} > best.{number}:
            best = {item}
    return best
''',
    '''def count_{label}({items}, {label}):
    """Return how many {items} have this {label}."""
    count = 0
    for {item} in {items}:
        if {item}.{label} == {label}:
            count += 1
    return count
''',
    '''def average_{number}({items}):
    """Return the mean {number} of the {items}, 0.0 if there are none."""
    if not {items}:
        return 0.0
    return sum({item}.{number} for {item} in {items}) / len({items})
''',
    '''def index_{items}({items}):
    """Return a dictionary from each {label} to its {item}; a {label} may occur once."""
    {result} = {{}}
    for {item} in {items}:
        if {item}.{label} in {result}:
            raise ValueError(f"{label} {{{item}.{label}!r}} occurs twice")
        {result}[{item}.{label}] = {item}
    return {result}
''',
    '''def sort_{items}({items}):
    """Return the {items} ordered by {number}, the largest first, then by {label}."""
    return sorted({items}, key=lambda {item}: (-{item}.{number}, {item}.{label}))
''',
    '''def {item}_to_dict({item}):
    """Return {label}, {number} and tags of a {item} as plain values."""
    return {{
        "{label}": str({item}.{label}),
        "{number}": float({item}.{number}),
        "tags": sorted({item}.tags),
    }}
''',
    '''def {number}_steps({items}):
    """Return the difference in {number} between each of the {items} and the one before."""
    {result} = []
    for before, after in zip({items}, {items}[1:]):
        {result}.append(after.{number} - before.{number})
    return {result}
''',
    '''def running_{number}({items}):
    """Return the running totals of {number} over the {items}."""
    {result} = []
    total = 0
    for {item} in {items}:
        total += {item}.{number}
        {result}.append(total)
    return {result}
''',
    '''def split_{items}({items}, {limit}):
    """Return two lists: {items} with a {number} up to {limit}, and the rest."""
    low, high = [], []
    for {item} in {items}:
        if {item}.{number} <= {limit}:
            low.append({item})
        else:
            high.append({item})
    return low, high
''',
    '''def scale_{number}({items}, factor):
    """Multiply the {number} of all {items} by a factor, rounded to two places."""
    for {item} in {items}:
        {item}.{number} = round({item}.{number} * factor, 2)
''',
    '''def find_{item}({items}, {label}):
    """Return the first {item} with this {label}, or None."""
    for {item} in {items}:
        if {item}.{label} == {label}:
            return {item}
    return None
''',
    '''def merge_{items}(first, second):
    """Return the {items} of both lists, each {label} once, the first list's before the second's."""
    {result}, seen = [], set()
    for {item} in first + second:
        if {item}.{label} not in seen:
            seen.add({item}.{label})
            {result}.append({item})
    return {result}
''',
)


def draw_module(rng: random.Random, num: int) -> list[str]:
    """The source of `num` different functions about one kind of item."""
    item, items = rng.choice(ITEMS)
    limit, result = rng.choice(LIMITS), rng.choice(RESULTS)
    return [
        template.format(
            item=item,
            items=items,
            limit=limit,
            result=result,
            number=rng.choice(NUMBERS),
            label=rng.choice(LABELS),
        )
        for template in rng.sample(FUNCTIONS, num)
    ]


def rename(rng: random.Random, code: str) -> tuple[str, str]:
    """A name in the code, and a name that is not in it."""
    used = set(re.findall(r"\w+", code))
    old = rng.choice(sorted(used & {*LIMITS, *RESULTS, *(item for item, _ in ITEMS)}))
    new = rng.choice([name for name in (*NAMES, *LIMITS, *RESULTS) if name not in used])
    return old, new
