"""The file of ``--json``: whether it can be written is asked first."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_aha.errors import UserError


def check_report_file(name: str | None) -> None:
    """Raises UserError when ``--json`` cannot be written: told before the hours of measuring, not after."""
    if name is None:
        return
    path = Path(name)
    if path.is_dir():
        raise UserError(f"--json {name} is a folder; name a file in it, such as {path / 'results.json'}")
    if not path.parent.is_dir():
        raise UserError(
            f"--json {name}: there is no folder {path.parent}; make it first, or choose another file"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--json {name} may not be written; choose a file in a folder that you may write")
