"""Times All-or-Here attention against dense attention in the same run, on CPU or GPU.

    python tools/bench_attention.py --device cpu --threads 1 --lengths 4096 8192 --usage 1 0.07 0
    python tools/bench_attention.py --device cuda --dtype bfloat16 --head-dim 128 --lengths 8192 32768

Prints a Markdown table: medians, the ratio to the best dense peer, the ideal ratio (dense keys over keys
that the routes open; causal halves count), the share of the ideal that was reached and the peak memory
above the inputs. Runs of ours and of the peers alternate, so that both meet the same disturbances. With ``--flex``
FlexAttention computes the same routes beside them, compiled by torch (needs a compiler; forward only on a CPU).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from aha_kernels import aha_attention, aha_decode

Step = Callable[[], None]


@dataclass
class Row:
    """One line of the table; times in milliseconds, memory in MiB above the inputs."""

    task: str
    length: int
    usage: float
    routes: str
    ours_ms: float
    peer: str
    peer_ms: float
    flex_ms: float
    ratio: float
    ideal: float
    share_of_ideal: float
    ours_mib: float
    peer_mib: float


def make_routes(length: int, heads: int, usage: float, kind: str, device: str) -> Tensor:
    """Returns fp32 [1, length, heads] of 0 and 1: alike in all heads, or clustered in a few busy ones."""
    share = torch.full((heads,), usage)
    if kind == "clustered":
        share = 0.5 ** torch.arange(heads)
        for _ in range(50):  # scale to the wanted mean, no head above 1
            share = (share * usage / share.mean().clamp_min(1e-9)).clamp_max(1.0)
    return (torch.rand(1, length, heads) < share).float().to(device)


def ideal_ratio(length: int, usage: float, window: int) -> float:
    """Returns keys of dense causal attention over keys that routes of this usage open."""
    near = sum(min(t + 1, window) for t in range(length))
    dense = length * (length + 1) / 2
    return dense / (usage * dense + (1 - usage) * near)


class Meter:
    """Times alternating runs and records peak memory."""

    def __init__(self, device: str, clock: str) -> None:
        self.cuda = device == "cuda"
        self.clock = time.process_time if clock == "cpu" else time.perf_counter

    def time_ms(self, step: Step) -> float:
        """Returns the milliseconds of one run."""
        if self.cuda:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            stop.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(stop))
        begin = self.clock()
        step()
        return (self.clock() - begin) * 1e3

    def medians(self, steps: list[Step], runs: int) -> list[float]:
        """Returns the median of each step over alternating runs, after one warm-up."""
        for step in steps:
            step()
        times = [[self.time_ms(step) for step in steps] for _ in range(runs)]
        return [statistics.median(column) for column in zip(*times, strict=True)]

    def peak_mib(self, step: Step) -> float:
        """Returns the most memory that PyTorch's allocator held at any time of a run (on a CPU: of a run on one
        thread), above what it held before, in MiB.
        """
        if self.cuda:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            return (torch.cuda.max_memory_allocated() - before) / 2**20
        # Not the resident set: the kernel counts it in steps of a quarter of a MiB per processor. The profiler sees one
        # thread.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        torch.set_num_threads(threads)
        events = profiler.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        return max(0, *itertools.accumulate(change for _, change in changes)) / 2**20


def dense_peers(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Returns the dense causal attentions that exist here, each as a function of nothing."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa() -> Tensor:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        grouped = q.shape[2] != k.shape[2]
        out = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2)

    if not q.is_cuda:
        return {"SDPA": sdpa}

    def chosen(kind: SDPBackend) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(kind):
                return sdpa()

        return run

    peers = {
        "SDPA flash": chosen(SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": chosen(SDPBackend.CUDNN_ATTENTION),
    }
    try:
        from flash_attn import flash_attn_func

        peers["flash-attn"] = lambda: flash_attn_func(q, k, v, causal=True)
    except ImportError:
        pass
    return peers


def flex_attention_peer(q: Tensor, k: Tensor, v: Tensor, route: Tensor, window: int) -> Callable[[], Tensor]:
    """Returns FlexAttention (torch.nn.attention) under the same routes, as a function of nothing."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    opened = route.detach()[0].T.bool().contiguous()  # [heads, tokens]

    def visible(_batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (opened[head, query] | (key > query - window))

    num_heads, length = opened.shape
    mask = create_block_mask(visible, 1, num_heads, length, length, device=q.device.type)
    compiled = torch.compile(flex_attention)

    def run() -> Tensor:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        grouped = q.shape[2] != k.shape[2]
        out = compiled(heads[0], heads[1], heads[2], block_mask=mask, enable_gqa=grouped)
        return out.transpose(1, 2)

    return run


def runs_here(step: Callable[[], object]) -> bool:
    """Returns whether a peer computes at all on this device and dtype."""
    try:
        step()
    except (RuntimeError, NotImplementedError) as error:
        print(f"left out: {str(error).strip().splitlines()[0]}")
        return False
    return True


def with_backward(attend: Callable[[], Tensor], leaves: tuple[Tensor, ...], gradient: Tensor) -> Step:
    """Returns forward and backward as one step."""

    def step() -> None:
        torch.autograd.grad(attend(), leaves, gradient)

    return step


def without_grad(attend: Callable[[], Tensor]) -> Step:
    """Returns the forward pass alone as a step."""

    def step() -> None:
        with torch.no_grad():
            attend()

    return step


def with_flex(
    arguments: argparse.Namespace,
    inputs: tuple[Tensor, Tensor, Tensor],
    route: Tensor,
    gradient: Tensor | None,
) -> list[Step]:
    """Returns FlexAttention's step, with backward when there is a gradient; nothing unless asked for and able."""
    if not arguments.flex:
        return []
    if gradient is None:  # on a CPU it refuses inputs that may want a gradient
        inputs = inputs[0].detach(), inputs[1].detach(), inputs[2].detach()
    attend = flex_attention_peer(*inputs, route, arguments.window)
    step = without_grad(attend) if gradient is None else with_backward(attend, inputs, gradient)
    return [step] if runs_here(step) else []


def bench_training(
    arguments: argparse.Namespace, meter: Meter, length: int, usage: float, kind: str
) -> list[Row]:
    """Returns the rows of prefill and of forward+backward with each router gradient mode."""
    shape, dtype = (1, length), getattr(torch, arguments.dtype)

    def random(heads: int) -> Tensor:
        x = torch.randn(*shape, heads, arguments.head_dim, device=arguments.device).to(dtype)
        return x.requires_grad_()

    q, k, v = random(arguments.heads), random(arguments.kv_heads), random(arguments.kv_heads)
    route = make_routes(length, arguments.heads, usage, kind, arguments.device).requires_grad_()
    gradient = torch.randn_like(q)
    peers = {name: peer for name, peer in dense_peers(q, k, v).items() if runs_here(peer)}
    ideal = ideal_ratio(length, float(route.detach().mean()), arguments.window)

    def ours(mode: str) -> Callable[[], Tensor]:
        return lambda: aha_attention(q, k, v, route, arguments.window, router_grad=mode)

    rows = []
    for task in arguments.tasks:
        if task == "prefill":
            steps = [without_grad(ours("none"))] + [without_grad(peer) for peer in peers.values()]
        elif task == "decode":
            continue
        else:
            leaves = (q, k, v) if task == "none" else (q, k, v, route)
            steps = [with_backward(ours(task), leaves, gradient)]
            steps += [with_backward(peer, (q, k, v), gradient) for peer in peers.values()]
        flex = with_flex(arguments, (q, k, v), route, None if task == "prefill" else gradient)
        *times, flex_ms = meter.medians([*steps, *flex], arguments.runs) + [float("nan")] * (not flex)
        best = min(range(1, len(times)), key=times.__getitem__)
        ratio = times[best] / times[0]
        memory = [meter.peak_mib(steps[0]), meter.peak_mib(steps[best])]
        name = list(peers)[best - 1]
        rows.append(
            Row(
                task,
                length,
                usage,
                kind,
                times[0],
                name,
                times[best],
                flex_ms,
                ratio,
                ideal,
                ratio / ideal,
                *memory,
            )
        )
    return rows


def bench_decode(arguments: argparse.Namespace, meter: Meter, length: int, usage: float, kind: str) -> Row:
    """Returns the row of decoding one token; usage is of whole KV groups."""
    dtype, group = getattr(torch, arguments.dtype), arguments.heads // arguments.kv_heads
    batch, dim = arguments.decode_batch, arguments.head_dim
    q = torch.randn(batch, 1, arguments.heads, dim, device=arguments.device).to(dtype)
    k, v = (
        torch.randn(batch, length, arguments.kv_heads, dim, device=arguments.device).to(dtype)
        for _ in range(2)
    )
    open_groups = torch.rand(batch, 1, arguments.kv_heads, device=arguments.device) < usage
    opened = open_groups.repeat_interleave(group, -1)
    lengths = torch.full((batch,), length, device=arguments.device)

    def dense() -> Tensor:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        return F.scaled_dot_product_attention(heads[0], heads[1], heads[2], enable_gqa=group > 1)

    steps = [
        without_grad(lambda: aha_decode(q, k, v, opened, arguments.window, lengths)),
        without_grad(dense),
    ]
    ours, peer = meter.medians(steps, 5 * arguments.runs)
    share = float(open_groups.float().mean())
    ideal = length / (share * length + (1 - share) * min(arguments.window, length))
    memory = [meter.peak_mib(step) for step in steps]
    ratio = peer / ours
    nan = float("nan")
    return Row("decode", length, share, kind, ours, "SDPA", peer, nan, ratio, ideal, ratio / ideal, *memory)


def table(rows: list[Row]) -> str:
    """Returns the rows as a Markdown table."""
    head = [
        "task",
        "length",
        "usage",
        "routes",
        "ours ms",
        "peer",
        "peer ms",
        "flex ms",
        "ratio",
        "ideal",
        "share",
    ]
    head += ["ours MiB", "peer MiB"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        cells = [
            r.task,
            str(r.length),
            f"{r.usage:.2f}",
            r.routes,
            f"{r.ours_ms:.2f}",
            r.peer,
            f"{r.peer_ms:.2f}",
        ]
        cells += [f"{r.flex_ms:.2f}", f"{r.ratio:.2f}", f"{r.ideal:.2f}", f"{r.share_of_ideal:.0%}"]
        cells += [f"{r.ours_mib:.1f}", f"{r.peer_mib:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: time of this process alone"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--usage", type=float, nargs="+", default=[1.0, 0.25, 0.12, 0.07, 0.02, 0.0])
    parser.add_argument("--routes", choices=["random", "clustered"], nargs="+", default=["random"])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--window", type=int, default=256, help="keys a here-token sees, itself included")
    parser.add_argument("--decode-batch", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each; the median is printed")
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=["prefill", "none", "exact", "sampled:0.05"],
        help="also: decode, sampled:RATE",
    )
    parser.add_argument("--flex", action="store_true", help="also time FlexAttention under the same routes")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args()


def main() -> None:
    """Measures and prints."""
    arguments = parse_arguments()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    meter = Meter(arguments.device, arguments.clock)
    rows: list[Row] = []
    for length in arguments.lengths:
        for usage in arguments.usage:
            for kind in arguments.routes:
                if "decode" in arguments.tasks:
                    rows.append(bench_decode(arguments, meter, length, usage, kind))
                if arguments.tasks != ["decode"]:
                    rows += bench_training(arguments, meter, length, usage, kind)
    print(
        f"torch {torch.__version__}, {arguments.device}, {arguments.dtype}, {arguments.threads} threads, heads "
        f"{arguments.heads}/{arguments.kv_heads}, head_dim {arguments.head_dim}, window {arguments.window}, "
        f"median of {arguments.runs}\n"
    )
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
