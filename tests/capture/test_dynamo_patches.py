"""The patches of Dynamo: models are captured whole, and other backends are not affected."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch._dynamo import utils

from moaic.capture.dynamo_patches import captures_whole
from moaic.capture.trace_only import take_call
from moaic.ir.ops import OPS

logger = logging.getLogger(__name__)
library: Any = hf.utils.logging.get_logger("transformers.talk")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Talking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        logger.warning("a batch of %d", x.shape[0])
        library.warning_once("said once")
        return self.inside(x)


def test_log_calls_break_no_graph() -> None:
    function = take_call(Talking(), {"x": torch.ones(2, 4)}).captured.function
    assert "aten.mm" in {op.name for op in function.ops}


def test_pytorch_still_notes_its_settings() -> None:
    """It does with every graph, and not every version can write functions, as log calls are."""
    take_call(Talking(), {"x": torch.ones(2, 4)})
    notes: Any = utils
    assert "verify_correctness" in notes._get_dynamo_config_for_logging()


def experts() -> nn.Module:
    settings = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config: Any = hf.MixtralConfig
    return hf.MixtralModel(config(**settings, num_key_value_heads=2, vocab_size=8, num_local_experts=3))


IDS = {"input_ids": torch.arange(6).view(2, 3)}


@pytest.mark.parametrize("form", ["eager", "grouped_mm", "batched_mm"])
def test_experts_of_any_form_are_taken_token_by_token(form: str) -> None:
    """No sort, no loop over what was chosen: every op keeps the dim of tokens, so the batch can be split."""
    model: Any = experts()
    model.set_experts_implementation(form)
    function = take_call(model, IDS).captured.function
    names = {op.name for op in function.ops}
    assert names <= set(OPS)
    assert not names & {"aten.sort", "aten.nonzero"}


def test_other_backends_see_experts_in_the_form_that_was_chosen() -> None:
    seen: set[str] = set()

    def backend(graph: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
        seen.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def ours(graph: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Any]:
        raise AssertionError("nothing is compiled for it")

    captures_whole(ours)
    torch.compile(experts(), backend=backend)(**IDS)
    assert any("grouped_mm" in name for name in seen)
