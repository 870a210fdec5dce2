"""Models that are captured without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moaic.capture.trace_only import ModelSource, Sample, take_model
from moaic.ir.attention import ATTENTION
from moaic.ir.errors import Diagnostic

SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
BAICHUAN = Path(__file__).parents[2] / "tutorial" / "baichuan2"


def test_numbers_that_a_model_s_own_code_makes_are_kept() -> None:
    taken = take_model(ModelSource(str(BAICHUAN), {**SIZES, "vocab_size": 64}, trust_remote_code=True), Sample(2, 8))
    numbers = {op.attrs["fill_value"] for op in taken.captured.function.ops if op.name == "aten.full"}
    lowest = -3.3895313892515355e38
    assert lowest in numbers, "the least of bfloat16, below which the code lets no score fall"


def test_rows_without_padding_need_no_mask() -> None:
    function = take_model(ModelSource("llama", SIZES), Sample(2, 4096, padding=False)).captured.function
    found = [(op.attrs["is_causal"], op.operands[-1]) for op in function.ops if op.name in ATTENTION]
    assert found == [(True, None)] * 2
    assert all(value.type.shape[-2:] != (4096, 4096) for op in function.ops for value in op.results)


def test_a_decoder_without_a_start_token_reads_padding_first() -> None:
    """The published configuration of such a type names none: that is in the folder of a model."""
    settings = {"num_layers": 1, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 4, "vocab_size": 64}
    assert take_model(ModelSource("t5", settings), Sample(2, 8)).captured.is_training


def test_a_decoder_whose_type_names_no_padding_is_refused_by_what_it_is() -> None:
    with pytest.raises(Diagnostic, match="`musicgen` is no language model, no image classifier"):
        take_model(ModelSource("musicgen", {}), Sample(2, 8))


def test_pictures_are_those_that_a_part_for_vision_takes(tmp_path: Path) -> None:
    config = {"model_type": "clip", "vision_config": {**SIZES, "image_size": 16, "patch_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    function = take_model(ModelSource(str(tmp_path), {}), Sample(2)).captured.function
    inputs = [param for at, param in enumerate(function.params) if function.param_role(at).kind == "input"]
    assert (2, 3, 16, 16) in {value.type.shape for value in inputs}


def test_speech_is_frames_of_a_spectrogram() -> None:
    layers = {f"{side}_{size}": 2 for side in ("encoder", "decoder") for size in ("layers", "attention_heads")}
    sizes = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 64, "pad_token_id": 0}
    lengths = {"max_source_positions": 12, "max_target_positions": 6, "num_mel_bins": 8}
    function = take_model(ModelSource("whisper", {**layers, **sizes, **lengths}), Sample(2, 8)).captured.function
    inputs = [param for at, param in enumerate(function.params) if function.param_role(at).kind == "input"]
    assert {value.type.shape for value in inputs} == {(2, 8, 24), (2, 6)}


def test_a_batch_of_any_size_is_not_allocated() -> None:
    sample = Sample(10**8, 4096)  # 3 TB of token ids
    function = take_model(ModelSource("llama", {**SIZES, "vocab_size": 64}), sample).captured.function
    assert any(value.type.shape == (10**8, 4096) for value in function.params)
