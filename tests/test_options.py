from __future__ import annotations

import re
from dataclasses import fields

import pytest
import torch

from moaic.ir.errors import Diagnostic
from moaic.options import KNOWN, choices_from
from moaic.passes.config import Request
from moaic.planner.request import request_from
from moaic.precision import PRECISION, precision_of


def test_other_names_are_translated() -> None:
    choices = choices_from(
        {
            "num_stages": 2,
            "num_micro_batches": 4,
            "activation_recomputation": True,
            "distribute_parameter": True,
            "pipeline_parallel": True,
        }
    )
    assert request_from(dict(choices.backend)) == Request(
        pp=2, micro_batches=4, recompute="full", distribute_param="step"
    )


def test_own_names_are_the_planner_s() -> None:
    assert {field.name for field in fields(Request)} < set(KNOWN)
    assert choices_from({"dp": 2, "compile": False}).backend == {"dp": 2, "compile": False}


def test_without_a_pipeline() -> None:
    assert choices_from({"pipeline_parallel": False}).backend == {"pp": 1}


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(True, torch.bfloat16), ("bf16", torch.bfloat16), (torch.float16, torch.float16), (False, None), (None, None)],
)
def test_mixed_precision(value: object, dtype: torch.dtype | None) -> None:
    for name in ("mixed_precision", "precision"):
        assert precision_of(choices_from({name: value}).backend[PRECISION]) == dtype


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stage": 2}, r"no option `num_stage`\nhint: did you mean `num_stages`\? options are activation_recomp"),
        ({"zzz": 2}, r"no option `zzz`\nhint: options are "),
        ({"pp": 2, "num_stages": 2}, "`num_stages` is another name for `pp`, and both are given"),
        ({"pipeline_parallel": False, "num_stages": 2}, "rules out the pipeline of 2 stages"),
        ({"pipeline_parallel": "perhaps"}, "invalid value `perhaps` for pipeline_parallel"),
        ({"mixed_precision": "fp4"}, "invalid value `fp4` for mixed_precision\nhint: choose True, False, bf16"),
        ({"precision": "fp4"}, "invalid value `fp4` for precision\nhint: choose True, False, bf16"),
        ({"precision": True, "mixed_precision": True}, "`mixed_precision` is another name for `precision`, and both"),
        ({"num_micro_batches": 0}, "micro_batches=0 is not a positive whole number"),
    ],
)
def test_mistakes(options: dict[str, object], message: str) -> None:
    with pytest.raises(Diagnostic) as caught:
        choices_from(options)
    assert re.search(message, str(caught.value))
