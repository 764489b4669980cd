"""Tiny Hugging Face models, with and without routers, and a tokenizer."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_aha.hf.exported.configuration_llama_aha import LlamaAHAConfig
from megatron_aha.hf.exported.modeling_llama_aha import LlamaAHAForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 8

# Ways of choosing tokens, as `generate` takes them; sampling draws from torch's generator.
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 2},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 0},
}


def make_llama(**options: Any) -> LlamaForCausalLM:
    """Returns a random dense Llama in fp32."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **options})).eval()


def make_aha(attention: str | None = "sdpa", **options: Any) -> LlamaAHAForCausalLM:
    """Returns a random AHA Llama in fp32 whose routers are undecided: about half of the routes are 1."""
    torch.manual_seed(0)
    sizes = {**SIZES, "aha_window": WINDOW, "aha_bias": True, **options}
    model = LlamaAHAForCausalLM(LlamaAHAConfig(attn_implementation=attention, **sizes)).eval()
    for name, parameter in model.named_parameters():
        if ".router." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


# What a family's configuration says beside SIZES. Four layers, so that OLMo-3 has one with full attention;
# the window of layers that are windowed already is not AHA's.
LAYERS = 4
STATIC = 5
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": STATIC, "rope_theta": 500000.0},
    # the bases far apart and the scaling strong, so that neither can stand for the other
    "gemma3_text": {
        "sliding_window": STATIC,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_theta": 500000.0,
        "rope_local_base_freq": 100.0,
        "query_pre_attn_scalar": 40,
    },
}


def make_family(family: str, routed: bool = False, attention: str = "sdpa", **options: Any) -> Any:
    """Returns a random model of a family in fp32, with norms and biases that are not 1 and 0."""
    import transformers

    from megatron_aha.hf.families import FAMILIES as KNOWN

    torch.manual_seed(0)
    prefix = KNOWN[family].prefix
    sizes = {**SIZES, "num_hidden_layers": LAYERS, **FAMILIES[family], **options}
    if routed:
        sizes = {"aha_window": WINDOW, "aha_bias": True, **sizes}
        package = "megatron_aha.hf.exported"
        configuration = importlib.import_module(f"{package}.configuration_{family}_aha")
        modeling = importlib.import_module(f"{package}.modeling_{family}_aha")
        config = getattr(configuration, f"{prefix}AHAConfig")(attn_implementation=attention, **sizes)
        model = getattr(modeling, f"{prefix}AHAForCausalLM")(config).eval()
    else:
        config = transformers.CONFIG_MAPPING[family](attn_implementation=attention, **sizes)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if ".router." in name:
            torch.nn.init.normal_(parameter, std=0.3)
        elif parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return model


def set_routes(model: LlamaAHAForCausalLM, routes: str) -> None:
    """Makes every route 0 (``here``) or 1 (``all``), or leaves them as they are (``mixed``)."""
    if routes == "mixed":
        return
    for name, parameter in model.named_parameters():
        if ".router." in name:
            parameter.data.fill_(0.0)
        if name.endswith("router.bias"):
            parameter.data.fill_({"all": 1.0, "here": -1.0}[routes])


def random_tokens(batch: int, length: int, vocab: int = 301) -> torch.Tensor:
    """Returns random ids ``[batch, length]`` above those of padding, beginning and end."""
    return torch.randint(3, vocab, (batch, length), generator=torch.Generator().manual_seed(3))


def save_tokenizer(folder: Path, words: int = 300, added: int = 0) -> None:
    """Writes a word-level tokenizer with a chat template; `added` tokens are not part of ``vocab_size``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {word: index for index, word in enumerate(special + [f"w{i}" for i in range(words - 4)])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.add_tokens([f"<new{i}>" for i in range(added)])
    tokenizer.chat_template = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}"
    tokenizer.save_pretrained(folder)
