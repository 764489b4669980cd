"""Checks a GPU in a few minutes: parity of every attention backend, a short benchmark, real training steps.

    python tools/check_gpu.py --output docs/benchmarks/my-gpu --data my_corpus_text_document

Writes <output>.json and <output>.md. Training (20 steps in bf16 under ZeRO-1, once with the Triton kernels
and once with the reference, whose losses are compared) needs --data, the prefix of a preprocessed corpus;
without it, it is left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aha_kernels import InputError, aha_attention
from aha_kernels.reference import reference_attention

REPOSITORY = Path(__file__).resolve().parents[1]
NAMES = ("out", "dq", "dk", "dv", "droute")
SHAPES: list[dict[str, Any]] = [
    {"tokens": 1000, "heads": 8, "kv_heads": 2, "head_dim": 128, "window": 100, "usage": 0.07},
    {"tokens": 513, "heads": 4, "kv_heads": 4, "head_dim": 64, "window": 33, "usage": 0.5},
    {"tokens": 300, "heads": 2, "kv_heads": 1, "head_dim": 96, "window": 16, "usage": 1.0},
    {"tokens": 300, "heads": 2, "kv_heads": 1, "head_dim": 256, "window": 16, "usage": 0.0},
]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
LOSS_TOLERANCE = 0.02  # between backends, of losses near 10, in bf16


def relative_errors(shape: dict[str, Any], dtype: torch.dtype, backend: str, device: str) -> dict[str, float]:
    """Returns the error of output and gradients against float64, relative to the truth's root mean square."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        x = torch.randn(1, shape["tokens"], heads, shape["head_dim"], generator=generator)
        return x.to(device, dtype).requires_grad_()

    q, k, v = random(shape["heads"]), random(shape["kv_heads"]), random(shape["kv_heads"])
    route = (torch.rand(1, shape["tokens"], shape["heads"], generator=generator) < shape["usage"]).float()
    leaves = (q, k, v, route.to(device).requires_grad_())
    gradient = torch.randn(q.shape, generator=generator).to(device, dtype)
    out = aha_attention(*leaves, shape["window"], backend=backend)
    ours = (out, *torch.autograd.grad(out, leaves, gradient))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    truth_out = reference_attention(exact[0], exact[1], exact[2], exact[3], shape["window"])
    truth = (truth_out, *torch.autograd.grad(truth_out, exact, gradient.double()))
    return {
        name: ((x.double() - y).square().mean().sqrt() / y.square().mean().sqrt().clamp_min(0.05)).item()
        for name, x, y in zip(NAMES, ours, truth, strict=True)
    }


def check_parity(device: str) -> list[dict[str, Any]]:
    """Returns one record for each backend, dtype and shape; a backend that cannot run says why."""
    records = []
    for backend in ("torch", "triton", "flash"):
        for dtype, limit in TOLERANCE.items():
            for shape in SHAPES:
                record = {"backend": backend, "dtype": str(dtype), **shape}
                try:
                    errors = relative_errors(shape, dtype, backend, device)
                    record |= {"errors": errors, "passed": max(errors.values()) <= limit}
                except InputError as error:
                    record |= {"left_out": str(error)}
                records.append(record)
    return records


def benchmark(lengths: list[int], folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of a short run of tools/bench_attention.py."""
    output = folder / "bench.json"
    command = [
        sys.executable,
        str(REPOSITORY / "tools" / "bench_attention.py"),
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
    ]
    command += ["--head-dim", "128", "--usage", "1", "0.07", "--routes", "random", "clustered", "--runs", "5"]
    command += [
        "--tasks",
        "prefill",
        "none",
        "exact",
        "sampled:0.05",
        "decode",
        "--json",
        str(output),
        "--lengths",
    ]
    subprocess.run(command + [str(length) for length in lengths], check=True)
    return list(json.loads(output.read_text()))


def train(backend: str, data: str, folder: Path) -> list[float]:
    """Returns the language-model losses of 20 training steps of a tiny model with a backend."""
    logs = folder / backend
    configs = [f"configs/{name}.yaml" for name in ("model/tiny", "parallel/single", "run/cpu-smoke")]
    command = ["deepspeed", "--num_gpus", "1", "launch/pretrain.sh"]
    for config in configs:
        command += ["--config", config]
    command += ["--data.blend", data, "--aha.backend", backend, "--training.precision", "bf16"]
    command += [
        "--training.zero_stage",
        "1",
        "--training.train_steps",
        "20",
        "--logging.directory",
        str(logs),
    ]
    command += ["--checkpoint.directory", str(folder / f"{backend}-checkpoints")]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    lines = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    return [line["train/lm_loss"] for line in lines if "train/lm_loss" in line]


def summary(result: dict[str, Any]) -> str:
    """Returns the result as Markdown."""
    lines = [
        f"# {result['gpu']}, torch {result['torch']}",
        "",
        "| backend | dtype | head_dim | worst error | |",
    ]
    lines.append("|---|---|---|---|---|")
    for record in result["parity"]:
        worst = f"{max(record['errors'].values()):.1e}" if "errors" in record else "-"
        verdict = record.get("left_out") or ("passed" if record["passed"] else "FAILED")
        lines.append(
            f"| {record['backend']} | {record['dtype']} | {record['head_dim']} | {worst} | {verdict} |"
        )
    lines += [
        "",
        "| task | length | usage | routes | ours ms | peer | peer ms | ratio | ideal |",
        "|" + "---|" * 9,
    ]
    for row in result["benchmark"]:
        lines.append(
            f"| {row['task']} | {row['length']} | {row['usage']:.2f} | {row['routes']} | {row['ours_ms']:.2f} | "
            f"{row['peer']} | {row['peer_ms']:.2f} | {row['ratio']:.2f} | {row['ideal']:.2f} |"
        )
    if "training" in result:
        worst = result["training"]["worst_difference"]
        lines += [
            "",
            f"20 training steps, Triton against the reference: losses differ by at most {worst:.4f}.",
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs the checks; returns 1 when parity or training fails, 2 when there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="results go to OUTPUT.json and OUTPUT.md")
    parser.add_argument("--data", help="prefix of a preprocessed corpus, for the training steps")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "error: torch sees no GPU here; the same checks without one are in tests/kernels", file=sys.stderr
        )
        return 2
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    result["parity"] = check_parity("cuda")
    good = all(record.get("passed", True) for record in result["parity"])
    with tempfile.TemporaryDirectory() as name:
        result["benchmark"] = benchmark(arguments.lengths, Path(name)) if good else []
        if arguments.data and good:
            triton, reference = (
                train(backend, arguments.data, Path(name)) for backend in ("triton", "reference")
            )
            worst = max(abs(x - y) for x, y in zip(triton, reference, strict=True))
            result["training"] = {"triton": triton, "reference": reference, "worst_difference": worst}
            good = worst <= LOSS_TOLERANCE
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    text = summary(result)
    arguments.output.with_suffix(".md").write_text(text)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
