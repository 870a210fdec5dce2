"""Capture without running: the first step of a model or of a script, with its arguments."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from moaic.capture.aot import capture_backend
from moaic.capture.autocast import takes_precision
from moaic.capture.before_autograd import assignment_of_data
from moaic.capture.compile_hooks import checks_options
from moaic.capture.dynamo_patches import captures_whole
from moaic.capture.float8 import in_float8
from moaic.capture.fx.captured import Captured, Instance
from moaic.capture.fx.program import FxProgram
from moaic.capture.settings import FULL_TRACE, check_setting, impossible
from moaic.capture.short_stacks import Cut, shortened
from moaic.device import torch_private
from moaic.ir.errors import Diagnostic
from moaic.options import check_backend_options
from moaic.precision import PRECISION, float8_recipe

MODELS: Final = "give a type such as `llama`, or the folder of a config.json"

START: Final = "decoder_start_token_id"
"""What the decoder of a model with an encoder reads first; most such models read padding."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The batch that a model is captured with."""

    batch: int = 8
    sequence: int = 128
    image: int = 224
    """Side of an image, for a model whose configuration does not state one."""
    training: bool = True
    padding: bool = True
    """Whether rows of text have unequal lengths and the model gets a mask."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A Hugging Face model: its type (`llama`) or the folder of its configuration, and settings to change."""

    name: str
    settings: Mapping[str, object]
    trust_remote_code: bool = False
    """Whether code in the folder of the configuration may run."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedCall:
    """A captured step, and the tensors that it was called with, in the order of `Captured.arguments`."""

    captured: Captured
    arguments: tuple[Tensor, ...]


class _TakenError(BaseException):
    """Ends the first step before it runs. A BaseException, so that the user's script does not catch it."""

    def __init__(self, taken: CapturedCall) -> None:
        super().__init__()
        self.taken = taken


class _Recorder:
    """An engine that raises the first call; graphs that return only views of arguments it lets pass."""

    def __init__(self, program: FxProgram) -> None:
        self.program = program

    def forward(self, instance: Instance, arguments: list[Tensor]) -> tuple[Sequence[Tensor], None]:
        captured = instance.closed
        if not captured.function.results:
            return (), None
        raise _TakenError(CapturedCall(captured, tuple(argument.detach() for argument in arguments)))

    def backward(self, instance: Instance, call: object, tangents: list[Tensor]) -> NoReturn:
        raise AssertionError("no forward has run")

    def run_op_by_op(self, reason: Diagnostic) -> None:
        raise reason


def _record(
    graph_module: Any, examples: Sequence[Any], *, options: Mapping[str, object] | None = None, **others: object
) -> Callable[..., Any]:
    if place := assignment_of_data(graph_module):
        raise Diagnostic(f"{place} assigns the `.data` of a tensor", hint="write in place: `tensor.copy_(value)`")
    if recipe := float8_recipe((options or {}).get(PRECISION)):
        in_float8(graph_module, recipe)
    return capture_backend(graph_module, examples, _Recorder)


def _recorder() -> Callable[..., Any]:
    return checks_options(_check)(takes_precision(captures_whole(_record)))


def _check(options: Mapping[str, object], mode: str | None) -> None:
    check_backend_options(options)


def take_call(
    model: Callable[..., Any], inputs: Mapping[str, Tensor], options: Mapping[str, object] | None = None
) -> CapturedCall:
    """Capture the step that a call of `model` would run, as one graph; `options` are those of `torch.compile`."""
    from torch._dynamo.exc import TorchDynamoException

    settings: Any = dict(options or {})
    compiled: Any = torch.compile(model, backend=_recorder(), fullgraph=True, options=settings)
    try:
        compiled(**inputs)
    except _TakenError as one:
        return one.taken
    except TorchDynamoException as error:
        if isinstance(inner := getattr(error, "inner_exception", None), Diagnostic):
            raise inner from None
        raise Diagnostic(f"`{_name(model)}` cannot be captured as one graph: {_reason(error)}") from error
    raise AssertionError("a compiled model ran without its backend")


def _reason(error: Exception) -> str:
    """The reason in one line: where an op fails, what it says, which is what Dynamo's error comes from."""
    from torch._dynamo.exc import TorchRuntimeError

    if not isinstance(error, TorchRuntimeError):
        return _first_line(error)
    cause: BaseException = error
    while (before := cause.__cause__ or cause.__context__) is not None:
        cause = before
    return f"{type(cause).__name__}: {_first_line(cause)}"


def _name(model: Callable[..., Any]) -> str:
    return getattr(model, "__name__", type(model).__name__)


def take_model(source: ModelSource, sample: Sample) -> CapturedCall:
    """Capture the step of a model without allocating its weights."""
    with _weightless(source) as (model, config):
        return _take(source, model, config, sample)


def take_short_model(source: ModelSource, sample: Sample, units: int) -> tuple[CapturedCall, Sequence[Cut]]:
    """Capture a step as `take_model` does, with so many units of each stack of layers; returns what is left out."""
    with _weightless(source) as (model, config), shortened(model, units) as cuts:
        return _take(source, model, config, sample), cuts


@contextmanager
def _weightless(source: ModelSource) -> Generator[tuple[Any, Any]]:
    """The model without weights, and its configuration; inside, nothing is allocated, the batch neither."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.initialization import no_init_weights

    config = _config(source)
    # Dynamo counts the captures of one forward over all models of a type, and gives up after eight.
    torch.compiler.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        with no_init_weights():
            model = _model(config, source)
        yield model, config


def take_small_model(source: ModelSource, sample: Sample, most: int) -> CapturedCall:
    """Capture the step of a model with initialized weights; raises Diagnostic if it has more than `most` of them."""
    config = _config(source)
    with torch.device("meta"):
        elements = sum(parameter.numel() for parameter in _model(config, source).parameters())
    if elements > most:
        raise Diagnostic(
            f"`{source.name}` has {elements / 1e6:,.0f} million parameters; the limit here is {most / 1e6:.0f} million",
            hint="make it smaller: --set num_hidden_layers=2 --set hidden_size=64, and so on",
        )
    torch.manual_seed(0)
    return _take(source, _model(config, source), config, sample)


def _take(source: ModelSource, model: Any, config: Any, sample: Sample) -> CapturedCall:
    try:
        inputs = _task(config).inputs(config, sample)
    except Diagnostic:
        raise
    except Exception as error:
        raise _impossible(source, error) from error
    if not sample.training:
        del inputs["labels"]
    with torch.set_grad_enabled(sample.training):
        return take_call(model.train(sample.training), inputs)


def take_script(path: str, arguments: Sequence[str]) -> CapturedCall:
    """Capture the first step that a script runs through `torch.compile(…, backend="moai")`; the script ends there."""
    if not Path(path).is_file():
        raise Diagnostic(f"cannot read {path}: there is no such file")
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    try:
        with torch_private.backend_replaced("moai", _recorder()):
            runpy.run_path(path, run_name="__main__")
    except _TakenError as one:
        return one.taken
    except SystemExit as end:
        if end.code not in (None, 0):
            raise Diagnostic(f"{path} ended with {end.code!r} before its first compiled step") from None
    except Exception as error:
        told = getattr(error, "inner_exception", error)
        if isinstance(told, Diagnostic):
            raise told from None
        if _is_raised_by_moaic(told):
            raise
        message = f"{path} failed before its first compiled step: {_said(error, path)}"
        raise Diagnostic(message, hint=FULL_TRACE) from error
    raise Diagnostic(
        f"{path} ended without a compiled step",
        hint='the script must compile a model with `backend="moai"` and call it',
    )


def _is_raised_by_moaic(error: BaseException) -> bool:
    last = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    return any(Path(file).is_relative_to(Path(__file__).parents[1]) for file in last)


def _said(error: Exception, path: str) -> str:
    """The error of a script, with its last line there."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    place = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {_first_line(error)}{place}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _config(source: ModelSource) -> Any:
    """The configuration of a type, made with the settings, or that of a folder, changed by the settings."""
    usual = _usual_config(source)
    for name, value in source.settings.items():
        check_setting(source.name, name, value, usual)
    try:
        if Path(source.name).exists():
            config = usual
            _check_settings(source, usual, source.settings)
        else:
            # A configuration derives values from its settings when it is made, such as heads of keys from heads.
            config = _configs().for_model(source.name, **source.settings)
            _check_settings(source, usual, cast("Mapping[str, object]", vars(config)))
        defaults = {"use_cache": False} if hasattr(config, "use_cache") else {}
        for name, value in {**defaults, **source.settings}.items():
            if hasattr(usual, name):
                setattr(config, name, value)
        if getattr(config, "is_encoder_decoder", False) and getattr(config, START, None) is None:
            setattr(config, START, getattr(config, "pad_token_id", None))
    except Diagnostic:
        raise
    except Exception as error:
        raise _impossible(source, error) from error
    return config


def _configs() -> Any:
    from transformers import AutoConfig

    return AutoConfig


def _usual_config(source: ModelSource) -> Any:
    """The configuration of a folder, or of a type as it is published. Raises Diagnostic."""
    if Path(source.name).is_file() and Path(source.name).suffix != ".json":
        raise Diagnostic(f"`{source.name}` is a file, not the folder of a model", hint=MODELS)
    try:
        if Path(source.name).exists():
            trusted = source.trust_remote_code
            return _configs().from_pretrained(source.name, local_files_only=True, trust_remote_code=trusted)
        return _configs().for_model(source.name)
    except (OSError, ValueError) as error:
        hint = MODELS
        if "trust_remote_code" in str(error):
            hint = "read the code in that folder, and let it run with --trust-remote-code"
        raise Diagnostic(f"there is no model `{source.name}`: {str(error).split('. ')[0][:200]}", hint=hint) from None


def _impossible(source: ModelSource, error: Exception) -> Diagnostic:
    return impossible(source.name, source.settings, _usual_config(source), error)


def _check_settings(source: ModelSource, usual: Any, given: Mapping[str, object]) -> None:
    """Raise Diagnostic for a setting among those `given` that the usual configuration does not have.

    A configuration stores an unknown setting as an attribute, and converts a setting of an old name.
    """
    for name in source.settings:
        if name in given and not hasattr(usual, name):
            raise Diagnostic(f"the configuration of `{source.name}` has no `{name}`")


def _model(config: Any, source: ModelSource) -> Any:
    """A model with the head of its usual training task."""
    try:
        model = _task(config).maker.from_config(config, trust_remote_code=source.trust_remote_code)
    except Exception as error:
        if str(error).startswith("Unrecognized configuration class"):
            kinds = "no language model, no image classifier and no model of speech with a decoder of text"
            raise Diagnostic(f"`{config.model_type}` is {kinds}") from error
        raise _impossible(source, error) from error
    model.tie_weights()
    return model


class _Task(NamedTuple):
    """What a model is trained for: the class of transformers that makes it with that head, and a batch for it."""

    maker: Any
    inputs: Callable[[Any, Sample], dict[str, Tensor]]


def _task(config: Any) -> _Task:
    """The first that transformers knows of: text comes before all, and also where none is known."""
    import transformers as hub

    writer = hub.AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else hub.AutoModelForCausalLM
    text, pictures = _Task(writer, _text), _Task(hub.AutoModelForImageClassification, _pictures)
    tasks = (text, _Task(hub.AutoModelForSpeechSeq2Seq, _spectra), pictures)
    known = (task for task in tasks if type(config) in task.maker._model_mapping)
    return next(known, text if hasattr(config, "vocab_size") else pictures)


def _text(config: Any, sample: Sample) -> dict[str, Tensor]:
    """A batch of random rows; padding is left out of the loss."""
    rows, length = sample.batch, sample.sequence
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (rows, length), generator=generator)
    if not sample.padding:
        return {"input_ids": ids, "labels": ids}
    mask = (torch.arange(length) < length - torch.arange(rows).unsqueeze(1) % (length // 2 + 1)).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def _pictures(config: Any, sample: Sample) -> dict[str, Tensor]:
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", sample.image)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(sample.batch, vision.num_channels, side, side, generator=generator)
    labels = torch.randint(0, config.num_labels, (sample.batch,), generator=generator)
    return {"pixel_values": pixels, "labels": labels}


def _spectra(config: Any, sample: Sample) -> dict[str, Tensor]:
    """Speech as frames of a spectrogram, all that the encoder takes, and the text that is said."""
    for name in ("max_source_positions", "num_mel_bins", "max_target_positions"):
        if not hasattr(config, name):
            raise Diagnostic(f"`{config.model_type}` reads no spectrogram as Whisper does: it has no `{name}`")
    generator = torch.Generator().manual_seed(0)
    frames = 2 * config.max_source_positions
    features = torch.randn(sample.batch, config.num_mel_bins, frames, generator=generator)
    length = min(sample.sequence, config.max_target_positions)
    labels = torch.randint(0, config.vocab_size, (sample.batch, length), generator=generator)
    return {"input_features": features, "labels": labels}
