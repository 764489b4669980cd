"""The text of one record, or what is wrong with it."""

from __future__ import annotations

import json

from megatron_aha.data.sources import RawRecord
from megatron_aha.errors import nearest


def record_text(record: RawRecord, is_jsonl: bool, json_key: str) -> str:
    """Returns the text of a document: the whole record, or the value of ``json_key`` in a line of JSON.

    Raises:
        ValueError: the record holds no text; says why, not where.
        RecursionError: JSON nested deeper than Python reads.
    """
    try:
        text = record.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8: byte 0x{record.data[error.start]:02x} at offset {error.start}"
        ) from None
    if not is_jsonl:
        return text
    try:
        page = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(page, dict):
        raise ValueError(f"a JSON {_json_type(page)}, not an object with the key '{json_key}'")
    if json_key not in page:
        raise ValueError(f"no key '{json_key}'{nearest(json_key, page)}")
    value = page[json_key]
    if not isinstance(value, str):
        raise ValueError(f"the value of '{json_key}' is a JSON {_json_type(value)}, not a string")
    # Half of a surrogate pair is valid in JSON but no Unicode text: it becomes U+FFFD.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _json_type(value: object) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return names.get(type(value), "null")
