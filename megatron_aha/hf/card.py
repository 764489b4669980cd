"""The model card of an exported folder: what the model is made of, what it was trained on, how it is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_aha.checkpoint.format import CheckpointReader
from megatron_aha.config.aha import AHAConfig
from megatron_aha.hf.source import CARD_FILE, Source

# Beside what an import carries along: where the weights came from.
ORIGIN_FILE = "origin.json"
_LICENCES = ("license", "license_name", "license_link")
_SETTINGS = (
    "training.global_batch_size",
    "training.lr",
    "training.min_lr",
    "training.schedule",
    "training.warmup_steps",
    "training.weight_decay",
    "training.clip_grad",
    "training.precision",
    "training.zero_stage",
    "training.seed",
    "training.freeze_model",
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.context_parallel_size",
)
_OF_THE_ROUTER = ("init_bias", "init_std", "lr", "weight_decay", "router_grad")


def write_origin(folder: Path, path: Path, source: Source) -> None:
    """Notes the name of the base model beside the files that an import carries along.

    Args:
        folder: of the carried files, the source's model card among them.
        path: what was imported.
        source: the same, opened.
    """
    name = path.resolve().stem if path.is_file() else path.resolve().name
    for part in path.resolve().parts:
        # as the Hub's cache names its folders: models--OWNER--NAME/snapshots/REVISION
        if part.startswith("models--"):
            name = part.removeprefix("models--").replace("--", "/")
    card = front_matter(folder / CARD_FILE)
    if source.aha is not None and isinstance(card.get("base_model"), str):
        name = card["base_model"]
    (folder / ORIGIN_FILE).write_text(json.dumps({"base_model": name}) + "\n", encoding="utf-8")


def front_matter(path: Path) -> dict[str, Any]:
    """Returns what a model card says in its YAML head; empty without a card, or one that cannot be read."""
    try:
        head = path.read_text(encoding="utf-8").split("---", maxsplit=2)
        values = yaml.safe_load(head[1]) if len(head) == 3 and not head[0].strip() else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def write_card(
    folder: Path, reader: CheckpointReader, base_model: str | None, measured: Sequence[float] | None
) -> None:
    """Writes the model card in place of the source's, keeping what that said of its licence.

    Args:
        folder: the exported folder, with what the import carried.
        reader: the checkpoint that was exported.
        base_model: a name that the user gave; None takes the one the import noted.
        measured: usage of full attention of each layer with routers, as the export's check found it; None when it
            was not run.
    """
    origin = folder / ORIGIN_FILE
    if origin.exists():
        base_model = base_model or json.loads(origin.read_text(encoding="utf-8"))["base_model"]
        origin.unlink()
    licences = {key: value for key, value in front_matter(folder / CARD_FILE).items() if key in _LICENCES}
    routed = reader.aha is not None and reader.aha.enabled
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", **licences}
    if base_model is not None:
        head["base_model"] = base_model
    head["tags"] = ["megatron_aha", *(["all-or-here-attention"] if routed else [])]
    title = base_model or f"A {reader.model.family} model"
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=True, allow_unicode=True)}---",
        f"# {title}{' with All-or-Here Attention' if routed else ', exported from megatron_aha'}",
    ]
    if routed and reader.aha is not None:
        parts += [_attention(reader, reader.aha, base_model), _usage(reader, measured)]
    parts += [_training(reader), _loading(reader, routed), _licence(folder, base_model, licences)]
    (folder / CARD_FILE).write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _attention(reader: CheckpointReader, aha: AHAConfig, base_model: str | None) -> str:
    heads = {"head": "a router for each query head", "kv_group": "a router for each key/value head"}
    layers, model = reader.model.routed_layers, reader.model
    rows = [
        ("base model", base_model or "not recorded"),
        ("window", f"{aha.window} tokens, the token itself included"),
        ("sink tokens", aha.num_sink_tokens),
        ("granularity", heads[aha.granularity]),
        ("layers with routers", f"{len(layers)} of {model.num_layers}"),
        ("router bias", "yes" if aha.bias else "no"),
        ("lambda, weight of the router loss", aha.loss_coefficient),
    ]
    return (
        "Each head of each layer has a router that decides for every token whether it attends to *all* tokens before "
        "it or to those *here*, in a sliding window ([arXiv 2512.22562](https://arxiv.org/abs/2512.22562)).\n\n"
        + _table(("setting", "value"), rows)
    )


def _usage(reader: CheckpointReader, measured: Sequence[float] | None) -> str:
    recorded = (reader.state or {}).get("usage")
    if recorded is not None:
        shares = [sum(recorded[layer]) / len(recorded[layer]) for layer in reader.model.routed_layers]
        where = f"On the training batch of step {reader.step}"
    elif measured is not None:
        shares = list(measured)
        where = "On random tokens, by the check that ends the export (no training step recorded it)"
    else:
        return "## Usage of full attention\n\nNot recorded: no training step and no check of the export measured it."
    rows: list[tuple[object, str]] = [
        (layer, f"{share:.1%}") for layer, share in zip(reader.model.routed_layers, shares, strict=True)
    ]
    rows.append(("all", f"{sum(shares) / len(shares):.1%}"))
    return f"## Usage of full attention\n\n{where}, share of token-heads that took *all*:\n\n" + _table(
        ("layer", "usage"), rows
    )


def _training(reader: CheckpointReader) -> str:
    state = reader.state
    if state is None:
        return f"## Training\n\nNone recorded: the checkpoint (step {reader.step}) holds weights alone."
    rows: list[tuple[object, object]] = [("steps", reader.step)]
    if "consumed_samples" in state:
        rows.append(("sequences", state["consumed_samples"]))
    run = state.get("run", {})
    if "seq_length" in run:
        rows += [
            ("sequence length", run["seq_length"]),
            ("tokens", state["consumed_samples"] * run["seq_length"]),
        ]
    for setting in _SETTINGS:
        section, name = setting.split(".")
        if name in run.get(section, {}):
            rows.append((setting, run[section][name]))
    if reader.aha is not None:
        rows += [(f"aha.{name}", getattr(reader.aha, name)) for name in _OF_THE_ROUTER]
    return "## Training\n\nContinued pretraining with megatron_aha.\n\n" + _table(("setting", "value"), rows)


def _loading(reader: CheckpointReader, routed: bool) -> str:
    trust = ", trust_remote_code=True" if routed else ""
    why = ""
    if routed:
        why = (
            f" `trust_remote_code` is for `modeling_{reader.model.family}_aha.py` in this folder;"
            " `output_router_stats=True` returns routes and usage."
        )
    return (
        "## Loading\n\nNeeds torch and transformers (4.57 to 5)."
        f"{why}\n\n```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder"{trust})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder"{trust})\n```'
    )


def _licence(folder: Path, base_model: str | None, licences: dict[str, Any]) -> str:
    files = sorted(path.name for path in folder.iterdir() if path.name.startswith(("LICENSE", "NOTICE")))
    of = base_model or "the base model"
    said = (
        f": its card says {', '.join(f'{key} {value}' for key, value in licences.items())}"
        if licences
        else ""
    )
    held = f". The files {', '.join(files)} came with it" if files else ""
    if not licences and not files:
        said = "; its folder named none, so look at where it was published"
    return (
        f"## Licence\n\nThe weights derive from {of} and stand under its licence{said}{held}. "
        "The modelling code is Apache-2.0."
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(head), *([str(cell).replace("|", r"\|") for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
