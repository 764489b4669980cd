"""The modelling code of an exported folder: two files of a family, each with what families share put in."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

from megatron_aha.hf import exported
from megatron_aha.hf.families import FAMILIES

_FOLDER = Path(exported.__file__).parent


def write_code(folder: Path, family: str) -> None:
    """Writes ``configuration_FAMILY_aha.py`` and ``modeling_FAMILY_aha.py``, which need torch and transformers only."""
    for kind in ("configuration", "modeling"):
        name = f"{kind}_{family}_aha.py"
        source = joined(f"{kind}_aha", (_FOLDER / name).read_text("utf-8"))
        for shared in ("cache_aha", "kernels_aha", "masks_aha") if kind == "modeling" else ():
            source = joined(shared, source)
        (folder / name).write_text(source, "utf-8")


def joined(shared: str, source: str) -> str:
    """Returns a module's source with the module ``shared`` in place of its import from there."""
    common = (_FOLDER / f"{shared}.py").read_text("utf-8")
    head, body = _imports_end(common)
    title, start = _imports_end(source)
    theirs, ours = common.splitlines(), source.splitlines()
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.ImportFrom) and node.module in (shared, "__future__"):
            start -= len(ours[node.lineno - 1 : node.end_lineno])
            del ours[node.lineno - 1 : node.end_lineno]
    imports = [line for line in ours[title:start] if line and line not in theirs[:body]]
    parts = [*ours[:title], *theirs[head:body], *imports, "", *theirs[body:], *ours[start:], ""]
    return "\n".join(parts)


def _imports_end(source: str) -> tuple[int, int]:
    """Returns the last lines of a module's docstring and of its imports."""
    docstring, *rest = ast.parse(source).body
    imports = [node.end_lineno or 0 for node in rest if isinstance(node, (ast.Import, ast.ImportFrom))]
    return docstring.end_lineno or 0, max(imports)


def model_class(family: str) -> Any:
    """Returns our own class of a family's language model with routers; transformers is imported here."""
    module = importlib.import_module(f"{exported.__name__}.modeling_{family}_aha")
    return getattr(module, FAMILIES[family].aha)
