"""Reading one YAML file the way its author meant it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_aha.errors import UserError


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error; ``1e-4``, a text in YAML 1.1, jsonargparse takes as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"'{key}' is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Returns the value that YAML (or JSON) text holds; raises ``yaml.YAMLError``."""
    return yaml.load(text, Loader=_Loader)


def read_yaml(path: str) -> dict[str, Any]:
    """Returns the mapping in a YAML file; raises UserError when there is none to read."""
    try:
        content = parse_yaml(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"--config {path}: cannot read this file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--config {path}: not a text file in UTF-8 ({error.reason})") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"--config {path}{where}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UserError(f"--config {path}: not YAML ({error})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(
            f"--config {path}: expected sections such as 'training:', found {type(content).__name__} instead"
        )
    return content
