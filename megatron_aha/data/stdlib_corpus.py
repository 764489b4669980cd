"""A small real corpus without a download: the running Python's own standard library, one document per file.

``python -m megatron_aha.data.stdlib_corpus --output corpus.jsonl --held-out-output held_out.jsonl``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_aha.entry import run_and_exit
from megatron_aha.errors import UserError

# Tests repeat each other and their subject; installed packages are not the standard library.
_LEFT_OUT = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


def standard_library() -> list[tuple[str, str]]:
    """Returns (path relative to the library, text) of every distinct module, in an order given by content
    hashes.

    The same Python gives the same list on every machine.

    Raises:
        UserError: the sources are not installed.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    by_hash: dict[str, tuple[str, str]] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(relative.parts[:-1]):
            data = path.read_bytes()
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip():
                by_hash.setdefault(hashlib.sha256(data).hexdigest(), (relative.as_posix(), text))
    if not by_hash:
        raise UserError(f"the running Python has no library sources in '{root}'; use a Python that has them")
    return [by_hash[digest] for digest in sorted(by_hash)]


def is_held_out(text: str, share: float) -> bool:
    """Returns whether a document belongs to the held-out share, decided by its content alone."""
    # Salted, so that it does not depend on the hash that orders the documents.
    digest = hashlib.sha256(b"held out:" + text.encode("utf-8")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def main(arguments: Sequence[str]) -> None:
    """Writes the files. Raises UserError when the library's sources are not installed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", required=True, help="JSON lines of the training documents")
    parser.add_argument("--held-out-output", help="JSON lines of the held-out documents")
    parser.add_argument(
        "--held-out", type=float, default=0.05, metavar="SHARE", help="default: 0.05 of the files"
    )
    options = parser.parse_args(arguments)
    if not 0 <= options.held_out < 1:
        parser.error(f"--held-out {options.held_out} must be at least 0 and below 1")
    documents = standard_library()
    held_out = [document for document in documents if is_held_out(document[1], options.held_out)]
    training = [document for document in documents if not is_held_out(document[1], options.held_out)]
    _write(options.output, training)
    if options.held_out_output:
        _write(options.held_out_output, held_out)


def _write(name: str, documents: list[tuple[str, str]]) -> None:
    """Writes JSON lines, all or nothing."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with open(temporary, "w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(_lines(documents))
    os.replace(temporary, path)
    print(f"wrote '{path}': {len(documents)} documents, {path.stat().st_size / 2**20:.1f} MiB")


def _lines(documents: list[tuple[str, str]]) -> Iterator[str]:
    for path, text in documents:
        yield json.dumps({"path": path, "text": text}, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    run_and_exit(main, sys.argv[1:])
