"""Two thousand tokens through a cache: each is the one that a single pass without a cache chooses at its place."""

from __future__ import annotations

import pytest
import torch
from hf_models import WINDOW, make_aha, random_tokens
from torch import Tensor

from megatron_aha.hf.exported.kernels_aha import KERNELS

NEW = 2000
PADDING = 6
# Differences of the logarithm of a probability below which two tokens count as equally good: the rounding of fp32.
TIE = 1e-4


def prompts() -> tuple[Tensor, Tensor]:
    """Returns prompts of 14 and 20 tokens, both beyond the window, and their mask."""
    tokens = random_tokens(2, 20)
    mask = torch.ones_like(tokens)
    tokens[0, :PADDING], mask[0, :PADDING] = 0, 0
    return tokens, mask


@torch.no_grad()
def judged(made: Tensor, mask: Tensor) -> Tensor:
    """Returns what one uncached pass gives each new token, log-probabilities fp64 ``[batch, NEW, vocab]``."""
    first = mask.shape[1]
    mask = torch.nn.functional.pad(mask, (0, made.shape[1] - first), value=1)
    model = make_aha("eager", max_position_embeddings=made.shape[1])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(
        made, attention_mask=mask, position_ids=positions, use_cache=False, output_router_stats=True
    )
    usage = output.router_usage_beyond_window
    assert (usage > 0.05).any(1).all() and (usage < 0.95).any(1).all()  # mixed routes in both layers
    return output.logits[:, first - 1 : -1].double().log_softmax(-1)


def assert_best(scores: Tensor, chosen: Tensor) -> None:
    """Asserts that each chosen token has the highest score, or loses to it by no more than rounding, and rarely."""
    best = scores.max(-1).values
    lost = best - scores.gather(-1, chosen[..., None])[..., 0]  # [batch, NEW]
    assert lost.max() <= TIE
    assert (lost > 0).sum() <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "sampled", "cache"),
    [
        ("sdpa", True, "static"),
        (KERNELS, False, "dynamic"),
        pytest.param("sdpa", False, "dynamic", marks=pytest.mark.exhaustive),
        pytest.param(KERNELS, True, "static", marks=pytest.mark.exhaustive),
    ],
)
def test_2000_new_tokens_are_those_of_one_uncached_pass(attention: str, sampled: bool, cache: str) -> None:
    tokens, mask = prompts()
    model = make_aha(attention, max_position_embeddings=tokens.shape[1] + NEW, eos_token_id=None)
    torch.manual_seed(7)
    made = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=sampled,
        pad_token_id=0,
        **({"temperature": 1.5, "top_k": 0} if sampled else {}),
        **({"cache_implementation": "static"} if cache == "static" else {"use_cache": True}),
    )
    new = made[:, tokens.shape[1] :]
    assert new.shape == (2, NEW) and NEW > 100 * WINDOW
    scores = judged(made, mask)
    if sampled:
        # torch draws a token as the largest of probability / exponential noise
        scores = (scores / 1.5).log_softmax(-1)
        torch.manual_seed(7)
        noise = [torch.empty(2, scores.shape[-1]).exponential_(1) for _ in range(NEW)]
        scores = scores - torch.stack(noise, dim=1).double().log()
    assert len(new.unique()) > (250 if sampled else 50)
    assert_best(scores, new)
