"""Text from outside (another machine, a file name, an exception), made safe for a terminal and a log."""

from __future__ import annotations

import unicodedata

LONGEST = 300  # characters of one piece of text


def clean(text: object, longest: int = LONGEST) -> str:
    """`text` on one line: every character that could move the cursor, colour or forge a line becomes "?".

    Longer text than `longest` is cut and ends in "...".

    >>> clean("north\\x1b[2J\\nround 1/2: accuracy 99 %")
    'north?[2J?round 1/2: accuracy 99 %'
    """
    given = str(text)[: longest + 1]
    safe = "".join(character if _is_safe(character) else "?" for character in given)
    return safe if len(safe) <= longest else safe[: longest - 3] + "..."


def _is_safe(character: str) -> bool:
    """Whether a character is printable or a space; controls, line ends and changes of direction are not."""
    return character.isprintable() or unicodedata.category(character) == "Zs"
