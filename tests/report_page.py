"""A page of the benchmark's report, as a browser would see it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from xml.etree import ElementTree

VOID = {"meta", "br", "img", "input", "link", "hr", "wbr"}
SVG = "{http://www.w3.org/2000/svg}"


@dataclass
class Page(HTMLParser):
    """What a browser would see: nesting, attributes, texts, and tables by caption."""

    source: str
    open_tags: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)  # enclosing tag, text
    rows: list[list[tuple[str, str | None]]] = field(default_factory=list)  # text, value to sort by

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open_tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append(("", dict(attrs).get("data-value")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags and self.open_tags[-1] == tag, (tag, self.open_tags[-3:])
        self.open_tags.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open_tags[-1] if self.open_tags else "", data))
        if self.open_tags and self.open_tags[-1] in ("td", "th"):
            text, value = self.rows[-1][-1]
            self.rows[-1][-1] = (text + data, value)

    def table(self, *columns: str) -> dict[str, dict[str, tuple[str, str | None]]]:
        """Rows of the first table that begins with these columns, by name, by column."""
        heads = [[text for text, _ in row] for row in self.rows]
        start = next(i for i, head in enumerate(heads) if head[: len(columns)] == [*columns])
        found = {}
        for row in self.rows[start + 1 :]:
            if len(row) != len(heads[start]) or row[0][0] in ("method", "task, method", "MB"):
                break
            found.setdefault(row[0][0], dict(zip(heads[start], row, strict=True)))
        return found

    def svgs(self) -> list[ElementTree.Element]:
        """All pictures; each is well-formed by itself."""
        found = re.findall(r"<svg xmlns.*?</svg>", self.source, re.DOTALL)
        return [ElementTree.fromstring(one) for one in found]


def marks(svg: ElementTree.Element, name: str) -> int:
    """How many elements of a picture have a class."""
    return sum(name in (one.get("class") or "").split() for one in svg.iter())
