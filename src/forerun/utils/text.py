"""Text of messages."""

from collections.abc import Sequence


def counted(count: int, noun: str, plural: str = "") -> str:
    """The count with its noun: "1 token", "2 tokens", "0 passes"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def joined(items: Sequence[str], word: str) -> str:
    """The items as a list in a sentence: "a, b or c" with the word "or"."""
    parts = [", ".join(items[:-1]), items[-1]] if len(items) > 1 else items
    return f" {word} ".join(parts)


def time_left(seconds: float | None) -> str:
    """Time left in words."""
    if seconds is None:
        return "time left unknown"
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"
