"""The error of a check, and texts about errors as the results contain them."""

from __future__ import annotations

import re

MAX_CHARACTERS = 400
#: A path with at least two folders. Results are published, so only its last part is kept.
PATH = re.compile(r"(?<![:/\w])(?:/[\w.+-]+){2,}")


class CheckFailedError(Exception):
    """The system does not do what the case claims."""


def describe(error: BaseException) -> str:
    """An exception with the name of its type, and with the body of the reply if it is an HTTP error."""
    text = str(error)
    reply = getattr(error, "response", None)
    if reply is not None:
        text += f": {reply.text}"
    return f"{type(error).__name__}: {text}"


def without_paths(text: str) -> str:
    """A text as one line of limited length. Paths of this machine are shortened to their last part."""
    line = PATH.sub(lambda match: match[0].rpartition("/")[2], " ".join(text.split()))
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]}..."
