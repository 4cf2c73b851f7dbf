# SPDX-License-Identifier: Apache-2.0
"""Free text that somebody else wrote: a driver's message, a serial number read from a card."""

LONGEST = 4096


def clean(text: str, longest: int = LONGEST) -> str:
    """Return the text as every database, log and terminal can show it.

    What cannot be printed (control characters, NUL, lone surrogates) becomes a space, line ends
    stay, and what is too long is cut. Refusing it would cost a host its report for one odd byte.
    """
    plain = "".join(c if c.isprintable() or c == "\n" else " " for c in text[:longest])
    return plain.strip(" ") if plain != text else plain
