"""The one exception that users are meant to see."""


class CudiffError(Exception):
    """A mistake or a limit that a user can mend: one line that says what to do next."""

    def __init__(self, message: str):
        super().__init__(printable(message))


def printable(text: str) -> str:
    """`text` on one line, whatever a file's name in it holds: newlines, control characters and bytes that are not
    UTF-8 as Python escapes them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
