"""The playground in a real browser, against the real server with the embedded reasoner."""

from __future__ import annotations

from collections.abc import Iterator

import browser
import pytest

from served import Served

pytestmark = pytest.mark.browser
SPEED = {"downloadThroughput": -1, "uploadThroughput": -1}
PROBLEM = "Ben has 4 bags with 6 nuts each. He eats 5 nuts. How many nuts does Ben have left?"
FIGURE = "Number(document.querySelectorAll('#{}-figures dd')[{}].textContent)"
TAU, RATE, TOKENS = range(3)
TOKENS_OF = "[...document.querySelectorAll('#draft-text .t')]"
DONE = "document.body.dataset.state === 'done'"
TEXT = "document.getElementById('{}-text').textContent"
CONTRAST = """(() => {
  const paint = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const light = colour => {
    paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1);
    const rgb = [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3).map(c => c / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2];
  };
  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const ratio = (a, b) => {
    const [x, y] = [light(style(a)), light(style(b))].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const tints = ['--d0', '--d1', '--d2', '--d3', '--d4', '--d5', '--corrected', '--bonus'];
  const pairs = [...tints, '--back', '--panel'].map(tint => ['--text', tint]);
  pairs.push(['--soft', '--back'], ['--soft', '--panel']);
  pairs.push(['--bad', '--bad-back'], ['--back', '--focus']);
  return pairs.map(pair => [...pair, ratio(...pair)]);
})()"""


@pytest.fixture(scope="module")
def window() -> Iterator[browser.Page]:
    """A browser, or a skip with the reason."""
    path = browser.find()
    if path is None:
        pytest.skip(f"no browser found; install one of {', '.join(browser.NAMES)}")
    with browser.browse(path) as page:
        yield page


@pytest.fixture
def server(drafting_reasoner: Served) -> Served:
    return drafting_reasoner


@pytest.fixture
def page(window: browser.Page, server: Served) -> browser.Page:
    """The playground, freshly loaded, in a wide and light window."""
    window.resize(1100, 1000)
    window.scheme("light")
    window.open(server.url + "/")
    window.wait("document.getElementById('method').options.length > 1")
    window.errors.clear()
    return window


def figure(page: browser.Page, lane: str, which: int) -> float:
    return float(page.js(FIGURE.format(lane, which)))


def start(page: browser.Page, **fields: str) -> None:
    """Fills the form and runs it by keyboard."""
    for name, value in fields.items():
        page.type(f"#{name}", value)
    page.press("Enter", ctrl=True)


def test_tokens_are_coloured_as_they_come_beside_plain_decoding(
    page: browser.Page, server: Served
) -> None:
    page.requested.clear()
    start(page, prompt=PROBLEM, temperature="0", max_tokens="120")
    page.wait("document.querySelector('#draft-text .t.accepted')")
    page.wait("document.querySelector('#plain-text .t.plain')")
    page.wait(DONE)
    assert page.js("document.getElementById('error').hidden"), page.js(
        "document.getElementById('error').textContent"
    )
    assert figure(page, "draft", TAU) > 1 and figure(page, "plain", TAU) == 1
    assert figure(page, "draft", RATE) > 0 and figure(page, "plain", RATE) > 0
    assert page.js(TEXT.format("draft")) == page.js(TEXT.format("plain")) != ""
    assert set(
        page.js("[...document.querySelectorAll('#plain-text .t')].map(t => t.className)")
    ) == {"t plain"}
    legend = page.js("document.getElementById('legend').textContent")
    assert "accepted from" in legend and "by the model" in legend
    tints = page.js(f"{TOKENS_OF}.map(t => getComputedStyle(t).backgroundColor)")
    assert len(set(tints)) >= 2
    assert page.requested and all(url.startswith(server.url) for url in page.requested)
    assert page.errors == []


def test_the_tree_of_every_step_can_be_seen_by_keyboard(page: browser.Page) -> None:
    start(page, prompt=PROBLEM, temperature="0", max_tokens="100", max_nodes="12")
    page.wait(DONE)
    count = page.wait("Number(document.getElementById('steps').value)")
    page.js("document.getElementById('step').focus()")
    seen = 0
    for at in range(count, 0, -1):
        assert int(page.js("document.getElementById('at').value")) == at
        nodes = page.js("document.querySelectorAll('#tree .node').length")
        kept = page.js("document.querySelectorAll('#tree rect.on').length")
        told = page.js("document.getElementById('told').textContent")
        if "drafted," in told:
            drafted, accepted = int(told.split()[0]), int(told.split()[2])
            own = 0 if "the text ended there" in told else 1
            assert nodes == 1 + drafted + own and kept == 1 + accepted + own and drafted <= 12
            seen = max(seen, accepted)
        page.press("ArrowLeft")
    assert seen >= 1
    assert not page.js("document.getElementById('follow').checked")
    assert page.errors == []


def test_a_lane_may_run_alone_and_plain_decoding_may_be_left_out(page: browser.Page) -> None:
    page.js("document.getElementById('plain').value = 'after'")
    start(page, prompt=PROBLEM, temperature="0", max_tokens="40")
    page.wait(DONE)
    assert figure(page, "draft", TOKENS) == figure(page, "plain", TOKENS) > 0
    page.js("document.getElementById('plain').value = 'off'")
    start(page)
    page.wait(DONE)
    assert page.js(TEXT.format("plain")) == "" != page.js(TEXT.format("draft"))


def test_escape_stops(page: browser.Page, server: Served) -> None:
    page.js("document.getElementById('chat').checked = false")
    start(page, prompt=PROBLEM, temperature="2", max_tokens="900")
    page.wait(f"{TOKENS_OF}.length")
    page.press("Escape")
    page.wait(DONE)
    assert page.js("document.getElementById('status').textContent") in ("stopped", "done")
    server.wait_idle()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_nodes": "9999"}, ["max_nodes is 9999", "at most 64"]),
        ({"max_tokens": "100000"}, ["context is 1024 tokens"]),
        ({"temperature": "-1"}, ["temperature"]),
        ({"temperature": "warm"}, ["expected a number", "warm"]),
        ({"seed": "1.5"}, ["expected a whole number"]),
    ],
)
def test_errors_are_told_in_words(
    page: browser.Page, fields: dict[str, str], words: list[str]
) -> None:
    start(page, **fields)
    page.wait("!document.getElementById('error').hidden")
    told = page.js("document.getElementById('error').textContent")
    assert all(word in told for word in words), told
    assert "{" not in told
    page.wait(DONE)


def test_a_server_that_is_gone_is_told_in_words(page: browser.Page) -> None:
    page.call("Network.emulateNetworkConditions", offline=True, latency=0, **SPEED)
    try:
        start(page, prompt="Once")
        told = page.wait("document.getElementById('error').textContent")
        assert "cannot be reached" in told
    finally:
        page.call("Network.emulateNetworkConditions", offline=False, latency=0, **SPEED)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(page: browser.Page, scheme: str) -> None:
    page.scheme(scheme)
    found = page.js(CONTRAST)
    assert found
    for ink, paper, ratio in found:
        assert ratio >= 4.5, (ink, paper, ratio)


def test_narrow_screens(page: browser.Page) -> None:
    start(page, prompt=PROBLEM, temperature="0", max_tokens="60")
    page.wait(DONE)
    page.resize(320, 640)
    assert page.js("document.documentElement.scrollWidth") <= 320
