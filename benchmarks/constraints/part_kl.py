"""Distance from the conditional law: trap grammars on the reasoner, exactly; and SyGuS.

A trap is a beginning that the model likes, but seldom completes to an allowed text. For the traps
the laws of masking and of ASAp are exact: all texts are enumerated. The law of particles is
estimated from runs. On SyGuS it is the paper's measure: the frequencies of a window of samples
against the likelihoods of all distinct texts that any method found, renormalised.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from constraints import tasks
from constraints.common import (
    OnDemand,
    Row,
    Setting,
    Store,
    generated,
    loaded,
    log_likelihood,
    particle_session,
    prompt_of,
    refusal,
    table,
)  # fmt: skip
from constraints.language import Language, divergence, divergence_of
from forerun.api import Model
from forerun.constraints.asap import Asap, AsapMemory
from forerun.constraints.base import Constraint
from forerun.constraints.regex import Regex
from forerun.core.sampling import Sampling

LAPS = (
    "Problem: Sam did 4 laps at first. Cara did 2 fewer laps than Sam. How many more laps did Sam "
    "do than Cara?\nSolution:\nSam did 4. Cara: we take 2 from the laps of Sam, so 4 - 2 ="
)
HOURS = (
    "Problem: Max worked half of the number of hours of Sam. Sam worked 38 hours. How many hours "
    "do Max and Sam have together?\nSolution:\n"
)
DOLLARS = (
    "Problem: Ben saved 4 months with 18 dollars in each. Lena saved 177 dollars. Then Lena earns "
    "3 months of 8 dollars each. Then Lena gives 5 dollars to Ben. What is the total number of "
    "dollars of Ben and Lena?\nSolution:\n"
)
ANSWER = f"{LAPS} 2.\nSo the answer is 2.\nAnswer:"
TRAPS: dict[str, tuple[str, Constraint]] = {
    "two kinds of sums": (f"{DOLLARS}So the answer is", Regex(" (5[0-9]{2}|1[0-9]{2})")),
    "three kinds of terms": (
        f"{DOLLARS}Together that makes",
        Regex(r" (1[0-9]{2} \+ 4|4 x 18|177)"),
    ),
    "the right sum needs a wrong answer": (
        LAPS,
        Regex(r" (2\.\nAnswer: [13-9]|[013-9]\.\nAnswer: [0-9])"),
    ),
    "openings": (
        HOURS,
        Regex("(Max(:| has| worked)|First,( Max| Sam)|We( can| know)|To|Let|Known:)"),
    ),
    "a likely digit needs two more": (ANSWER, Regex(" ([13-9][0-9]?|2[0-9]{2})")),
    "binary digits": (f"{HOURS}Answer:", Regex(" (00000|1[01]{4})")),
}  # fmt: skip
COUNTS = (1, 10, 100, 1000)
PARTICLES = ("smc 5", "smc 20")
SUITES = ("bv4", "SLIA")
WINDOWS = 4  # of the samples of SyGuS
MAX_SYGUS_SAMPLES = 400  # real models take a second for each


def run(setting: Setting) -> None:
    """Options that matter: samples (of ASAp, and runs of particles), repeats, problems."""
    store = setting.store("kl", "samples", "repeats", "problems", "tokens", "model")
    blocks = [traps(setting, store)]
    if setting.data is not None and (setting.data / tasks.SYGUS).exists():
        blocks.append(sygus(setting, store))
    else:
        setting.skip("SyGuS", "no data; give --data-dir a folder")
    setting.write("kl", *[block for block in blocks if block])


def traps(setting: Setting, store: Store) -> str:
    model = loaded(setting, "reasoner", max_seqs=32)
    assert model is not None
    counts = [n for n in COUNTS if n <= setting.samples]
    lines = []
    for name, (prompt, constraint) in TRAPS.items():
        language = _Lazy(model, prompt, constraint)
        row = store.row(f"trap {name}", lambda language=language: language.row())
        about = [f"{name} ({row['texts']} texts, mass {row['mass']:.0e})"]
        lines.append([*about, "mask", *[row["mask"]] * len(counts)])

        def learn(language: _Lazy = language) -> Row:
            return _asap_row(language, counts, setting)

        found = store.row(f"trap {name}, asap", learn)["mean"]
        lines.append(["", "asap", *found])
        for how in PARTICLES:
            if why := refusal(how):
                setting.skip(how, why)
                continue

            def drawn(language: _Lazy = language, how: str = how) -> Row:
                return _particle_row(language, how, setting)

            kl, error = store.row(f"trap {name}, {how}", drawn)["kl"]
            lines.append(["", how, *[f"{kl:.3f} ± {error:.3f}"] * len(counts)])
    head = ["texts", "sampling", *(f"after {n}" for n in counts)]
    return (
        "KL(law of the next text || conditional law), nats, on the reasoner; asap: mean of "
        f"{setting.repeats} runs; smc: estimated from {setting.samples} runs, which do not "
        "learn\n\n" + table(head, lines)
    )


class _Lazy:
    """The language of a trap, enumerated when a row needs it."""

    def __init__(self, model: Model, prompt: str, constraint: Constraint) -> None:
        self.model, self.constraint = model, constraint
        self.prompt = model.tokenizer.encode(prompt)
        self._found: Language | None = None

    @property
    def language(self) -> Language:
        if self._found is None:
            self._found = Language(self.model, self.prompt, self.constraint)
        return self._found

    def row(self) -> Row:
        own = self.language
        kl = divergence(own.masked(), own.law())
        return {"texts": own.num_texts, "mass": own.mass, "mask": kl}


def _asap_row(language: _Lazy, counts: Sequence[int], setting: Setting) -> Row:
    """KL of the exact law of ASAp after each of `counts` samples, for each repeat and its mean."""
    runs = []
    for repeat in range(setting.repeats):
        memory, found = AsapMemory(), []
        given = Sampling(
            constraint=Asap(language.constraint, memory),
            n=counts[-1],
            max_new_tokens=64,
            seed=setting.seed + repeat,
        )
        run = language.model.run([language.prompt], given, drafter="none", batch=1)
        law = language.language.law()
        for done, _ in enumerate(run, 1):
            if done in counts:
                (trie,) = memory.tries.values()
                found.append(divergence(language.language.asap(trie), law))
        runs.append(found)
    return {"mean": np.mean(runs, axis=0).tolist(), "runs": runs}


def _particle_row(language: _Lazy, how: str, setting: Setting) -> Row:
    """KL of the law of the text that a run of particles returns."""
    count = int(how.split()[1])
    options = {"constraint": language.constraint, "max_new_tokens": 64, "seed": setting.seed}
    with particle_session(language.model, language.prompt, count, **options) as (search, session):
        runs = [search.posterior(session, i) for i in range(setting.samples)]
    laws = [run.law() for run in runs]
    masses = [math.exp(run.log_evidence) for run in runs]
    return {
        "kl": divergence_of([law for law in laws if law], language.language.law()),
        "failed": sum(not law for law in laws),
        "evidence over mass": float(np.mean(masses)) / language.language.mass,
    }


def sygus(setting: Setting, store: Store) -> str:
    """The table of SyGuS problems, or "" without a model."""
    assert setting.data is not None
    needed, lines = OnDemand(setting, setting.model, max_seqs=32), []
    ways = [how for how in ("mask", "asap", *PARTICLES) if not refusal(how)]
    num = min(setting.samples, MAX_SYGUS_SAMPLES)
    for suite in SUITES:
        for problem in list(tasks.sygus(setting.data, suite))[: setting.problems]:
            rows = {}
            for how in ways:
                key = f"{problem.name}, {how}"
                if key not in store.rows and needed.model is None:
                    return ""

                def drawn(problem: tasks.Problem = problem, how: str = how) -> Row:
                    assert needed.model is not None
                    count = num // WINDOWS if how in PARTICLES else num  # particles do not learn
                    return _samples_row(needed.model, problem, how, count, setting)

                rows[how] = store.row(key, drawn)
            lines += _sygus_lines(problem.name, rows, num)
    head = ["problem", "sampling", "cut", "texts", "log-likelihood"]
    head += ["first quarter", "last quarter"]
    return (
        "SyGuS: KL(frequencies of a quarter of the samples || renormalised likelihoods of all "
        f"distinct texts), nats; {setting.model}, {num} samples, of particles a quarter; cut: "
        f"share of texts that {setting.tokens} tokens do not end\n\n" + table(head, lines)
    )


def _samples_row(model: Model, problem: tasks.Problem, how: str, num: int, setting: Setting) -> Row:
    samples = generated(
        model,
        prompt_of(model, problem),
        how,
        num,
        constraint=problem.constraint,
        max_new_tokens=setting.tokens,
        seed=setting.seed,
        logprobs=0,
    )
    whole = [one for one in samples if one.valid]
    return {
        "num": len(samples),
        "texts": [one.text for one in whole],
        "logp": [log_likelihood(one) for one in whole],
    }


def _sygus_lines(name: str, rows: dict[str, Row], num: int) -> list[list[object]]:
    """Lines of a problem. num: samples of which the windows are a quarter."""
    likelihood: dict[str, float] = {}  # text -> log-likelihood of its likeliest split
    for row in rows.values():
        for text, logp in zip(row["texts"], row["logp"], strict=True):
            likelihood[text] = max(logp, likelihood.get(text, -math.inf))
    if not likelihood:
        return [[name, "no whole text", None, None, None, None, None]]
    top = max(likelihood.values())
    total = top + math.log(sum(math.exp(logp - top) for logp in likelihood.values()))
    lines: list[list[object]] = []
    for how, row in rows.items():
        texts = row["texts"]
        size = max(num * len(texts) // (WINDOWS * row["num"]), 1)
        windows = texts[:size], texts[-size:]
        kls = [_window_divergence(one, likelihood, total) if texts else None for one in windows]
        logp = float(np.mean(row["logp"])) if texts else None
        cut = 1 - len(texts) / row["num"]
        lines.append([name if not lines else "", how, cut, len(set(texts)), logp, *kls])
    return lines


def _window_divergence(texts: list[str], likelihood: dict[str, float], total: float) -> float:
    counts, size = Counter(texts), len(texts)
    return sum(c / size * (math.log(c / size) - likelihood[t] + total) for t, c in counts.items())
