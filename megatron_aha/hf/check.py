"""Do both models compute the same? Logits of the trainer's model against those of transformers, in fp32."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_aha.attention.packed import pack
from megatron_aha.attention.router import AHARouter
from megatron_aha.checkpoint.format import CheckpointReader
from megatron_aha.checkpoint.weights import load_weights
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.training import TrainingConfig
from megatron_aha.errors import UserError
from megatron_aha.hf import probe
from megatron_aha.hf.source import Source
from megatron_aha.models.build import build_model
from megatron_aha.parallel.layout import single_process

# Largest difference over largest logit; transformers' own implementations of attention differ by 2e-6.
TOLERANCE = 1e-5
# A router logit this near to zero may be decided either way by two correct computations.
TIE = 1e-4
SEQUENCES = 2
LONGEST = 512


@dataclass
class Outcome:
    """What a comparison found.

    Args:
        difference: largest absolute difference of a logit.
        largest: largest absolute logit.
        compared: tokens compared.
        tokens: tokens computed; fewer are compared after a router logit that is zero within rounding.
        usage: share of token-heads that chose *all*, of each layer with routers; None for a dense model.
    """

    difference: float
    largest: float
    compared: int
    tokens: int
    usage: list[float] | None = None

    @property
    def passed(self) -> bool:
        """Whether the models agree; NaN never does."""
        return self.difference <= TOLERANCE * self.largest and self.compared > self.tokens // 4

    def __str__(self) -> str:
        ratio = self.difference / self.largest if self.largest else float("nan")
        return (
            f"largest difference {self.difference:.2e}, largest logit {self.largest:.4g}, ratio {ratio:.1e} "
            f"({'at most' if self.passed else 'MORE THAN'} {TOLERANCE:.0e}) "
            f"over {self.compared} of {self.tokens} tokens"
        )


def check_import(reader: CheckpointReader, source: Source, dtype: torch.dtype | None) -> Outcome:
    """Compares a just imported checkpoint with transformers' own model.

    Args:
        reader: the checkpoint.
        source: what it was made from.
        dtype: to which the import rounded, so that the reference is rounded alike.

    Raises:
        UserError: the logits differ by more than the tolerance.
    """
    tokens = random_tokens(reader)
    ours, our_routes = trainer_logits(reader, tokens, dtype)
    model = source.reference()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype or parameter.dtype))
        output = model(tokens, use_cache=False)
    theirs: dict[str, Tensor] = {"logits": output.logits}
    if our_routes is not None:
        theirs["router_logits"] = torch.stack(model.model(tokens, use_cache=False).router_logits)
    return _judge(ours, our_routes, theirs, "the imported model and transformers' own")


def check_export(reader: CheckpointReader, folder: Path, dtype: torch.dtype | None) -> Outcome:
    """Compares an exported folder, loaded in a fresh process with an empty module cache and offline.

    One of the two models is in memory at a time.

    Args:
        reader: the checkpoint.
        folder: what was made of it.
        dtype: to which the export rounded.

    Raises:
        UserError: the folder does not load, or the logits differ by more than the tolerance.
    """
    tokens = random_tokens(reader)
    with tempfile.TemporaryDirectory() as scratch:
        tokens_file, output_file = Path(scratch, "tokens.safetensors"), Path(scratch, "logits.safetensors")
        save_file({"tokens": tokens}, tokens_file)
        environment = os.environ | {
            "HF_HOME": scratch,
            "HF_MODULES_CACHE": str(Path(scratch, "modules")),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-P", probe.__file__]
        command += [str(folder.resolve()), str(tokens_file), str(output_file)]
        # Leaving the block waits for the process, whatever happens in it.
        with subprocess.Popen(
            command,
            env=environment,
            cwd=scratch,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            ours, our_routes = trainer_logits(reader, tokens, dtype)
            # closes its standard input, for which it waits: ours is freed by now
            _, errors = process.communicate()
        if process.returncode != 0:
            reason = errors.strip().splitlines()[-1:] or ["no message"]
            raise UserError(f"the exported model does not load in a fresh process: {reason[0]}")
        theirs = load_file(output_file)
    return _judge(ours, our_routes, theirs, "the exported model and the trainer's")


def random_tokens(reader: CheckpointReader) -> Tensor:
    """Returns random token ids ``[sequences, tokens]``, longer than the window where that is affordable."""
    model = reader.model
    window = reader.aha.window if reader.aha is not None else 0
    length = min(model.max_position_embeddings, max(64, min(2 * window, LONGEST)))
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.vocab_size, (SEQUENCES, length), generator=generator)


def trainer_logits(
    reader: CheckpointReader, tokens: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """Computes with the trainer's model in one process, in fp32, each row of tokens as a document.

    Args:
        reader: the checkpoint.
        tokens: int64 ``[batch, tokens]``.
        dtype: round the weights to this type first; None takes them as they are.

    Returns:
        Logits fp32 ``[batch, tokens, vocab]``; router logits ``[layers, batch, tokens, routers]``, None when
        dense.
    """
    batch, length = tokens.shape
    aha = reader.aha or AHAConfig(enabled=False)
    with single_process():
        model = build_model(reader.model, aha, ParallelConfig(), TrainingConfig(precision="fp32"))
        load_weights(model, reader, seed=0, new_router=False)
        router_logits: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, AHARouter):
                module.register_forward_hook(lambda _, inputs, output: router_logits.append(output.detach()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype or parameter.dtype))
        device = next(model.parameters()).device
        packed = pack(
            torch.arange(length).repeat(batch),
            torch.arange(batch + 1, dtype=torch.int32) * length,
            torch.ones(batch * length),
            device=device,
        )
        logits = model.eval().logits(tokens.flatten().to(device), packed)  # [batch * tokens, vocab]
    shaped = logits.cpu().view(batch, length, -1)
    if not router_logits:
        return shaped, None
    return shaped, torch.stack(router_logits).cpu().unflatten(1, (batch, length))


def compare(ours: Tensor, our_routes: Tensor | None, theirs: Tensor, their_routes: Tensor | None) -> Outcome:
    """Compares logits ``[batch, tokens, vocab]`` token by token.

    Two correct computations may decide a router logit of zero within rounding differently; from such a token
    on the sequence is left out. A difference in a clear decision is kept, and fails.
    """
    batch, length, _ = ours.shape
    counted = torch.ones(batch, length, dtype=torch.bool)
    if our_routes is not None and their_routes is not None:
        near_zero = (our_routes.abs() < TIE) & (their_routes.abs() < TIE)
        flipped = near_zero & ((our_routes > 0) != (their_routes > 0))  # [layers, batch, tokens, routers]
        counted = flipped.any(dim=-1).any(dim=0).cumsum(dim=1) == 0  # [batch, tokens]
    difference = (ours - theirs).abs().amax(dim=-1)[counted]
    largest = theirs.abs().amax(dim=-1)[counted]
    return Outcome(
        difference=float(difference.max()) if counted.any() else float("nan"),
        largest=float(largest.max()) if counted.any() else float("nan"),
        compared=int(counted.sum()),
        tokens=batch * length,
        usage=None if our_routes is None else (our_routes > 0).double().flatten(1).mean(dim=1).tolist(),
    )


def _judge(ours: Tensor, our_routes: Tensor | None, theirs: dict[str, Tensor], which: str) -> Outcome:
    if ours.shape != theirs["logits"].shape:
        raise UserError(
            f"{which} differ: logits of shape {list(ours.shape)} and {list(theirs['logits'].shape)}"
        )
    outcome = compare(ours, our_routes, theirs["logits"], theirs.get("router_logits"))
    if not outcome.passed:
        raise UserError(f"{which} differ: {outcome}")
    return outcome
