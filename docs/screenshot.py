"""Takes docs/playground.png: the playground in a browser, on the embedded reasoner.

    python docs/screenshot.py docs/playground.png

Needs chromium, and what `pip install '.[dev]'` installs.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZE = 1100, 1120
SERVER = "reasoner", "--max-seqs", 4, "--controller", "fixed"
PROMPT = (
    "Ben has 4 bags with 6 nuts each. He eats 5 nuts and buys 3 more bags. "
    "How many nuts does Ben have left?"
)
RUNS = 3  # the last of them gains from the others
LARGEST = 300_000  # bytes
# the step that took most of a small tree, so that the picture shows a path
BEST = """(() => {
  const gain = step => step.accepted.length - Math.max(0, step.tokens.length - 12);
  const best = steps.reduce((a, b) => gain(b) > gain(a) ? b : a);
  follow.checked = false;
  step.value = steps.indexOf(best) + 1;
  drawStep();
  scrollTo(0, 0);
})()"""


def main(path: Path) -> int:
    """Writes the picture; returns the exit status."""
    sys.path[:0] = [str(ROOT / "tests" / "serving")]
    import browser

    import served

    found = browser.find()
    if found is None:
        print(f"no browser found; install one of {', '.join(browser.NAMES)}", file=sys.stderr)
        return 1
    with served.command(*SERVER) as server, browser.browse(found) as page:
        page.resize(*SIZE)
        page.scheme("light")
        page.open(server.url + "/")
        page.wait("method.options.length > 1")
        page.type("#prompt", PROMPT)
        for name, value in {"temperature": "0.6", "max_nodes": "12"}.items():
            page.type(f"#{name}", value)
        for _ in range(RUNS):
            page.js("document.body.dataset.state = 'waiting'")
            page.press("Enter", ctrl=True)
            page.wait("document.body.dataset.state === 'done'")
        page.js("document.activeElement.blur()")
        page.js(BEST)
        picture = page.screenshot()
    if len(picture) > LARGEST:
        print(f"the picture has {len(picture)} bytes, at most {LARGEST} are wanted; not written")
        return 1
    path.write_bytes(picture)
    print(f"{path}: {len(picture)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "playground.png")))
