"""Capture without running: the graph of a model whose weights are never made, or of the first step of a script."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from moaic.capture.aot import capture_backend
from moaic.capture.from_fx import Captured, FxProgram
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function


@dataclass(frozen=True, slots=True)
class Sample:
    """The batch that a model is captured with."""

    batch: int = 8
    sequence: int = 128
    image: int = 224
    """Side of an image, where the model's configuration does not say."""
    training: bool = True


class _CapturedOne(BaseException):
    """Ends the first step before anything runs. No Exception: the person's script must not catch it."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function


class _Recorder:
    """An engine that runs nothing."""

    def __init__(self, program: FxProgram) -> None:
        self.program = program

    def forward(self, captured: Captured, call: int | None, arguments: list[Tensor]) -> NoReturn:
        raise _CapturedOne(captured.function)

    def backward(self, captured: Captured, call: int, tangents: list[Tensor]) -> NoReturn:
        raise AssertionError("nothing has run forward")

    def forget(self, call: int) -> None:
        pass


def _record(graph_module: Any, examples: Sequence[Any], **options: object) -> Callable[..., Any]:
    return capture_backend(graph_module, examples, _Recorder)


def capture_model(source: str, settings: Mapping[str, object], sample: Sample) -> Function:
    """The step of a Hugging Face model, given by its type (`llama`) or by the place of its configuration."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = _config(source, settings)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, inputs = _model(config, sample)
        compiled: Any = torch.compile(model.train(sample.training), backend=_record, fullgraph=True)
        try:
            with torch.set_grad_enabled(sample.training):
                compiled(**inputs)
        except _CapturedOne as one:
            return one.function
        except TorchDynamoException as error:
            reason = str(error).strip().split("\n")[0]
            raise Diagnostic(f"`{source}` cannot be captured as one graph: {reason}") from error
    raise AssertionError("a compiled model ran without its backend")


def capture_script(path: str, arguments: Sequence[str]) -> Function:
    """The first step that a script runs through `torch.compile(…, backend="moai")`; the script ends there."""
    from torch._dynamo.backends.registry import register_backend

    if not Path(path).is_file():
        raise Diagnostic(f"cannot read {path}: there is no such file")
    register_backend(_record, name="moai")
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except _CapturedOne as one:
        return one.function
    except SystemExit as end:
        if end.code not in (None, 0):
            raise Diagnostic(f"{path} ended with {end.code!r} before its first compiled step") from None
    raise Diagnostic(f"{path} ended without a compiled step", hint='it compiles with `backend="moai"`, and calls that')


def _config(source: str, settings: Mapping[str, object]) -> Any:
    from transformers import AutoConfig

    kinds: Any = AutoConfig
    try:
        here = Path(source).exists()
        config: Any = kinds.from_pretrained(source, local_files_only=True) if here else kinds.for_model(source)
    except (OSError, ValueError) as error:
        hint = "give a type such as `llama`, or the folder of a config.json"
        raise Diagnostic(f"there is no model `{source}`: {str(error).split('. ')[0][:200]}", hint=hint) from None
    defaults = {"use_cache": False} if hasattr(config, "use_cache") else {}
    for name, value in {**defaults, **settings}.items():
        if not hasattr(config, name):
            raise Diagnostic(f"the configuration of `{source}` has no `{name}`")
        setattr(config, name, value)
    return config


def _model(config: Any, sample: Sample) -> tuple[Any, dict[str, Tensor]]:
    """A model that learns its usual task, its weights not drawn, and a batch for it."""
    from transformers.initialization import no_init_weights

    try:
        with no_init_weights():
            model, inputs = _language(config, sample) if hasattr(config, "vocab_size") else _vision(config, sample)
    except (AttributeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise Diagnostic(
            f"`{config.model_type}` is no causal language model and no image classifier: {reason}"
        ) from error
    model.tie_weights()
    if not sample.training:
        del inputs["labels"]
    return model, inputs


def _language(config: Any, sample: Sample) -> tuple[Any, dict[str, Tensor]]:
    from transformers import AutoModelForCausalLM

    makers: Any = AutoModelForCausalLM
    model = makers.from_config(config)
    model.loss_type = "ForCausalLM"  # GPT-2 says none, warns about it, and the warning breaks the graph
    ids = torch.zeros(sample.batch, sample.sequence, dtype=torch.long)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _vision(config: Any, sample: Sample) -> tuple[Any, dict[str, Tensor]]:
    from transformers import AutoModelForImageClassification

    makers: Any = AutoModelForImageClassification
    model = makers.from_config(config)
    side = getattr(config, "image_size", sample.image)
    pixels = torch.zeros(sample.batch, config.num_channels, side, side)
    return model, {"pixel_values": pixels, "labels": torch.zeros(sample.batch, dtype=torch.long)}
