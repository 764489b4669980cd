"""Operations counted by hand: 2 layers, hidden 64, 4 heads in 2 groups of 16, FFN 128, 301 words."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import ModelConfig
from megatron_aha.report.flops import causal_pairs, step_flops, window_pairs

MODEL = ModelConfig()
WINDOW_8 = AHAConfig(window=8, router_grad="none")

# One token, forward, a multiply and an add being two operations.
QUERY_OUTPUT = 2 * (64 * 64) * 2  # two projections of 64 x 64
KEY_VALUE = 2 * (64 * 32) * 2  # two of 64 x 32: half as many heads
MLP = 2 * (64 * 128) * 3
LOGITS = 2 * 64 * 301
LINEAR = 2 * (QUERY_OUTPUT + KEY_VALUE + MLP) + LOGITS
ROUTER = 2 * (2 * 64 * 4)
# One pair of a query and a key: 16 products with the key, 16 with the value, in 4 heads of 2 layers.
PAIR = 2 * 4 * (2 * 16 + 2 * 16)
# A sequence of 32: 1 + 2 + ... + 32 pairs, of which a window of 8 sees 1 + ... + 8 and 24 times 8.
ALL, HERE = 528, 36 + 192
TOKENS = 32


def test_the_pairs_of_a_short_sequence() -> None:
    assert (causal_pairs(32), window_pairs(32, 8)) == (ALL, HERE)


def brute_force_pairs(length: int, window: int, sinks: int) -> int:
    return sum(key > t - window or key < sinks for t in range(length) for key in range(t + 1))


@pytest.mark.parametrize(
    ("length", "window", "sinks"), [(1, 1, 0), (7, 3, 2), (32, 8, 4), (32, 30, 5), (5, 9, 9), (33, 1, 1)]
)
def test_the_pairs_of_a_window_with_sinks_equal_the_table_of_visible_keys(
    length: int, window: int, sinks: int
) -> None:
    assert window_pairs(length, window, sinks) == brute_force_pairs(length, window, sinks)


def test_dense_counts_forward_and_twice_that_backward() -> None:
    expected = 3 * (TOKENS * LINEAR + PAIR * ALL)
    count = step_flops(MODEL, AHAConfig(enabled=False), [TOKENS])
    assert count.done == count.dense_equivalent == expected == 3 * (32 * 185_984 + 512 * 528)


@pytest.mark.parametrize(("usage", "pairs"), [(0.0, HERE), (1.0, ALL), (0.5, (HERE + ALL) / 2)])
def test_routes_all_here_all_and_half(usage: float, pairs: float) -> None:
    count = step_flops(MODEL, WINDOW_8, [TOKENS], usage)
    assert count.done == 3 * (TOKENS * (LINEAR + ROUTER) + PAIR * pairs)
    assert count.dense_equivalent == 3 * (TOKENS * LINEAR + PAIR * ALL)


def test_the_exact_router_gradient_sees_every_pair_forward_and_the_routed_ones_backward() -> None:
    exact = dataclasses.replace(WINDOW_8, router_grad="exact")
    assert step_flops(MODEL, exact, [TOKENS], 0.0).done == 3 * TOKENS * (LINEAR + ROUTER) + PAIR * (
        ALL + 2 * HERE
    )


def test_a_sampled_router_gradient_sees_its_share_of_the_rest() -> None:
    sampled = dataclasses.replace(WINDOW_8, router_grad="sampled:0.25")
    routed = HERE + 0.5 * (ALL - HERE)
    forward = routed + 0.25 * (ALL - routed)
    expected = 3 * TOKENS * (LINEAR + ROUTER) + PAIR * (forward + 2 * routed)
    assert step_flops(MODEL, sampled, [TOKENS], 0.5).done == expected


@pytest.mark.parametrize("usage", [0.0, 1.0])
def test_a_window_longer_than_the_sequence_is_full_attention_whatever_the_routes(usage: float) -> None:
    count = step_flops(MODEL, AHAConfig(window=100), [TOKENS], usage)
    assert count.done == count.dense_equivalent + 3 * TOKENS * ROUTER


def test_fewer_kv_groups_save_projections_and_no_attention() -> None:
    no_gqa = dataclasses.replace(MODEL, num_query_groups=4)
    dense = AHAConfig(enabled=False)
    more = step_flops(no_gqa, dense, [TOKENS]).done - step_flops(MODEL, dense, [TOKENS]).done
    assert more == 3 * TOKENS * 2 * KEY_VALUE


def test_documents_do_not_see_each_other() -> None:
    two = step_flops(MODEL, AHAConfig(enabled=False), [20, 12]).done
    assert two == 3 * (TOKENS * LINEAR + PAIR * (210 + 78))


def test_a_frozen_model_has_no_gradients_of_weights() -> None:
    frozen = step_flops(MODEL, WINDOW_8, [TOKENS], 1.0, frozen=True).done
    assert frozen == TOKENS * (2 * LINEAR + 3 * ROUTER) + 3 * PAIR * ALL
