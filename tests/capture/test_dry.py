"""Models that are captured without weights."""

from __future__ import annotations

from pathlib import Path

from moaic.capture.dry import Sample, Source, take_model

BAICHUAN = Path(__file__).parents[2] / "tutorial" / "baichuan2"


def test_numbers_that_a_model_s_own_code_makes_are_kept() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    taken = take_model(Source(str(BAICHUAN), {**sizes, "vocab_size": 64}, trust_remote_code=True), Sample(2, 8))
    numbers = {op.attrs["fill_value"] for op in taken.captured.function.ops if op.name == "aten.full"}
    lowest = -3.3895313892515355e38
    assert lowest in numbers, "the least of bfloat16, below which the code lets no score fall"
