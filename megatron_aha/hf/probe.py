"""Loads an exported folder as a stranger would and stores its logits.

Run as a file in a process of its own (``python -P probe.py MODEL TOKENS OUT``): it must not know
megatron_aha, because the folder has to work without it. It loads the model when its standard input ends: who compares
holds a model of the same size until then.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def main(model_folder: str, tokens_file: str, output_file: str) -> None:
    """Writes ``logits`` fp32 [batch, tokens, vocab] and ``router_logits`` [layers, batch, tokens, routers].

    The latter only for a model with routers.
    """
    sys.stdin.read()
    model = AutoModelForCausalLM.from_pretrained(
        # not our kernels, which computed what this is compared with
        model_folder,
        trust_remote_code=True,
        dtype=torch.float32,
        attn_implementation="sdpa",
    ).eval()
    tokens = load_file(tokens_file)["tokens"]
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        router = getattr(layer.self_attn, "router", None)
        if router is not None:
            layer.self_attn.register_forward_hook(lambda module, args, output: seen.append(output[2]))
    with torch.no_grad():
        found = {"logits": model(tokens, use_cache=False).logits.contiguous()}
    if seen:
        found["router_logits"] = torch.stack(seen)
    if "megatron_aha" in sys.modules:
        raise SystemExit("the exported model imported megatron_aha: it would not load elsewhere")
    save_file(found, output_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
