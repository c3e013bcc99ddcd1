"""What tests of draft training share: words of prompts, and options of a short run."""

from __future__ import annotations

from itertools import pairwise

WORDS = "the cat sat on mat and dog log while rain fell plain one two three four five six"
PAIRS = list(pairwise(WORDS.split()))
OPTIONS = {"max_tokens": 8, "share": 0.9, "layers": 1, "probe_steps": 1, "max_steps": 8}
OPTIONS |= {"minutes": None, "micro_tokens": 256, "gamma": 2}
