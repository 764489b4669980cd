"""Names of datasets: the common path of a .bin and an .idx file, without either ending."""

from __future__ import annotations

from pathlib import Path

from megatron_aha.errors import UserError, nearest


def resolve_prefix(prefix: str, option: str) -> str:
    """Returns ``prefix`` unchanged when ``PREFIX.bin`` and ``PREFIX.idx`` are files.

    Args:
        prefix: what the user wrote.
        option: the option it was written for, as typed.

    Raises:
        UserError: it names something else, with the nearest dataset that exists.
    """
    path = Path(prefix)
    for suffix in (".bin", ".idx", ".json"):
        if prefix.endswith(suffix) and _is_dataset(prefix.removesuffix(suffix)):
            raise UserError(
                f"{option}: '{prefix}' is a file of a dataset, not its prefix; "
                f"write '{prefix.removesuffix(suffix)}'"
            )
    if path.is_dir() and not _is_dataset(prefix):
        found = _datasets_in(path)
        hint = f"; datasets in it: {', '.join(str(path / name) for name in found[:5])}" if found else ""
        raise UserError(f"{option}: '{prefix}' is a directory, but a dataset's prefix is wanted{hint}")
    for suffix in (".bin", ".idx"):
        if not Path(prefix + suffix).is_file():
            raise UserError(
                f"{option}: there is no dataset '{prefix}' ('{prefix}{suffix}' is missing){_hint(path)}"
            )
    return prefix


def _is_dataset(prefix: str) -> bool:
    return Path(prefix + ".bin").is_file() and Path(prefix + ".idx").is_file()


def _datasets_in(directory: Path) -> list[str]:
    """Names of the datasets that lie directly in a directory."""
    names = (entry.name.removesuffix(".idx") for entry in directory.glob("*.idx"))
    return sorted(name for name in names if _is_dataset(str(directory / name)))


def _hint(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the directory '{path.parent}' does not exist"
    found = _datasets_in(path.parent)
    hint = nearest(path.name, found)
    return hint or (f"; datasets beside it: {', '.join(found[:5])}" if found else "")
