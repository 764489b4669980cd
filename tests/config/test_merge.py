"""The checkpoint's model goes before the defaults, and never against what the user stated."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.merge import take_model_from_checkpoint
from megatron_aha.config.model import ModelConfig, RopeScaling
from megatron_aha.config.parse import parse_run
from megatron_aha.config.run import RunConfig
from megatron_aha.errors import UserError

MODEL = ModelConfig(
    num_layers=30, num_attention_heads=9, rope_scaling=RopeScaling(factor=32.0), hidden_dropout=0.3
)
AHA = AHAConfig(window=17, bias=False, loss_coefficient=0.5, granularity="kv_group", num_sink_tokens=4)


def merge(arguments: list[str], model: ModelConfig = MODEL, aha: AHAConfig | None = AHA) -> RunConfig:
    run = parse_run(arguments)
    return take_model_from_checkpoint(run.config, run.explicit, model, aha)


def test_what_is_not_stated_comes_from_the_checkpoint() -> None:
    merged = merge(["--aha.loss_coefficient", "0.1"])
    assert merged.model == MODEL
    assert (merged.aha.window, merged.aha.bias, merged.aha.granularity) == (17, False, "kv_group")
    assert merged.aha.num_sink_tokens == 4
    assert merged.aha.loss_coefficient == 0.1


def test_options_of_training_do_not_come_from_the_checkpoint() -> None:
    assert merge([]).aha.loss_coefficient == AHAConfig().loss_coefficient


def test_a_dense_checkpoint_leaves_the_attention_as_configured() -> None:
    assert merge(["--aha.window", "5"], aha=None).aha == dataclasses.replace(AHAConfig(), window=5)


def test_the_given_configuration_is_not_changed() -> None:
    run = parse_run([])
    take_model_from_checkpoint(run.config, run.explicit, MODEL, AHA)
    assert run.config == RunConfig()


def test_stated_values_that_agree_or_may_differ_are_taken() -> None:
    arguments = ["--model.num_layers", "30", "--model.hidden_dropout", "0.1", "--aha.window", "64"]
    merged = merge([*arguments, "--model.rope_scaling.factor", "32"])
    assert (merged.model.hidden_dropout, merged.aha.window) == (0.1, 64)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model.num_layers", "16"], "--model.num_layers is 16, but the checkpoint has 30"),
        (["--model.rope_scaling.factor", "8"], "--model.rope_scaling is {'kind': 'llama3', 'factor': 8.0"),
        (["--aha.bias", "true"], "--aha.bias is True, but the checkpoint has False"),
        (["--aha.granularity", "head"], "--aha.granularity is head, but the checkpoint has kv_group"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_both_values(
    arguments: list[str], sentence: str
) -> None:
    with pytest.raises(UserError, match="leave the option out") as caught:
        merge(arguments)
    assert sentence in str(caught.value)


def test_every_contradiction_is_named() -> None:
    with pytest.raises(UserError) as caught:
        merge(["--model.num_layers", "16", "--model.num_attention_heads", "8"])
    assert len(str(caught.value).splitlines()) == 2
