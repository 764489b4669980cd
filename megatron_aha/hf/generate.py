"""Command line of ``tools/generate.py``: text as it comes, and how much full attention it took."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from megatron_aha.errors import UserError
from megatron_aha.hf.cli import quiet_libraries
from megatron_aha.hf.dtypes import DTYPES, parse_dtype
from megatron_aha.hf.loading import ATTENTIONS, LoadedModel, load_model
from megatron_aha.hf.usage import UsageCounter


def main(argv: Sequence[str]) -> None:
    """Continues a prompt; the text goes to standard output, the usage of full attention to standard error.

    Decoding is greedy, or by beams, unless --temperature or --top-p is given; beams are printed when they are done.
    """
    quiet_libraries()
    options = _parse(argv)
    dtype = parse_dtype(options.dtype)
    prompt = _standard_input() if options.prompt is None else options.prompt
    loaded = load_model(
        options.model,
        dtype=dtype,
        attention=options.attention,
        device=options.device,
        say=lambda line: print(line, file=sys.stderr),
    )
    inputs = _encode(loaded.needed_tokenizer(), prompt, options.chat, options.model)
    length = inputs["input_ids"].shape[1]
    positions = loaded.model.config.max_position_embeddings
    if length + options.max_new_tokens > positions:
        print(
            f"warning: {length} prompt tokens and --max-new-tokens {options.max_new_tokens} are more than the "
            f"{positions} positions of the model: text beyond them is of lower quality",
            file=sys.stderr,
        )
    # the last new token is never read: it has no routes
    with UsageCounter(loaded.model, (0, length)) as usage:
        began = time.perf_counter()
        tokens = _generate(loaded, inputs, options)
        seconds = time.perf_counter() - began
    new = tokens.shape[1] - length
    print(
        f"{length} prompt tokens, {new} new ones in {seconds:.1f} s ({new / seconds:.1f}/s)", file=sys.stderr
    )
    print(usage_table(usage, loaded.model.config), file=sys.stderr)


def usage_table(usage: UsageCounter, config: Any) -> str:
    """Returns the usage of full attention per layer and in total, of the prompt's and of the generated tokens.

    Args:
        usage: a ``UsageCounter`` with the buckets prompt and generated.
        config: of the model.
    """
    if not usage.layers:
        return "usage of full attention: 100%, a model without routers"
    sinks = f" and {config.aha_num_sink_tokens} sink tokens" if config.aha_num_sink_tokens else ""
    lines = [
        f"usage of full attention, window of {config.aha_window} tokens{sinks}",
        f"{'layer':>6} {'prompt':>8} {'generated':>10} {'beyond the window':>18}",
    ]
    columns = [usage.per_layer(0), usage.per_layer(1), usage.per_layer(1, beyond_window=True)]
    totals = [usage.total(0), usage.total(1), usage.total(1, beyond_window=True)]
    rows: list[tuple[str, list[float | None]]] = [
        (str(layer), [None if column is None else column[row] for column in columns])
        for row, layer in enumerate(usage.layers)
    ]
    for name, cells in [*rows, ("total", totals)]:
        shown = ["-" if cell is None else f"{cell:.1%}" for cell in cells]
        lines.append(f"{name:>6} {shown[0]:>8} {shown[1]:>10} {shown[2]:>18}")
    return "\n".join(lines)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="generate.py", description=main.__doc__)
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="Hugging Face folder, .gguf file, or checkpoint of ours",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue; default: standard input")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default 128)")
    parser.add_argument("--temperature", type=float, metavar="T", help="sample at this temperature")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the likeliest tokens of this share"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default 0)")
    parser.add_argument("--num-beams", type=int, default=1, metavar="N", help="beams searched (default 1)")
    add_model_options(parser)
    options = parser.parse_args(argv)
    for name, least in (("max_new_tokens", 1), ("num_beams", 1)):
        if getattr(options, name) < least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least {least}")
    if not 0 <= options.seed < 2**32:
        raise UserError(f"--seed {options.seed} must be from 0 to {2**32 - 1}")
    if options.temperature is not None and not options.temperature > 0:
        raise UserError(
            f"--temperature {options.temperature} must be above 0; leave it out for greedy decoding"
        )
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise UserError(f"--top-p {options.top_p} must be above 0 and at most 1")
    return options


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds how a model is loaded: ``--dtype``, ``--attention``, ``--device``."""
    parser.add_argument(
        "--dtype", metavar="TYPE", help=f"compute in one of {', '.join(DTYPES)}; default: as stored"
    )
    parser.add_argument(
        "--attention",
        choices=ATTENTIONS,
        help="aha_kernels does the work that the routes ask for; default: transformers' choice",
    )
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda; default: a GPU where there is one")


def _standard_input() -> str:
    """Returns the text on standard input. Raises UserError when it is not UTF-8."""
    try:
        text = sys.stdin.read()
        text.encode()  # where the locale names no encoding, Python lets other bytes pass as half characters
    except UnicodeError as error:
        raise UserError("the prompt on standard input is not UTF-8; convert it, or give --prompt") from error
    return text


def _encode(tokenizer: Any, prompt: str, chat: bool, model: str) -> Any:
    """Returns the model's inputs, one row. Raises UserError when the prompt is empty or cannot be framed."""
    if chat:
        if not tokenizer.chat_template:
            raise UserError(f"--chat: the tokenizer of {model} has no chat template; leave --chat out")
        messages = [{"role": "user", "content": prompt}]
        framed = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(framed, return_tensors="pt", add_special_tokens=False)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise UserError("--prompt is empty; give some text, on standard input when the option is left out")
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def _generate(loaded: LoadedModel, inputs: dict[str, Any], options: argparse.Namespace) -> Any:
    """Prints the continuation and returns the tokens, the prompt's included, ``[1, tokens]``."""
    from transformers import TextStreamer, set_seed

    model, tokenizer = loaded.model, loaded.tokenizer
    choices: dict[str, Any] = {"do_sample": options.temperature is not None or options.top_p is not None}
    if choices["do_sample"]:
        set_seed(options.seed)
        choices |= {"temperature": options.temperature or 1.0, "top_p": options.top_p or 1.0}
    else:
        # what a folder's generation configuration says of sampling would only be warned about
        choices |= {"temperature": None, "top_p": None, "top_k": None}
    if model.generation_config.pad_token_id is None:
        ends = model.generation_config.eos_token_id
        choices["pad_token_id"] = ends[0] if isinstance(ends, list) else ends
    streamed = options.num_beams == 1
    tokens = model.generate(
        **{name: value.to(model.device) for name, value in inputs.items()},
        max_new_tokens=options.max_new_tokens,
        num_beams=options.num_beams,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True) if streamed else None,
        **choices,
    )
    if not streamed:
        print(tokenizer.decode(tokens[0], skip_special_tokens=True))
    return tokens
