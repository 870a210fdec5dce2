"""The models of the tutorials: for each family sizes to learn with, and those that are published."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from byte_pairs import VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM

Settings = Mapping[str, Any]

BAICHUAN2 = Path(__file__).parent / "baichuan2"
"""A folder as it would be downloaded: Baichuan 2's configuration and the model's own code."""

TINY: Settings = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
SMALL: Settings = {**TINY, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
NARROW: Settings = {"intermediate_size": 176}
WIDE: Settings = {"intermediate_size": 704}
SHARED: Settings = {"num_key_value_heads": 2}
"""Two heads of queries share one of keys and values, or four."""

ONE_END: Settings = {"bos_token_id": 0, "eos_token_id": 0}
"""What begins a text and ends it where one special token does both."""

NO_DROPOUT: Settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def without_positions(settings: Settings) -> Settings:
    """For a model that is told by distances where a token stands, and reads texts of any length."""
    return {name: value for name, value in settings.items() if name != "max_position_embeddings"}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture: a model type of transformers or a folder with remote code, and its settings for each size."""

    architecture: str | Path
    sizes: Mapping[str, Settings]


FAMILIES: Mapping[str, Family] = {
    "llama2": Family(
        "llama",
        {
            "tiny": {**TINY, **NARROW},
            "small": {**SMALL, **WIDE},
            "7b": {
                "vocab_size": 32000,
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "dtype": "bfloat16",
            },
            "13b": {
                "vocab_size": 32000,
                "hidden_size": 5120,
                "intermediate_size": 13824,
                "num_hidden_layers": 40,
                "num_attention_heads": 40,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "dtype": "bfloat16",
            },
        },
    ),
    "llama3": Family(
        "llama",
        {
            "tiny": {**TINY, **NARROW, **SHARED, "rope_theta": 500000.0, "bos_token_id": 0, "eos_token_id": 1},
            "small": {**SMALL, **WIDE, **SHARED, "rope_theta": 500000.0, "bos_token_id": 0, "eos_token_id": 1},
            "8b": {
                "vocab_size": 128256,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500000.0,
                "bos_token_id": 128000,
                "eos_token_id": 128001,
                "dtype": "bfloat16",
            },
        },
    ),
    "mistral": Family(
        "mistral",
        {
            "tiny": {**TINY, **NARROW, **SHARED, "sliding_window": 16},
            "small": {**SMALL, **WIDE, **SHARED, "sliding_window": 64},
            "7b": {
                "vocab_size": 32000,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 32768,
                "sliding_window": 4096,
                "rms_norm_eps": 1e-5,
                "dtype": "bfloat16",
            },
        },
    ),
    "qwen": Family(
        "qwen2",
        {
            "tiny": {**TINY, **NARROW, **SHARED, **ONE_END, "rope_theta": 1000000.0},
            "small": {**SMALL, **WIDE, **SHARED, **ONE_END, "rope_theta": 1000000.0},
            "7b": {
                "vocab_size": 152064,
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1000000.0,
                "bos_token_id": 151643,
                "eos_token_id": 151643,
                "dtype": "bfloat16",
            },
        },
    ),
    "baichuan2": Family(
        BAICHUAN2,
        {
            "tiny": {**without_positions(TINY), **NARROW, "dtype": "float32"},
            "small": {**without_positions(SMALL), **WIDE, "dtype": "float32"},
            "13b": {},
        },
    ),
    "gpt": Family(
        "gpt2",
        {
            "tiny": {**TINY, **ONE_END, **NO_DROPOUT},
            "small": {**SMALL, **ONE_END, **NO_DROPOUT},
            "xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
            "13b": {
                "n_embd": 5120,
                "n_inner": 20480,
                "n_layer": 40,
                "n_head": 40,
                "n_positions": 2048,
                "activation_function": "gelu",
                **NO_DROPOUT,
            },
        },
    ),
}
"""Published sizes are those of Llama 2 7B and 13B, Llama 3 8B, Mistral 7B v0.1, Qwen 2.5 7B, Baichuan 2 13B, GPT-2 XL
and Cerebras-GPT 13B, as their `config.json` says."""


def built_in(family: str, size: str) -> Any:
    """The configuration of a size by its name."""
    found = FAMILIES[family]
    configs: Any = AutoConfig
    if isinstance(found.architecture, Path):
        return configs.from_pretrained(found.architecture, trust_remote_code=True, **found.sizes[size])
    return configs.for_model(found.architecture, **found.sizes[size])


def load_model(family: str, name_or_path: str, *, trust_remote_code: bool = False) -> Any:
    """The model of a local folder with its weights, or a built-in size with new ones. Exits where it is neither."""
    models: Any = AutoModelForCausalLM
    if Path(name_or_path).is_dir():
        return models.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    if name_or_path not in FAMILIES[family].sizes:
        sizes = ", ".join(FAMILIES[family].sizes)
        sys.exit(f"--model-name-or-path {name_or_path}: there is no such folder; built-in sizes are {sizes}")
    return models.from_config(built_in(family, name_or_path), trust_remote_code=trust_remote_code)
