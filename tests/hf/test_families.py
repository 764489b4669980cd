"""Each family: weights in and out to the bit, and transformers' own logits in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_models import FAMILIES, LAYERS, STATIC, make_family, random_tokens
from torch import Tensor
from transformers import CONFIG_MAPPING

from megatron_aha.attention.packed import pack
from megatron_aha.checkpoint.format import CheckpointReader
from megatron_aha.checkpoint.weights import load_weights
from megatron_aha.config.aha import AHAConfig
from megatron_aha.config.model import RopeScaling
from megatron_aha.config.parallel import ParallelConfig
from megatron_aha.config.training import TrainingConfig
from megatron_aha.errors import UserError
from megatron_aha.hf.check import trainer_logits
from megatron_aha.hf.configuration import read_config, write_config
from megatron_aha.hf.exporter import export_checkpoint
from megatron_aha.hf.importer import import_checkpoint
from megatron_aha.hf.source import open_source
from megatron_aha.models.build import build_model
from megatron_aha.parallel.layout import build_groups, device
from megatron_aha.testing.distributed import run_distributed

TOLERANCE = 1e-5
LENGTH = 40
# Tensor-parallel size, sequence parallelism, pipeline stages; two KV groups, so TP 4 holds copies of keys.
LAYOUTS = [(2, True, 1), (4, False, 1), (2, True, 2)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# Beside the plain families: windows where a family may have them, and scaled positions with windows.
VARIANTS: dict[str, tuple[str, dict]] = {
    **{family: (family, {}) for family in FAMILIES},
    "mistral-0.1": ("mistral", {"sliding_window": STATIC}),
    "qwen2-windowed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": STATIC, "max_window_layers": 2},
    ),
    "olmo3-yarn": ("olmo3", {"rope_scaling": YARN}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 24}),
    # as in the smallest models: one key/value head, heads wider than the model; and scaled as in the larger ones
    "gemma3-one-group": (
        "gemma3_text",
        {
            "num_key_value_heads": 1,
            "head_dim": 256,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "tie_word_embeddings": True,
        },
    ),
}
HAS_ROUTERS = [name for name in VARIANTS if name != "mistral-0.1"]


def silent(_: str) -> None:
    pass


def imported(model: torch.nn.Module, work: Path, name: str) -> Path:
    model.save_pretrained(work / f"{name}-hf")
    return import_checkpoint(work / f"{name}-hf", work / name, check=False, say=silent)


def stage_by_stage(model: torch.nn.Module, tokens: Tensor, stages: int) -> Tensor | None:
    """Returns the logits ``[tokens, vocab]`` on the last stage, None elsewhere, without a pipeline schedule."""
    from megatron.core import parallel_state

    length = tokens.numel()
    borders = torch.tensor([0, length], dtype=torch.int32)
    batch = pack(torch.arange(length), borders, torch.ones(length), device=device())
    if stages == 1:
        return model.logits(tokens, batch)
    group = parallel_state.get_pipeline_model_parallel_group()
    first, last = (torch.distributed.get_global_rank(group, stage) for stage in (0, 1))
    tp = parallel_state.get_tensor_model_parallel_world_size()
    states = torch.empty(length // tp, 1, model.config.hidden_size)
    if parallel_state.is_pipeline_first_stage():
        with torch.no_grad():
            torch.distributed.send(model(tokens, batch).contiguous(), last)
        return None
    torch.distributed.recv(states, first)
    model.set_input_tensor(states)
    return model.logits(tokens, batch)


def logits_in_layouts(folders: list[str], tokens: Tensor) -> list[list[Tensor | None]]:
    """Returns this rank's logits of each checkpoint in each layout."""
    found = []
    for tp, sp, pp in LAYOUTS:
        parallel = ParallelConfig(
            tensor_model_parallel_size=tp, sequence_parallel=sp, pipeline_model_parallel_size=pp
        )
        build_groups(parallel, seed=1)
        row = []
        for folder in folders:
            reader = CheckpointReader(folder, checksums=False)
            aha = reader.aha or AHAConfig(enabled=False)
            model = build_model(reader.model, aha, parallel, TrainingConfig(precision="fp32"))
            load_weights(model, reader, seed=0, new_router=False)
            row.append(stage_by_stage(model.eval(), tokens, pp))
        found.append(row)
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    family, options = VARIANTS[name]
    tokens = random_tokens(2, LENGTH)
    for routed in (False, True) if name in HAS_ROUTERS else (False,):
        model = make_family(family, routed, **options)
        reader = CheckpointReader(imported(model, tmp_path, f"{name}-{routed}"))
        ours, _ = trainer_logits(reader, tokens)
        theirs = model(tokens).logits
        assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


def test_logits_are_those_of_transformers_in_every_layout(tmp_path: Path) -> None:
    """With routers wherever a layer may have one; Llama has tests of its own, and Mistral's layers are Llama's."""
    names = [name for name in VARIANTS if name not in ("llama", "mistral")]
    tokens = random_tokens(1, LENGTH)
    expected, folders = [], []
    for name in names:
        family, options = VARIANTS[name]
        model = make_family(family, name in HAS_ROUTERS, **options)
        expected.append(model(tokens).logits[0].detach())
        folders.append(str(imported(model, tmp_path, name)))
    ranks = run_distributed(logits_in_layouts, 4, folders, tokens[0], timeout=280)
    for index, layout in enumerate(LAYOUTS):
        for name, wanted, *found in zip(names, expected, *(rank[index] for rank in ranks), strict=True):
            computed = [logits for logits in found if logits is not None]
            assert computed, (name, layout)
            for logits in computed:
                assert (logits - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), (name, layout)


@pytest.mark.parametrize("routed", [False, True], ids=["dense", "routed"])
@pytest.mark.parametrize("name", VARIANTS)
def test_import_and_export_are_bitwise(tmp_path: Path, name: str, routed: bool) -> None:
    if routed and name not in HAS_ROUTERS:
        pytest.skip("no layer of it has a router")
    family, options = VARIANTS[name]
    model = make_family(family, routed, **options)
    folder = imported(model, tmp_path, "ours")
    export_checkpoint(folder, tmp_path / "back", check=False, say=silent)
    before, after = open_source(tmp_path / "ours-hf"), open_source(tmp_path / "back")
    assert sorted(before.names()) == sorted(after.names())
    for weight in before.names():
        assert torch.equal(before.read(weight), after.read(weight)), weight
    assert (before.model, before.aha) == (after.model, after.aha)
    again = type(model).from_pretrained(tmp_path / "back").eval()
    tokens = random_tokens(1, LENGTH)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_configurations_are_read_as_they_are_written(family: str) -> None:
    model, _ = read_config(make_family(family).config.to_dict() | {"architectures": [_dense(family)]})
    assert model.family == family
    assert read_config(write_config(model, None, "float32", {})) == (model, None)
    aha = AHAConfig(window=8, bias=False)
    assert read_config(write_config(model, aha, "float32", {})) == (model, aha)


def _dense(family: str) -> str:
    from megatron_aha.hf.families import FAMILIES as KNOWN

    return KNOWN[family].dense


def test_windows_of_the_source_keep_their_layers() -> None:
    def layers(name: str) -> tuple[int | None, list[int]]:
        family, options = VARIANTS[name]
        config = make_family(family, **options).config.to_dict() | {"architectures": [_dense(family)]}
        model, _ = read_config(config)
        return model.static_window, model.windowed_layers

    assert layers("olmo3") == (STATIC, [0, 1, 2])
    assert layers("mistral-0.1") == (STATIC, [0, 1, 2, 3])
    assert layers("qwen2-windowed") == (STATIC, [2, 3])
    assert layers("gemma3_text") == (STATIC, [0, 2])
    assert layers("qwen2") == layers("mistral") == layers("olmo2") == (None, [])


def test_older_configurations_leave_out_the_kinds_of_layers() -> None:
    config = make_family("olmo3").config.to_dict() | {"architectures": ["Olmo3ForCausalLM"]}
    del config["layer_types"], config["sliding_window"]
    model, _ = read_config(config)
    assert (model.static_window, model.windowed_layers) == (4096, [0, 1, 2])
    config = make_family("qwen2").config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    del config["layer_types"]
    config |= {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}
    model, _ = read_config(config)
    assert (model.static_window, model.windowed_layers) == (7, [3])


def test_what_an_older_gemma_leaves_out_is_what_transformers_takes() -> None:
    """As on the hub: no kinds of layers, and no sizes that are Gemma's defaults."""
    stated = {"num_hidden_layers": 12, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}
    older = {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 301,
        "max_position_embeddings": 256,
        **stated,
    }
    theirs = CONFIG_MAPPING["gemma3_text"](**stated, vocab_size=301, max_position_embeddings=256)
    for more in ({}, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}):
        model, _ = read_config({**older, **more})
        assert (model.static_window, model.windowed_layers) == (4096, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10])
        assert (model.rope_theta, model.windowed_rope_theta) == (1e6, 1e4)
        assert model.rope_scaling == (RopeScaling("linear", 8.0) if more else None)
        assert (model.head_dim, model.num_query_groups, model.tied_embeddings) == (256, 4, True)
        assert model.query_pre_attn_scalar is None and model.softmax_scale == 1 / 16
    assert (
        read_config(older)[0] == read_config(theirs.to_dict() | {"architectures": ["Gemma3ForCausalLM"]})[0]
    )
    model, _ = read_config({**older, "sliding_window_pattern": 2, "query_pre_attn_scalar": 168})
    assert model.windowed_layers == [0, 2, 4, 6, 8, 10] and model.query_pre_attn_scalar == 168
    # nothing is left that a base of their own could hold for
    model, _ = read_config({**older, "layer_types": ["full_attention"] * 12})
    assert (model.static_window, model.windowed_rope_theta) == (None, None)


def test_a_model_without_full_attention_has_nothing_to_route() -> None:
    from megatron_aha.config.model import ModelConfig
    from megatron_aha.config.run import RunConfig
    from megatron_aha.config.validate import problems

    model = ModelConfig(family="mistral", static_window=4, windowed_layers=[0, 1])
    config = RunConfig(model=model, aha=AHAConfig(window=8))
    assert any("nothing to route" in problem for problem in problems(config, 1))
    config.aha.enabled = False
    assert not any("nothing to route" in problem for problem in problems(config, 1))


def test_an_export_of_a_family_without_its_weights_is_refused(tmp_path: Path) -> None:
    """A norm of queries is a weight like any other."""
    model = make_family("qwen3")
    del model.model.layers[0].self_attn.q_norm.weight
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(UserError, match="lacks 1 weights.*self_attn.q_norm.weight"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ours", check=False, say=silent)


@pytest.mark.parametrize("name", HAS_ROUTERS)
def test_generating_with_a_cache_equals_generating_without(name: str) -> None:
    family, options = VARIANTS[name]
    for attention in ("eager", "sdpa"):
        model = make_family(family, True, attention, **options)
        tokens = random_tokens(2, 20)
        mask = torch.ones_like(tokens)
        tokens[0, :6], mask[0, :6] = 0, 0
        given = {"attention_mask": mask, "do_sample": False, "min_new_tokens": 12, "max_new_tokens": 12}
        texts = [
            model.generate(tokens, **given, **cache)
            for cache in ({"use_cache": False}, {"use_cache": True}, {"cache_implementation": "static"})
        ]
        assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2]), attention
        assert len(texts[0][0, 20:].unique()) > 3


@pytest.mark.parametrize("name", HAS_ROUTERS)
def test_all_routes_open_is_transformers_own_model(name: str) -> None:
    family, options = VARIANTS[name]
    model, dense = make_family(family, True, **options), make_family(family, **options)
    dense.load_state_dict({key: value for key, value in model.state_dict().items() if ".router." not in key})
    for key, parameter in model.named_parameters():
        if ".router." in key:
            parameter.data.fill_(1.0 if key.endswith("bias") else 0.0)
    tokens = random_tokens(2, LENGTH)
    ours, theirs = model(tokens, output_router_stats=True), dense(tokens)
    assert torch.equal(ours.logits, theirs.logits)
    assert (ours.router_usage == 1).all()
    few = {"olmo3": 1, "olmo3-yarn": 1, "qwen2-windowed": 2, "gemma3_text": 2, "gemma3-one-group": 2}
    assert len(ours.router_usage) == few.get(name, LAYERS)


def test_a_static_window_changes_the_logits() -> None:
    tokens = random_tokens(2, LENGTH)
    full, windowed = (make_family("mistral", sliding_window=w)(tokens).logits for w in (None, STATIC))
    assert (full - windowed).abs().max() > 1e-2 * windowed.abs().max()
