"""What a process sees that loads an exported folder: its text is given to ``python -c``, with the folder.

It prints, as JSON, what transformers says of the package ``kernels``, and a fingerprint of logits, usage and generated
tokens by attention.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils import is_kernels_available

found: dict[str, object] = {"version": transformers.__version__, "available": bool(is_kernels_available())}
spec = importlib.util.find_spec("kernels")
found["origin"] = None if spec is None else spec.origin
tokens = torch.randint(3, 301, (2, 40), generator=torch.Generator().manual_seed(3))
for attention in ("sdpa", "aha_kernels"):
    model = AutoModelForCausalLM.from_pretrained(
        sys.argv[1], trust_remote_code=True, attn_implementation=attention, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        output = model(tokens, output_router_stats=True)
    made = model.generate(tokens, max_new_tokens=4, do_sample=False)
    seen = hashlib.sha256()
    for tensor in (output.logits, output.router_usage, made):
        seen.update(tensor.numpy().tobytes())
    found[attention] = seen.hexdigest()
print(json.dumps(found))
