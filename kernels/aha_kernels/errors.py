"""The exception for arguments that cannot be computed."""

from __future__ import annotations


class InputError(ValueError):
    """An argument is wrong: the message is one sentence with what was given, what is needed and the nearest
    fix.
    """
