"""Tiny forms of the architectures of `transformers`: configurations shrunk by the names of their settings, and batches.

Nothing is known of any architecture by its name. What cannot be built or called so is counted as such.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import torch
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.architectures.pictures import IGNORED, Batch, seen

ROWS = 4
LENGTH = 8
WIDTH = 32
VOCABULARY = 64
SIDE = 32
CLASSES = 5
LAYERS = 2
SAMPLES = 2000
LARGEST = 40_000_000
"""Parameters that a form may have and still be tried."""

KINDS: Mapping[str, tuple[str, str]] = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
    "classification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForSequenceClassification"),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification"),
    "speech": ("MODEL_FOR_CTC_MAPPING_NAMES", "AutoModelForCTC"),
    "audio": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", "AutoModelForAudioClassification"),
    "speech2seq": ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "AutoModelForSpeechSeq2Seq"),
    "vision": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "AutoModelForImageTextToText"),
}
"""Per kind the table of its architectures, and the class that makes one."""


def _each(names: str, value: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


COUNTS: Mapping[str, int] = {
    **_each("vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input", VOCABULARY),
    **_each("unpadded_vocab_size target_vocab_size entity_vocab_size encoder_hash_byte_group_vocab", VOCABULARY),
    **_each("num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers", LAYERS),
    **_each("num_decoder_layers depth speech_encoder_layers num_blocks max_window_layers", LAYERS),
    **_each("num_self_attends_per_block num_latents", LAYERS),
    **_each("num_experts n_routed_experts num_local_experts moe_num_experts", 4),
    **_each("num_labels", CLASSES),
}
"""Of what is counted, not how wide it is."""

SIZES: Mapping[str, int] = {
    **COUNTS,
    **_each("hidden_size d_model n_embd dim embedding_size embed_dim word_embed_proj_dim lru_width emb_dim", WIDTH),
    **_each("attention_hidden_size output_hidden_size backbone_hidden_size decoder_hidden_size d_embed", WIDTH),
    **_each("out_hidden_size projection_dim width depth_hidden_size embedding_dim", WIDTH),
    **_each("intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff dim_ff dff ffn_hidden_size d_inner", 48),
    **_each("moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size n_inner", 48),
    **_each("shared_intermediate_size intermediate_size_mlp dense_intermediate_size feed_forward_size", 48),
    **_each("num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads", 4),
    **_each(
        "num_encoder_attention_heads num_decoder_attention_heads attention_heads speech_encoder_attention_heads", 4
    ),
    **_each("num_query_groups num_kv_heads num_key_value_heads", 2),
    **_each("head_dim kv_channels d_kv dim_head qk_rope_head_dim qk_nope_head_dim v_head_dim attention_head_size", 8),
    **_each("linear_key_head_dim linear_value_head_dim linear_head_dim rotary_dim index_head_dim", 8),
    **_each("attention_head_dim d_head mamba_d_head mamba_head_dim swa_head_dim", 8),
    **_each("qk_head_dim kv_lora_rank q_lora_rank o_lora_rank", 16),
    **_each("linear_num_key_heads linear_num_value_heads linear_num_heads index_n_heads mamba_n_heads", 4),
    **_each("mamba_num_heads n_mamba_heads", 4),
    **_each("num_experts_per_tok num_experts_per_token moe_topk moe_k n_group topk_group", 2),
    **_each("zero_expert_num n_groups mamba_n_groups num_expert_group", 2),
    **_each("max_position_embeddings n_positions n_ctx max_seq_len max_target_positions model_max_length", 64),
    **_each("relative_attention_num_buckets num_buckets position_bias_num_buckets", 8),
    **_each("image_size input_size", SIDE),
    **_each("patch_size", 8),
    **_each("state_size mamba_d_state ssm_state_size mamba_chunk_size chunk_size", 8),
    **_each("sliding_window local_attention attention_window sliding_window_size window_size block_size", 4),
    **_each("time_step_rank mamba_dt_rank codevector_dim proj_codevector_dim classifier_proj_size", 8),
    **_each("text_hidden_size projector_input_dim projector_output_dim vision_output_dim", WIDTH),
    **_each("mm_tokens_per_image vision_soft_tokens_per_image", 4),
    **_each("num_codevectors_per_group num_negatives num_conv_pos_embeddings num_conv_pos_embedding_groups", 8),
    **_each("mask_time_length mask_feature_length mask_time_min_masks", 2),
}

LISTS: Mapping[str, Callable[[list[Any]], list[Any]]] = {
    "depths": lambda old: [1 for _ in old],
    "depth": lambda old: [min(each, 3) for each in old],
    "conv_dim": lambda old: [16 for _ in old],
    "hidden_sizes": lambda old: [16 * (at + 1) for at, _ in enumerate(old)],
    "encoder_hidden_sizes": lambda old: [16 * (at + 1) for at, _ in enumerate(old)],
    "num_attention_heads": lambda old: [2 for _ in old],
    "tdnn_dim": lambda old: [16 for _ in old],
    "image_grid_pinpoints": lambda _: [[SIDE, SIDE], [SIDE, 2 * SIDE]],
    "vision_feature_layer": lambda old: [-1 for _ in old],
    "vision_feature_layers": lambda old: [-1 for _ in old],
}

KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")

RANDOM = ("drop", "mask_time_prob", "mask_feature_prob", "jitter_noise")
"""In the names of probabilities and widths of what is drawn."""


_CONFIGS: Any = CONFIG_MAPPING


def families(kind: str) -> list[str]:
    return list(getattr(modeling_auto, KINDS[kind][0]))


@dataclass(frozen=True)
class Attempt:
    """How a configuration is shrunk: what sizes are taken from, and settings that depend on each other."""

    sizes: Mapping[str, int]
    given: Mapping[str, int] = field(default_factory=dict[str, int])
    sections: bool = False
    """Whether positions of text turn in time, height and width where a configuration does not say how."""


ATTEMPTS = (
    Attempt(SIZES),
    Attempt(SIZES, {"num_heads": 8}),
    Attempt(SIZES, {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}),
    Attempt(SIZES, {"head_dim": 16}),
    Attempt(SIZES, {"num_hidden_layers": 4}),
    Attempt(SIZES, {"mamba_n_heads": 8, "mamba_d_ssm": 64}),
    Attempt(SIZES, {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}),
    Attempt(SIZES, {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "vocab_size": VOCABULARY}),
    Attempt(SIZES, {"intermediate_size": 4 * WIDTH}),
    Attempt(SIZES, {"window_size": SIDE}, sections=True),
    Attempt(COUNTS),
)
"""What is tried in turn until a configuration, its model and a batch are made."""


@dataclass(frozen=True)
class Form:
    """A tiny form of an architecture: its configuration, its model and a batch."""

    config: Any
    model: Any
    batch: Batch


def made(kind: str, family: str) -> Form:
    """The first form that plain PyTorch can train; raises what the first attempt raised where none can be."""
    failed: list[Exception] = []
    for attempt in ATTEMPTS:
        try:
            return _attempted(kind, family, attempt)
        except Exception as error:
            failed.append(error)
    raise failed[0]


def _attempted(kind: str, family: str, attempt: Attempt) -> Form:
    config = shrunk(_CONFIGS[family], attempt)
    model = model_of(kind, config)
    batch = batch_of(kind, model)
    model(**batch).loss.backward()
    return Form(config, model, batch)


def shrunk(cls: Any, attempt: Attempt) -> Any:
    """A configuration in which one layer of each kind is left, and every size is small."""
    usual = cls()
    settings: dict[str, Any] = {}
    for name, value in _settings(usual).items():
        if hasattr(value, "to_dict"):
            settings[name] = shrunk(_class_of(value), attempt).to_dict()
        elif name in KINDS_OF_LAYERS and isinstance(value, list):
            settings[name] = _kinds(cast("list[Any]", value))
        elif isinstance(value, list | tuple) and name in LISTS:
            settings[name] = LISTS[name](list(cast("Sequence[Any]", value)))
        elif _has_sections(value, usual, attempt):
            settings[name] = {**value, "mrope_section": _sections(usual, value, attempt)}
        elif name in attempt.sizes and isinstance(value, int) and not isinstance(value, bool) and value:
            settings[name] = min(attempt.sizes[name], value)
    settings |= _of_layers(usual, settings) | _tokens(usual) | _heads(usual) | dict(attempt.given)
    taken = inspect.signature(cls.__init__).parameters
    config = cls(**{name: value for name, value in settings.items() if name in taken or hasattr(usual, name)})
    for name, value in _quiet(usual).items():
        setattr(config, name, value)
    return config


def _has_sections(value: Any, usual: Any, attempt: Attempt) -> TypeGuard[dict[str, Any]]:
    if not isinstance(value, dict):
        return False
    asked = attempt.sections and hasattr(usual, "vocab_size") and "rope_type" in value
    return asked or "mrope_section" in value


def _sections(usual: Any, rope: Mapping[str, Any], attempt: Attempt) -> list[int]:
    """Half of a head's rotated numbers, dealt to time, height and width."""
    head = dict(attempt.sizes, **attempt.given).get("head_dim", 0)
    factor = rope.get("partial_rotary_factor") or getattr(usual, "partial_rotary_factor", None) or 1.0
    half = int(head * factor) // 2
    return [half - 2 * (half // 3), half // 3, half // 3]


def _class_of(config: Any) -> Any:
    return config.__class__


def _settings(config: Any) -> dict[str, Any]:
    return dict(config.__dict__)


def _heads(usual: Any) -> dict[str, int]:
    """As many heads of keys as of queries where that is usual."""
    heads, keys = (getattr(usual, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return {"num_key_value_heads": 4} if heads == keys and isinstance(keys, int) else {}


def _kinds(layers: list[Any]) -> list[Any]:
    """Every kind that there is, once each in its order; at least two layers."""
    distinct = list(dict.fromkeys(layers))
    return (distinct * LAYERS)[: max(LAYERS, len(distinct))]


def _of_layers(usual: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """As many layers as lists of kinds name, which must be of one length."""
    named = [name for name in KINDS_OF_LAYERS if name in settings]
    if not named:
        return {}
    count = max(len(settings[name]) for name in named)
    lists = {name: (settings[name] * count)[:count] for name in named}
    return {**lists, "num_hidden_layers": count} if hasattr(usual, "num_hidden_layers") else lists


def _tokens(usual: Any) -> dict[str, int]:
    """Special tokens, each within the vocabulary and another one."""
    names = [name for name in _settings(usual) if name.endswith(("_token_id", "_token_index", "_index"))]
    ids = [name for name in names if isinstance(getattr(usual, name), int)]
    known = [name for name in ids if getattr(usual, name) >= VOCABULARY]
    named = {name: VOCABULARY - 1 - at for at, name in enumerate(known)}
    picture = {name: VOCABULARY // 2 for name in names if name.startswith("image_token_i") and name not in ids}
    return named | picture | ({"pad_token_id": 0} if hasattr(usual, "pad_token_id") else {})


def _quiet(usual: Any) -> dict[str, Any]:
    cache = {"use_cache": False} if hasattr(usual, "use_cache") else {}
    return {**cache, "decoder_start_token_id": 0} if getattr(usual, "is_encoder_decoder", False) else cache


def without_dropout(config: Any) -> None:
    """Sets every probability of dropping to zero, in the parts of a configuration too."""
    for name, value in _settings(config).items():
        if hasattr(value, "to_dict"):
            without_dropout(value)
        elif any(word in name for word in RANDOM) and isinstance(value, float):
            setattr(config, name, 0.0)
        elif any(word in name for word in RANDOM) and isinstance(value, list | tuple):
            setattr(config, name, [0.0 for _ in cast("Sequence[Any]", value)])


def model_of(kind: str, config: Any) -> Any:
    import transformers

    with torch.device("meta"):
        probe = getattr(transformers, KINDS[kind][1]).from_config(config)
    if (count := sum(each.numel() for each in probe.parameters())) > LARGEST:
        raise ValueError(f"{count / 1e6:.0f} million parameters are not tiny")
    torch.manual_seed(0)
    model = getattr(transformers, KINDS[kind][1]).from_config(config)
    model.loss_type = getattr(model, "loss_type", None) or "ForCausalLM"
    return model.train()


def batch_of(kind: str, model: Any) -> Batch:
    """Rows of unequal lengths; what is padding is no part of the loss."""
    generator = torch.Generator().manual_seed(0)
    if kind == "image":
        labels = torch.randint(0, model.config.num_labels, (ROWS,), generator=generator)
        return _picture(model, generator) | {"labels": labels}
    if kind in ("speech", "audio", "speech2seq"):
        return _sound(kind, model, generator)
    text = _text(kind, model, generator)
    return seen(model, text, generator) if kind == "vision" else text


def _text(kind: str, model: Any, generator: torch.Generator) -> Batch:
    ids = torch.randint(3, VOCABULARY // 2, (ROWS, LENGTH), generator=generator)
    lengths = torch.tensor([LENGTH, LENGTH - 3, LENGTH - 1, LENGTH // 2])[:, None]
    mask = (torch.arange(LENGTH) < lengths).long()
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    if kind == "classification":
        return {**batch, "labels": torch.randint(0, model.config.num_labels, (ROWS,), generator=generator)}
    labels = torch.where(mask.bool(), ids, IGNORED)
    taken = inspect.signature(model.forward).parameters
    if "attention_mask" not in taken and "kwargs" not in taken:
        del batch["attention_mask"]
    return {**batch, "labels": labels}


def _picture(model: Any, generator: torch.Generator) -> Batch:
    config = getattr(model.config, "vision_config", model.config)
    given: Any = getattr(config, "image_size", SIDE)
    side = int(given) if isinstance(given, int) else int(given[0])
    return {"pixel_values": torch.randn(ROWS, getattr(config, "num_channels", 3), side, side, generator=generator)}


def _sound(kind: str, model: Any, generator: torch.Generator) -> Batch:
    name = model.main_input_name
    bins = getattr(model.config, "num_mel_bins", None) or getattr(model.config, "input_feat_per_channel", 80)
    features = getattr(model.config, "feature_projection_input_dim", bins)
    shape = {
        "input_values": (ROWS, SAMPLES),
        "input_features": (ROWS, 40, features) if kind == "speech" else (ROWS, bins, 3000 // 25),
    }[name]
    batch = {name: torch.randn(shape, generator=generator)}
    if kind == "audio":
        return {**batch, "labels": torch.randint(0, model.config.num_labels, (ROWS,), generator=generator)}
    return {**batch, "labels": torch.randint(3, VOCABULARY // 2, (ROWS, 3), generator=generator)}
