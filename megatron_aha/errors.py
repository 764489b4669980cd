"""The one exception that reaches the user as a sentence instead of a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend: the message is one clear sentence with both values and the nearest fix.

    Command-line entry points print ``error: <message>`` and exit with status 2; everything else is a bug and
    keeps its traceback.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the closest known name, or an empty string when nothing is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{matches[0]}'?" if matches else ""
