"""Every impossible configuration is found before anything is built, with both values and the nearest fix."""

from __future__ import annotations

import pytest

from megatron_aha.config.parse import parse_run
from megatron_aha.config.run import RunConfig
from megatron_aha.config.validate import check, problems
from megatron_aha.errors import UserError

GOOD = {"data.blend": "data/a"}
SMOLLM2 = {"model.num_attention_heads": 9, "model.num_query_groups": 3, "model.ffn_hidden_size": 1536}


def configure(**stated: object) -> RunConfig:
    options = {**GOOD, **stated}
    return parse_run([f"--{name}={value}" for name, value in options.items()]).config


def found(world_size: int | None = 1, has_gpu: bool | None = None, **stated: object) -> list[str]:
    return problems(configure(**stated), world_size, has_gpu)


def test_the_defaults_with_data_have_no_problem() -> None:
    assert found() == []


TP, PP, CP = (f"parallel.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context"))
VP = "parallel.virtual_pipeline_stages"
SP = {TP: 2, "parallel.sequence_parallel": "true"}


@pytest.mark.parametrize(
    ("world_size", "stated", "sentence"),
    [
        (
            2,
            {TP: 2, **SMOLLM2},
            "--parallel.tensor_model_parallel_size 2 does not divide the model's 9 attention heads, 3 "
            "KV groups; use 1 or 3",
        ),
        (
            3,
            {TP: 3},
            "3 does not divide the model's 4 attention heads, 2 KV groups, FFN width 128; use 2, 4 or 1",
        ),
        (
            6,
            {
                TP: 6,
                "model.num_attention_heads": 12,
                "model.num_query_groups": 4,
                "model.ffn_hidden_size": 144,
            },
            "does not divide the model's 4 KV groups; use 4, 2, 1 or 12",
        ),
        (
            4,
            {TP: 4, "aha.granularity": "kv_group"},
            "does not divide the model's 2 routers of --aha.granularity kv_group; use 2 or 1",
        ),
        (2, {TP: 2, "model.ffn_hidden_size": 127}, "does not divide the model's FFN width 127; use 1"),
        (
            2,
            {**SP, "data.seq_length": 383},
            "--data.seq_length 383 times --training.micro_batch_size 1 is 383 tokens, which "
            "--parallel.tensor_model_parallel_size 2 does not divide",
        ),
        (
            1,
            {"parallel.sequence_parallel": "true"},
            "--parallel.sequence_parallel true needs --parallel.tensor_model_parallel_size above 1",
        ),
        (
            2,
            {CP: 2, "data.seq_length": 34},
            "--data.seq_length 34 cannot be cut into the 4 equal chunks that --parallel.context_parallel_size 2 shares "
            "out; use 32 or 36",
        ),
        (
            8,
            {**SP, CP: 2, "data.seq_length": 36, "parallel.tensor_model_parallel_size": 4},
            "is 36 tokens, which --parallel.tensor_model_parallel_size 4 times --parallel.context_parallel_size 2 does",
        ),
        (
            2,
            {PP: 2, "training.zero_stage": 2},
            "--training.zero_stage 2 does not work with --parallel.pipeline_model_parallel_size 2",
        ),
        (2, {PP: 2, "training.zero_stage": 3}, "--training.zero_stage 3 does not work with"),
        (
            3,
            {PP: 3},
            "--parallel.pipeline_model_parallel_size 3 does not divide --model.num_layers 2; use 2 or 1",
        ),
        (
            2,
            {VP: 2},
            "--parallel.virtual_pipeline_stages 2 needs --parallel.pipeline_model_parallel_size above 1",
        ),
        (
            2,
            {PP: 2, VP: 2},
            "--parallel.virtual_pipeline_stages 2 does not divide the 1 layers of each of "
            "--parallel.pipeline_model_parallel_size 2 stages; use 1",
        ),
        (
            2,
            {PP: 2, VP: 2, "model.num_layers": 4, "training.global_batch_size": 7},
            "7 micro-batches, but --parallel.virtual_pipeline_stages 2 needs a multiple of "
            "--parallel.pipeline_model_parallel_size 2; use 6 or 8",
        ),
        (7, {TP: 2}, "need a multiple of 2 ranks, but there are 7; start 6 or 8"),
        (
            3,
            {},
            "--training.global_batch_size 8 is not a multiple of --training.micro_batch_size 1 x 3 "
            "data-parallel ranks = 3; use 9 or 6",
        ),
        (
            8,
            {"parallel.nodes": 2, "parallel.ranks_per_node": 8},
            "--parallel.nodes 2 times --parallel.ranks_per_node 8 is 16 ranks, but the launcher started 8",
        ),
        (8, {"parallel.nodes": 3}, "--parallel.nodes 3 does not divide the 8 ranks"),
        (8, {"parallel.ranks_per_node": 3}, "--parallel.ranks_per_node 3 does not divide the 8 ranks"),
        (1, {TP: 0}, "--parallel.tensor_model_parallel_size is 0, and must be at least 1"),
        (1, {"aha.window": 0}, "--aha.window is 0, but a token always sees itself"),
        (1, {"aha.window": -3}, "--aha.window is -3, but a token always sees itself"),
        (1, {"aha.num_sink_tokens": -1}, "--aha.num_sink_tokens is -1, and must be at least 0"),
        (
            1,
            {"aha.granularity": "heads"},
            "--aha.granularity 'heads' is not one of head, kv_group; did you mean 'head'?",
        ),
        (1, {"aha.backend": "tritn"}, "did you mean 'triton'?"),
        (
            1,
            {"aha.router_grad": "exct"},
            "--aha.router_grad 'exct' is not one of exact, sampled:RATE, none; did you mean 'exact'?",
        ),
        (
            1,
            {"aha.router_grad": "sampled:2"},
            "--aha.router_grad 'sampled:2' needs a share of tokens above 0 and at most 1",
        ),
        (1, {"aha.router_grad": "sampled"}, "use sampled:0.1 for a tenth of them"),
        (1, {"aha.lr": 0}, "--aha.lr is 0.0, and must be greater than 0"),
        (
            1,
            {"training.precision": "bf61"},
            "--training.precision 'bf61' is not one of fp32, bf16, fp16; did you mean 'bf16'?",
        ),
        (
            1,
            {"training.fp32_gradients": "true"},
            "does not work with --training.zero_stage 1; use --training.zero",
        ),
        (
            1,
            {"training.fp32_gradients": "true", "training.precision": "fp32"},
            "--training.fp32_gradients true is for --training.precision bf16, but the precision is fp32; leave it",
        ),
        (
            1,
            {"training.deepspeed": "{fp16: {hysteresis: 1}}", "training.precision": "bf16"},
            "--training.deepspeed.fp16 adjusts the loss scale of --training.precision fp16, but the precision is bf16",
        ),
        (
            1,
            {"training.deepspeed": "{fp16: {enabled: true}}", "training.precision": "fp16"},
            "--training.deepspeed.fp16.enabled is generated from --training.precision; set that instead",
        ),
        (
            1,
            {"training.precision": "fp16", "training.zero_stage": 0},
            "--training.precision fp16 needs fp32 master weights, which --training.zero_stage 0 does not keep",
        ),
        (1, {"training.schedule": "cosin"}, "did you mean 'cosine'?"),
        (1, {"training.recompute": "selectve"}, "did you mean 'selective'?"),
        (1, {"training.zero_stage": 4}, "--training.zero_stage is 4, and must be 0, 1, 2 or 3"),
        (1, {"training.zero_stage": 0}, "--training.precision bf16 needs fp32 master weights"),
        (
            1,
            {"training.warmup_steps": 1001},
            "--training.warmup_steps 1001 is longer than the run of --training.train_steps 1000",
        ),
        (
            1,
            {"training.schedule": "wsd", "training.decay_steps": 950},
            "use --training.decay_steps 900 or less",
        ),
        (
            1,
            {"training.decay_steps": 10},
            "--training.decay_steps 10 belongs to --training.schedule wsd, but the schedule is cosine",
        ),
        (1, {"training.min_lr": 1}, "--training.min_lr 1.0 is above --training.lr 0.0001"),
        (1, {"training.adam_beta2": 1}, "--training.adam_beta2 is 1.0, and must be at least 0 and below 1"),
        (1, {"training.micro_batch_size": 0}, "--training.micro_batch_size is 0, and must be at least 1"),
        (1, {"training.freeze_model": "true", "aha.enabled": "false"}, "leaves no router"),
        (
            1,
            {"model.windowed_rope_theta": 1e4},
            "--model.windowed_rope_theta 10000.0 has no place in --model.family llama; leave it null, "
            "or use gemma3_text",
        ),
        (
            1,
            {"model.family": "gemma3_text", "model.query_pre_attn_scalar": 0},
            "--model.query_pre_attn_scalar is 0, and must be greater than 0",
        ),
        (
            2,
            {
                "training.freeze_model": "true",
                "model.family": "olmo3",
                "model.static_window": 8,
                "model.windowed_layers": "[0]",
                "model.num_layers": 2,
                "parallel.pipeline_model_parallel_size": 2,
            },
            "the pipeline stage of layers 0 to 0 has none",
        ),
        (
            1,
            {"training.deepspeed": "{train_batch_size: 4}"},
            "--training.deepspeed.train_batch_size is generated from --training.global_batch_size",
        ),
        (
            1,
            {"training.deepspeed.zero_optimization": 2},
            "--training.deepspeed.zero_optimization must be a mapping",
        ),
        (
            1,
            {"training.deepspeed.zero_optimization.stage": 2},
            "--training.deepspeed.zero_optimization.stage is generated from --training.zero_stage",
        ),
        (
            1,
            {"training.eval_interval": 10, "data.split": "100,0,0"},
            "--training.eval_interval is 10, but --data.split '100,0,0' gives validation nothing",
        ),
        (1, {"data.valid_blend": "v"}, "--data.valid_blend gives it its own data; use --data.split 100,0,0"),
        (1, {"data.split": "98,2"}, "--data.split '98,2' must be three shares"),
        (1, {"data.split": "0,1,1"}, "--data.split '0,1,1' gives training nothing"),
        (1, {"data.blend": "[]"}, "--data.blend names no dataset"),
        (1, {"data.blend": "[0.3, a, b]"}, "--data.blend [0.3, a, b] mixes weights and prefixes"),
        (1, {"data.blend": "[0.3, a, -1, b]"}, "--data.blend has the weights 0.3, -1, which must be above 0"),
        (
            1,
            {"data.seq_length": 4096},
            "--data.seq_length 4096 is longer than --model.max_position_embeddings 2048",
        ),
        (1, {"model.attention_dropout": 0.1}, "dropout on attention probabilities is not supported"),
        (
            1,
            {"model.num_query_groups": 3},
            "--model.num_query_groups 3 does not divide --model.num_attention_heads 4; use 2, 4 or 1",
        ),
        (1, {"model.family": "lama"}, "did you mean 'llama'?"),
        (
            1,
            {"model.rope_scaling.kind": "longrope"},
            "--model.rope_scaling.kind 'longrope' is not one of llama3, linear, yarn, dynamic",
        ),
        (
            1,
            {"checkpoint.save_interval": 5},
            "--checkpoint.save_interval is 5, but --checkpoint.directory is not set",
        ),
        (1, {"checkpoint.keep_last": 0}, "--checkpoint.keep_last is 0, and must be at least 1"),
        (
            1,
            {"checkpoint.keep_every": 100},
            "--checkpoint.keep_every is 100, but without --checkpoint.keep_last every checkpoint is kept",
        ),
        (1, {"training.bad_step": "rolback"}, "did you mean 'rollback'?"),
        (
            1,
            {"training.bad_step": "rollback"},
            "--training.bad_step rollback goes back to the run's last checkpoint, but --checkpoint.save_interval is 0",
        ),
        (1, {"training.spike_factor": 1}, "--training.spike_factor is 1.0, and must be above 1"),
        (1, {"training.bad_step_limit": 0}, "--training.bad_step_limit is 0, and must be at least 1"),
    ],
)
def test_one_mistake_is_one_sentence(world_size: int, stated: dict[str, object], sentence: str) -> None:
    lines = found(world_size, **stated)
    assert len(lines) == 1, lines
    assert sentence in lines[0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_more_ranks_than_groups_are_fine_when_each_group_has_as_many(size: int) -> None:
    assert found(size, **{TP: size}) == []


def test_what_depends_on_the_number_of_ranks_is_left_out_when_it_is_not_known() -> None:
    assert found(None, **{TP: 2, "training.global_batch_size": 7}) == []


def test_a_gpu_backend_without_a_gpu_is_refused_and_without_knowing_is_not() -> None:
    stated = {"aha.backend": "triton"}
    assert found(has_gpu=None, **stated) == found(has_gpu=True, **stated) == []
    assert found(has_gpu=False, **stated) == [
        "--aha.backend triton needs an NVIDIA GPU and there is none here; use auto or torch"
    ]


def test_check_raises_all_sentences_at_once() -> None:
    with pytest.raises(UserError) as caught:
        check(configure(**{TP: 2, "aha.window": 0, "training.warmup_steps": 2000}), 3)
    assert len(str(caught.value).splitlines()) == 3
