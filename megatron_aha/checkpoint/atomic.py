"""Files that are either whole or absent, also after a crash, a kill or a full disk."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_aha.errors import UserError

_DISCARDED = ".old-"


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes a small text file durably; a reader sees the old content or the new one, never a part."""
    temporary = path.with_name(f".tmp-{path.name}")
    with disk_errors(path):
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)


def replace_folder(temporary: Path, final: Path) -> None:
    """Renames a finished folder to its final name; an older folder of that name is removed afterwards."""
    _open_to_others(temporary)
    sync(temporary)
    discarded = _discarded(final)
    shutil.rmtree(discarded, ignore_errors=True)
    if final.exists():
        os.replace(final, discarded)
    os.replace(temporary, final)
    sync(final.parent)
    shutil.rmtree(discarded, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Removes a folder; killed on the way, it leaves a hidden rest (see ``remove_rests``) and no damaged folder."""
    shutil.rmtree(_discarded(folder), ignore_errors=True)
    os.replace(folder, _discarded(folder))
    shutil.rmtree(_discarded(folder), ignore_errors=True)


def remove_rests(directory: Path) -> None:
    """Removes what kills have left of discarded folders."""
    for rest in directory.glob(f"{_DISCARDED}*"):
        shutil.rmtree(rest, ignore_errors=True)


def keep_only(folder: Path, names: Collection[str]) -> None:
    """Removes everything in a folder but what has one of these names."""
    for path in folder.iterdir():
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() else os.remove(path)


def _discarded(folder: Path) -> Path:
    return folder.with_name(f"{_DISCARDED}{folder.name}")


def _open_to_others(folder: Path) -> None:
    """Gives everything the permissions of newly made files, whatever carried files had."""
    umask = os.umask(0)
    os.umask(umask)
    for path in [folder, *folder.rglob("*")]:
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def sha256(path: Path) -> str:
    """Returns the hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a full disk, a missing permission or a file in the way while writing `path` into a UserError."""
    try:
        yield
    except OSError as error:
        code = error.errno
        if isinstance(error, shutil.Error):
            # Copying a folder collects what went wrong as text.
            told = re.search(r"\[Errno (\d+)\]", str(error))
            code = int(told[1]) if told else None
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            folder = next(parent for parent in path.parents if parent.exists())
            free = shutil.disk_usage(folder).free
            raise UserError(
                f"no space left on disk while writing {path} ({free / 2**20:.0f} MiB free): "
                "free some space or choose another folder; older checkpoints are untouched"
            ) from error
        if code in (errno.ENOTDIR, errno.EEXIST):
            file = next((place for place in [path, *path.parents] if place.is_file()), path)
            raise UserError(
                f"cannot write {path}: {file} is a file, not a folder; choose another folder"
            ) from error
        if code in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"may not write {path}: choose a folder that you may write") from error
        raise
