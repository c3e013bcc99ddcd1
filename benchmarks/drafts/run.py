"""Training of draft models on the workbench models: acceptance, tau, seeds and intervals.

    python benchmarks/drafts/run.py --part all --data-dir DATA [--out FOLDER]
    python benchmarks/drafts/run.py --part report --page docs/results/draft_training.md

fastdraft    three stages by domain, alignment against as many steps on text, depth at equal size
alignment    FKL, TVD and TVD++ with tuned learning rates
distillspec  four kinds of data and four divergences against the draft before
lenient      tau against likelihood and right answers of lossy verification
osd          a stream of four domains: learned and frozen drafts, routed and shared
s2d          one sorted draft for three targets against separate drafts
vocabtrim    memory-bound speed-up by size of the head, three kinds of calibration
omnidraft    drafts with another tokenizer
report       writes the tables of --out into a page

A part writes <part>.json and <part>.md to --out. Rows that are there already are not measured
again. All parts take about an hour on two idle cores; with --quick about a minute each, in the
folder `quick` of --out.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # of `scripts` and of this package

import scripts  # noqa: E402
import torch  # noqa: E402

from drafts.common import Bench  # noqa: E402
from drafts.report import write_report  # noqa: E402

PARTS = ("fastdraft", "alignment", "distillspec", "lenient", "osd", "s2d", "vocabtrim", "omnidraft")
PAGE = Path("docs/results/draft_training.md")
WORKBENCH = Path("tests/assets/workbench")


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=[*PARTS, "all", "report"])
    parser.add_argument("--workbench", type=Path, default=WORKBENCH, help="models")
    parser.add_argument("--data-dir", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("runs/drafts"))
    parser.add_argument("--page", type=Path, default=PAGE, help="of the report")
    parser.add_argument("--threads", type=scripts.count, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    given = parser.parse_args()
    if not given.part:
        scripts.skip("it takes an hour; give --part")
    torch.set_num_threads(given.threads)
    out = given.out / "quick" if given.quick else given.out
    bench = Bench(out, given.data_dir, given.workbench, given.quick)
    for part in PARTS if "all" in given.part else given.part:
        if part == "report":
            write_report(given.page, out, PARTS)
        elif not (Path(__file__).parent / f"{part}.py").exists():
            print(f"skipped: {part}: this version does not have it", file=sys.stderr)
        else:
            import_module(f"drafts.{part}").run(bench)


if __name__ == "__main__":
    scripts.run(main)
