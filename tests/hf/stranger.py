"""A stranger's process: plain transformers of any supported version, exported folders, no megatron_aha.

Run as ``python -P stranger.py JOB.json``. The job names folders to load; the answer says of each how far the
logits are from the expected ones and whether generation with caches equals that without. Each may be saved
elsewhere.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, __version__


def visit(folder: str, expected: str, save_to: str | None) -> dict[str, object]:
    """Returns what was found in one folder, ready for JSON."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    wanted = load_file(expected)
    tokens = wanted["tokens"]
    with torch.no_grad():
        output = model(tokens)
    difference = (output.logits - wanted["logits"]).abs().max() / wanted["logits"].abs().max()
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    mask = torch.ones_like(tokens)
    prompt, mask = tokens[:, :20].clone(), mask[:, :20].clone()
    prompt[0, :4], mask[0, :4] = 0, 0
    texts = [
        model.generate(prompt, attention_mask=mask, **options, **cache)
        for cache in ({"use_cache": False}, {"use_cache": True}, {"cache_implementation": "static"})
    ]
    found = {
        "difference": float(difference),
        "cached_equals_uncached": all(torch.equal(texts[0], text) for text in texts),
        "tied": model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr(),
        "class": type(model).__name__,
    }
    if Path(folder, "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found["tokens"] = len(tokenizer)
        inputs = tokenizer("w5 w6", return_tensors="pt")
        found["text"] = tokenizer.decode(model.generate(**inputs, max_new_tokens=1, do_sample=False)[0])
    if "AHA" in found["class"]:
        found["usage"] = model(tokens, output_router_stats=True).router_usage.tolist()
        # the decoder alone, as for embeddings
        found["decoder"] = type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__
    if save_to is not None:
        model.save_pretrained(save_to)
    return found


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    results = [visit(*folder) for folder in job["folders"]]
    known = [name for name in sys.modules if name.split(".")[0] == "megatron_aha"]
    answer = {"version": __version__, "results": results, "megatron_aha": known}
    Path(job["answer"]).write_text(json.dumps(answer))
