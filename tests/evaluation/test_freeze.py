"""tools/freeze_heads.py: which heads it freezes, and what its report says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_models import WINDOW, make_aha, make_llama, save_tokenizer

from megatron_aha.errors import UserError
from megatron_aha.evaluation.freeze import main
from megatron_aha.hf.code import write_code

WORDS = torch.randint(296, (200,), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export in which heads 0 and 1 of layer 0 never look back, and head 2 of layer 1 does so always."""
    model = make_aha()
    for layer, router, bias in ((0, 0, -1.0), (0, 1, -1.0), (1, 2, 1.0)):
        model.model.layers[layer].self_attn.router.weight.data[router] = 0.0
        model.model.layers[layer].self_attn.router.bias.data[router] = bias
    model.save_pretrained(tmp_path / "aha")
    save_tokenizer(tmp_path / "aha")
    write_code(tmp_path / "aha", "llama")
    (tmp_path / "aha" / "README.md").write_text("# A model\n")
    (tmp_path / "text.txt").write_text(" ".join(f"w{int(word)}" for word in WORDS))
    return tmp_path / "aha"


def freeze(folder: Path, *options: str, length: str = "200") -> dict:
    work = folder.parent
    paths = ["--model", str(folder), "--output", str(work / "frozen"), "--text", str(work / "text.txt")]
    main([*paths, "--device", "cpu", "--length", length, "--json", str(work / "report.json"), *options])
    return json.loads((work / "report.json").read_text())


def test_heads_that_never_look_back_are_frozen_and_nothing_else_changes(folder: Path) -> None:
    report = freeze(folder)
    config = json.loads((folder.parent / "frozen" / "config.json").read_text())
    assert config["aha_frozen_routers"] == [[0, 1], []]
    assert (report["heads"], report["frozen"], report["groups"], report["static_groups"]) == (8, 2, 4, 1)
    before, after = report["perplexity"]
    assert after == pytest.approx(before, rel=1e-6)
    assert report["usage"][0] == pytest.approx(report["usage"][1])
    # 2 layers, keys and values, 2 groups of 16 fp32 numbers a token; one group of one layer keeps a window
    per_group = 2 * 16 * 4
    assert report["context"] == 200
    assert report["cache_bytes"] == [4 * 200 * per_group, (3 * 200 + WINDOW - 1) * per_group]


def test_a_threshold_freezes_what_lies_under_it(folder: Path) -> None:
    tokens = WORDS[None] + 4
    model = type(make_aha()).from_pretrained(folder).eval()
    usage = model(tokens, output_router_stats=True).router_usage_beyond_window
    bound = float(usage.flatten().sort().values[4])
    report = freeze(folder, "--threshold", str(bound + 1e-6))
    frozen = json.loads((folder.parent / "frozen" / "config.json").read_text())["aha_frozen_routers"]
    assert frozen == [[head for head in range(4) if row[head] <= bound + 1e-6] for row in usage]
    assert report["frozen"] == 5 and report["usage"][1] < report["usage"][0]
    assert report["perplexity"][0] != report["perplexity"][1]


def test_the_folder_loads_elsewhere_with_code_and_card_of_its_own(folder: Path, tmp_path: Path) -> None:
    # as an older export would have it: code that knows nothing of frozen heads
    (folder / "modeling_llama_aha.py").write_text("raise ImportError('stale')\n")
    assert freeze(folder, length="150")["context"] == 150
    card = (tmp_path / "frozen" / "README.md").read_text()
    assert card.startswith(
        "# A model\n\n## Frozen heads\n\n2 routers, whose usage on a text was at most 0.0,"
    )
    script = (
        "import sys, torch; from transformers import AutoModelForCausalLM as A; "
        f"m = A.from_pretrained({str(tmp_path / 'frozen')!r}, trust_remote_code=True); "
        "c = m(torch.arange(30)[None] + 4, use_cache=True); "
        "print([type(l).__name__ for l in c.past_key_values.layers], 'megatron_aha' in sys.modules)"
    ).replace("c.past_key_values", "(getattr(c, 'cache', None) or c['past_key_values'])")
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['SplitLayer', 'DynamicLayer'] False"


def test_what_cannot_be_frozen_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no token beyond the window of {WINDOW} tokens at --length 8"):
        freeze(folder, length="8")
    with pytest.raises(UserError, match="--threshold 2.0 must be a share"):
        freeze(folder, "--threshold", "2")
    with pytest.raises(UserError, match="--length 0 must be at least 2"):
        freeze(folder, length="0")
    with pytest.raises(UserError, match="--max-tokens -1 must be at least 2"):
        freeze(folder, "--max-tokens", "-1")
    with pytest.raises(UserError, match="is no exported folder"):
        freeze(tmp_path / "nothing")
    make_llama().save_pretrained(tmp_path / "dense")
    save_tokenizer(tmp_path / "dense")
    with pytest.raises(UserError, match="dense has no routers"):
        freeze(tmp_path / "dense")
    freeze(folder)
    with pytest.raises(UserError, match="--output .*frozen exists"):
        freeze(folder)
