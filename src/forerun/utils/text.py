"""Text of messages."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """The count with its noun: "1 token", "2 tokens", "0 passes"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
