"""From a command line to a RunConfig.

YAML files stack in the order given, dotted options win over every file wherever they stand, and a name that
does not exist is an error that says where it was typed and which name is nearest. jsonargparse checks the
types, writes the help from the docstrings and prints the resolved configuration; it is positional and
suggests nothing, which is why the arguments are taken apart here first.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonargparse
import yaml

from megatron_aha.config.fields import (
    accepts_none,
    all_fields,
    describe_type,
    is_mapping,
    section_class,
    suggest,
)
from megatron_aha.config.run import RunConfig
from megatron_aha.config.yaml_file import parse_yaml, read_yaml
from megatron_aha.errors import UserError, nearest

USAGE = "deepspeed launch/pretrain.sh [--config FILE.yaml]... [--SECTION.OPTION VALUE]... [--dry-run]"
COMMANDS = ["--config", "--dry-run", "--print_config", "--help"]


@dataclass
class ParsedRun:
    """What the user asked for.

    Args:
        config: the resolved configuration.
        explicit: dotted names that a file or an option stated; the rest of ``config`` is defaults.
        dry_run: report only, train nothing.
    """

    config: RunConfig
    explicit: set[str] = field(default_factory=set)
    dry_run: bool = False


@dataclass
class _Stated:
    """Values collected so far: nested as in YAML, and for every dotted leaf where it stood."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def state(self, name: str, value: Any, origin: str) -> None:
        *sections, last = name.split(".")
        place = self.tree
        for section in sections:
            # `rope_scaling: null` below a later `rope_scaling.factor` gives way to the mapping
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[last] = value
        for old in [known for known in self.origins if known.startswith(name + ".")]:
            del self.origins[old]
        self.origins[name] = origin


def parse_run(argv: Sequence[str]) -> ParsedRun:
    """Returns the run that a command line describes.

    Args:
        argv: arguments without the program's name: ``--config FILE``, ``--section.option VALUE`` (or
            ``=VALUE``), ``--dry-run``, ``--print_config`` (prints and exits), ``--help``; ``--local_rank``
            of the DeepSpeed launcher is dropped.

    Raises:
        UserError: an unknown name, a wrong type, a file that cannot be read.
        SystemExit: after ``--help`` and ``--print_config``.
    """
    files, options, commands = _take_apart(argv)
    if "--help" in commands:
        print(help_text(), end="")
        raise SystemExit(0)
    stated = _Stated()
    for path in files:
        _state_file(stated, read_yaml(path), path)
    for name, values in options:
        _state_option(stated, name, values)
    namespace = _checked(stated)
    if "--print_config" in commands:
        print(_parser().dump(namespace, skip_none=False), end="")
        raise SystemExit(0)
    config = RunConfig(**vars(_parser().instantiate(namespace)))
    return ParsedRun(config, explicit=set(stated.origins), dry_run="--dry-run" in commands)


def help_text() -> str:
    """Returns every option with its docstring, type and default, those of optional sections too."""
    parts = [_parser(with_commands=True).format_help()]
    for name, annotation in all_fields().items():
        if section_class(annotation) is not None and accepts_none(annotation):
            parser = jsonargparse.ArgumentParser(usage="", add_help=False)
            parser.add_class_arguments(section_class(annotation), name)
            parts.append(f"--{name}, " + parser.format_help().partition("usage:")[2].strip() + "\n")
    # jsonargparse also offers a file per section and a help per optional section; we take neither.
    offered = re.compile(
        r"^  --\S+ CONFIG\s+Path to a configuration file\.\n|^  --\S+\.help.*\n(?:   .*\n)*", re.M
    )
    return offered.sub("", "\n".join(parts))


def to_yaml(config: RunConfig) -> str:
    """Returns the configuration as YAML that ``--config`` reads back to an equal one."""
    parser = _parser()
    return parser.dump(parser.parse_object(dataclasses.asdict(config)), skip_none=False)


@functools.cache
def _parser(with_commands: bool = False) -> jsonargparse.ArgumentParser:
    parser = jsonargparse.ArgumentParser(usage=USAGE, exit_on_error=False, add_help=with_commands)
    if with_commands:
        parser.add_argument("--config", metavar="FILE", help="YAML file; may be repeated, later files win")
        parser.add_argument("--dry-run", action="store_true", help="report on the run without starting it")
        parser.add_argument("--print_config", action="store_true", help="print the resolved YAML and exit")
    parser.add_class_arguments(RunConfig)
    return parser


def _take_apart(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]], set[str]]:
    """Returns the configuration files, the options with their values, and commands such as ``--dry-run``."""
    files: list[str] = []
    options: list[tuple[str, list[str]]] = []
    commands: set[str] = set()
    for word, values in _groups(argv):
        if word == "--local_rank":
            continue
        if word == "--config":
            if not values:
                raise UserError("--config needs a file name")
            files += values
        elif word in ("--dry-run", "--dry_run", "--print_config", "--help", "-h"):
            if values:
                raise UserError(f"{word} takes no value, but '{values[0]}' follows it")
            commands.add({"--dry_run": "--dry-run", "-h": "--help"}.get(word, word))
        else:
            options.append((word.removeprefix("--"), values))
    return files, options, commands


def _groups(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each ``--word`` with the values that follow it, or that stand behind its ``=``."""
    word: str | None = None
    values: list[str] = []
    for argument in argv:
        if argument.startswith("--") or argument == "-h":
            if word is not None:
                yield word, values
            word, equals, value = argument.partition("=")
            values = [value] if equals else []
        elif word is None:
            raise UserError(f"'{argument}' stands before any option; usage: {USAGE}")
        else:
            values.append(argument)
    if word is not None:
        yield word, values


def _state_file(stated: _Stated, content: dict[str, Any], path: str, prefix: str = "") -> None:
    for key, value in content.items():
        name = f"{prefix}{key}"
        annotation = all_fields().get(name)
        if annotation is None:
            raise UserError(f"unknown key '{name}' in {path}{suggest(name)}")
        if isinstance(value, dict) and (section_class(annotation) or is_mapping(annotation)):
            if is_mapping(annotation):
                _state_free(stated, name, value, path)
            else:
                _state_file(stated, value, path, name + ".")
        elif value is None and name in RunConfig.__dataclass_fields__:
            continue  # a section whose every line is commented out
        else:
            stated.state(name, _texts(annotation, value), path)


def _state_free(stated: _Stated, name: str, content: dict[Any, Any], origin: str) -> None:
    """Records a free mapping key by key, so that a later file or option can replace one key of it."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            _state_free(stated, f"{name}.{key}", value, origin)
        else:
            stated.state(f"{name}.{key}", value, origin)


def _state_option(stated: _Stated, name: str, values: list[str]) -> None:
    origin = f"--{name}"
    annotation = all_fields().get(name)
    free = next((n for n, a in all_fields().items() if is_mapping(a) and name.startswith(n + ".")), None)
    if annotation is None and free is None:
        if "." not in name and nearest(origin, COMMANDS):
            raise UserError(f"unknown option {origin}{nearest(origin, COMMANDS)}")
        raise UserError(f"unknown option {origin}{suggest(name).replace(chr(39), chr(39) + '--', 1)}")
    if typing.get_origin(annotation) is list and not (len(values) == 1 and values[0].startswith("[")):
        stated.state(name, values, origin)
        return
    if not values and annotation is bool:
        values = ["true"]
    if len(values) != 1:
        found = f"{len(values)} follow it: {' '.join(values)}" if values else "none follows it"
        raise UserError(f"{origin} takes one value, but {found}; put quotes around a value with spaces")
    value = _from_text(annotation, values[0], origin)
    if isinstance(value, dict):
        if annotation is not None and section_class(annotation):
            _state_file(stated, value, f"the value of {origin}", name + ".")
        else:
            _state_free(stated, name, value, origin)
    else:
        stated.state(name, _texts(annotation, value), origin)


def _from_text(annotation: Any, text: str, origin: str) -> Any:
    """Returns an option's value; texts are taken as typed, everything else as YAML."""
    none = accepts_none(annotation) and text in ("null", "None")
    if none or annotation is str or annotation == str | None:
        return None if none else text
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(f"{origin}: '{text}' is not {describe_type(annotation or dict)}") from error


def _texts(annotation: Any, value: Any) -> Any:
    """Returns a list of texts with its numbers as texts: YAML reads the weights of a blend as numbers."""
    if typing.get_origin(annotation) is list and isinstance(value, list):
        return [str(item) if isinstance(item, int | float) and item is not True else item for item in value]
    return value


def _checked(stated: _Stated) -> jsonargparse.Namespace:
    parser = _parser()
    for name, origin in stated.origins.items():
        annotation, value = all_fields().get(name), _value_at(stated, name)
        # jsonargparse lets null through wherever it might mean "not given", and anything for a section
        if annotation is None or (value is None and accepts_none(annotation)):
            continue
        if value is None or section_class(annotation) is not None:
            raise _wrong_type(name, value, origin)
    try:
        return parser.parse_object(stated.tree)
    except argparse.ArgumentError as error:
        for name, origin in stated.origins.items():
            _check_leaf(parser, stated, name, origin)
        raise UserError(str(error)) from error


def _value_at(stated: _Stated, name: str) -> Any:
    value: Any = stated.tree
    for part in name.split("."):
        value = value[part]
    return value


def _check_leaf(parser: jsonargparse.ArgumentParser, stated: _Stated, name: str, origin: str) -> None:
    value = _value_at(stated, name)
    tree = value
    for part in reversed(name.split(".")):
        tree = {part: tree}
    try:
        parser.parse_object(tree)
    except argparse.ArgumentError:
        raise _wrong_type(name, value, origin) from None


def _wrong_type(name: str, value: Any, origin: str) -> UserError:
    expected = describe_type(all_fields()[name])
    where = origin if origin.startswith("--") else f"'{name}' in {origin}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    shown = (
        str(value)
        if is_number
        else f"'{value}'"
        if isinstance(value, str)
        else yaml.safe_dump(value).split("\n")[0]
    )
    hint = ": put it in quotes" if isinstance(value, int | float) and expected.startswith("text") else ""
    return UserError(f"{where} must be {expected}, not {shown}{hint}")
