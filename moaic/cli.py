"""The command line: `moaic COMMAND FILE`. Each command is one function from parsed arguments to printed text.

A person's mistake is printed to standard error and ends with exit code 2; anything else that fails is a bug of ours and
crashes with its trace.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Op
from moaic.ir.ops import OPS, flops_of
from moaic.ir.printer import render, render_function, render_type
from moaic.ir.verify import load
from moaic.support.cache_folder import cache_folder
from moaic.text.units import amount

if TYPE_CHECKING:
    from torch import Tensor

    from moaic.capture.trace_only import ModelSource, Sample
    from moaic.check.proof import CapturedStep
    from moaic.passes.perf.machine import Machine
    from moaic.predict.guide import Question

MISTAKE = 2
"""Exit code for a person's mistake."""

WRONG = 1
"""Exit code where the ranks of a plan compute something else than one device, or where a first run would fail."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    words, of_script = _cut(sys.argv[1:] if arguments is None else arguments)
    try:
        chosen = _parser().parse_args(words, argparse.Namespace(of_script=of_script))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else MISTAKE
    try:
        code: int = chosen.command(chosen)
        sys.stdout.flush()
    except Diagnostic as error:
        print(error, file=sys.stderr)
        return MISTAKE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _cut(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Our own arguments, and those behind `--`, which are a script's."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("moaic", description="Read, check, change and run programs of the moaic compiler.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    verify = commands.add_parser("verify", help="check that files are well formed")
    verify.add_argument("files", nargs="+", metavar="FILE", help="IR text; - is standard input")
    verify.set_defaults(command=_verify)

    show = commands.add_parser("show", help="print a summary, then the text")
    show.add_argument("file", metavar="FILE", help="IR text; - is standard input")
    show.add_argument("--func", metavar="NAME", help="only this function's text")
    show.add_argument("--stats", action="store_true", help="count ops and FLOPs instead of printing the text")
    show.set_defaults(command=_show)

    run = commands.add_parser("run", help="run the last function on random inputs, by the reference interpreter")
    run.add_argument("file", metavar="FILE", help="IR text; - is standard input")
    run.add_argument("--ranks", action="store_true", help="run on the ranks of the mesh, all in this process, as well")
    run.add_argument("--seed", type=int, default=0, metavar="N", help="of the random inputs (default: %(default)s)")
    run.set_defaults(command=_run)

    opt = commands.add_parser(
        "opt", help="print the text after passes", epilog="`moaic opt --list` describes the passes."
    )
    opt.add_argument("file", nargs="?", metavar="FILE", help="IR text; - is standard input")
    opt.add_argument("-p", "--passes", default="", metavar="PASS,…", help="names of passes, each maybe with =OPTION")
    opt.add_argument("--list", action="store_true", help="describe every pass and do nothing")
    opt.set_defaults(command=_opt)

    capture = commands.add_parser("capture", help="write the graph of a training step as IR text")
    _add_source(capture, sequence=128)
    _add_sample(capture)
    capture.add_argument("-o", "--output", metavar="FILE", help="instead of standard output")
    capture.set_defaults(command=_capture)

    kernels = commands.add_parser("kernels", help="make the kernels of a plan for a GPU, which need not be here")
    kernels.add_argument("file", metavar="PLAN", help="IR text, a plan or its program; - is standard input")
    kernels.add_argument("--target", required=True, metavar="ARCH", help="sm_90, sm_80, gfx942 or gfx90a")
    kernels.add_argument("-o", "--output", metavar="DIR", help="write sources, binaries and the table there as well")
    kernels.set_defaults(command=_kernels)

    check = commands.add_parser("check", help="prove that plans compute what a training step says")
    _add_source(check, sequence=8)
    _add_sample(check)
    check.add_argument("--devices", default="2,4", metavar="N,…", help="of the plans (default: %(default)s)")
    check.add_argument("--all-plans", action="store_true", help="every candidate, not one of each kind")
    check.add_argument("--plan", default="", metavar="NAME=VALUE,…", help="only plans that keep to this, such as cp=2")
    check.add_argument("--workers", action="store_true", help="on real workers too, in float32 and op by op")
    check.add_argument("--compile", action="store_true", help="with --workers: what they run is compiled")
    check.set_defaults(command=_check)

    doctor = commands.add_parser(
        "doctor", help="say what is installed, found and missing, and what a first run would do"
    )
    doctor.set_defaults(command=_doctor)

    guide = commands.add_parser("guide", help="predict plan, time and memory of a model on machines of several sizes")
    _add_source(guide, sequence=2048)
    guide.add_argument("--batch", default="8", metavar="N,…", help="batch sizes (default: %(default)s)")
    guide.add_argument("--workers", metavar="N,…", help="sizes (default: 1,2,4,8, or what --machine says)")
    guide.add_argument("--plan", default="", metavar="NAME=VALUE,…", help="only plans that keep to this, such as tp=1")
    guide.add_argument(
        "--machine",
        metavar="FILE|ARCH[:N]",
        help="JSON that describes a worker, or N GPUs of a kind, such as sm_90:8; else this machine is measured",
    )
    guide.add_argument("--kernels", action="store_true", help="of GPUs: make the best plans' kernels and plan by them")
    guide.add_argument("-o", "--output", metavar="DIR", help="write the selected plans there as well")
    guide.set_defaults(command=_guide)
    return parser


def _add_source(command: argparse.ArgumentParser, sequence: int) -> None:
    """Where the step comes from."""
    command.add_argument(
        "source", metavar="SCRIPT|MODEL", help="a .py file (its own arguments behind --), a Hugging Face type or folder"
    )
    command.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="of the model's configuration"
    )
    command.add_argument("--sequence", type=int, default=sequence, metavar="N", help="tokens (default: %(default)s)")
    command.add_argument("--no-padding", action="store_true", help="rows of full length, and no attention mask")
    command.add_argument("--trust-remote-code", action="store_true", help="run the code in the model's folder")


def _add_sample(command: argparse.ArgumentParser) -> None:
    """The one batch that a step is captured with."""
    command.add_argument("--batch", type=int, default=8, metavar="N")
    command.add_argument("--inference", action="store_true", help="the forward alone, without labels")


def read(path: str) -> Module:
    """The well-formed module in a file, or in standard input for `-`."""
    return load(_text_in(path), "<stdin>" if path == "-" else path)


def _text_in(path: str) -> str:
    """What a file says, or standard input for `-`. Raises Diagnostic."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise Diagnostic(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise Diagnostic(f"cannot read {path}: it is no text ({error.reason} at byte {error.start})") from None


def _verify(chosen: argparse.Namespace) -> int:
    for path in chosen.files:
        module = read(path)
        ops = sum(len(function.ops) for function in module.functions)
        print(f"{path}: {_count(len(module.functions), 'function')}, {_count(ops, 'op')}: well formed")
    return 0


def _show(chosen: argparse.Namespace) -> int:
    module = read(chosen.file)
    if chosen.func is not None:
        print(render_function(_named(module, chosen.func), module.mesh), end="")
        return 0
    _print_comment(_summary(module))
    if chosen.stats:
        _print_comment(_op_table(module))
    else:
        print(render(module), end="")
    return 0


def _opt(chosen: argparse.Namespace) -> int:
    from moaic.passes.pass_options import usage
    from moaic.passes.registry import PASSES, run_passes

    if chosen.list:
        usages = {usage(each): each.summary for each in PASSES.values()}
        width = max(map(len, usages))
        print("\n".join(f"{text.ljust(width)}  {summary}" for text, summary in usages.items()))
    elif chosen.file is None:
        raise Diagnostic("no file is given", hint="`moaic opt FILE -p outline,dp=2`; --list describes the passes")
    else:
        print(render(run_passes(read(chosen.file), chosen.passes)), end="")
    return 0


def _run(chosen: argparse.Namespace) -> int:
    """Prints what the results are like; on ranks also how far they are from those of whole tensors."""
    module = read(chosen.file)
    if not module.functions:
        raise Diagnostic(f"{chosen.file} has no function to run")
    _check_ops(module)
    from moaic.check.distance import distance
    from moaic.runtime.interpreter import run_function, run_ranks

    inputs = _random_inputs(module.main, chosen.seed)
    if not chosen.ranks:
        print("\n".join(_result_table(module, run_function(module, module.main.name, inputs))))
        return 0
    results = run_ranks(module, inputs)
    if any(op.name in ONE_RANKS_OWN for _, op in _all_ops(module)):
        print("\n".join(_result_table(module, results)))
        return 0
    distances = list(map(distance, results, run_function(module, module.main.name, inputs)))
    print("\n".join(_result_table(module, results, distances)))
    if max(distances, default=0) <= AGREEMENT:
        return 0
    print("error: the ranks do not compute what the function says", file=sys.stderr)
    return WRONG


def _kernels(chosen: argparse.Namespace) -> int:
    from moaic.predict import kernel_report
    from moaic.predict.kernel_cache import MadeKernels
    from moaic.runtime.host.gpu_specs import target_of

    target = target_of(chosen.target)
    made = list(kernel_report.made_of(kernel_report.program_of(read(chosen.file)), target))
    MadeKernels(target, cache_folder(os.environ)).remember(each.row for each in made)
    if chosen.output is not None:
        kernel_report.save(Path(chosen.output), made, target)
    print("\n".join(kernel_report.lines([each.row for each in made])))
    return 0


def _check_ops(module: Module) -> None:
    """Raises Diagnostic for an op that is not torch's, nor ours."""
    from moaic.runtime.protocol.aten_schema import signature

    for _, op in _all_ops(module):
        if op.name not in OPS:
            try:
                signature(op.name)
            except LookupError as error:
                raise Diagnostic(str(error).replace(op.name, f"`{op.name}`")) from None


ONE_RANKS_OWN = frozenset({"moai.part", "moai.join"})
"""Ops that cut what one rank holds: a function with them says nothing of whole tensors."""

AGREEMENT = 1e-4
"""How far ranks may be from one device, in parts of the largest element: sums in float32 in another order."""


def _random_inputs(function: Function, seed: int) -> list[Tensor]:
    """A tensor per parameter; whole numbers are 0 and 1, which index anything that is worth indexing."""
    import torch

    from moaic.runtime.dtypes import DTYPES

    generator = torch.Generator().manual_seed(seed)
    inputs: list[Tensor] = []
    for index, value in enumerate(function.params):
        dtype, shape, kind = DTYPES[value.type.dtype], value.type.shape, function.param_role(index).kind
        if kind == "key":
            inputs.append(torch.randint(0, 2**31, shape, generator=generator, dtype=dtype))
        elif not dtype.is_floating_point:
            inputs.append(torch.randint(0, 2, shape, generator=generator).to(dtype))
        elif kind == "buffer":  # variances among them
            inputs.append(torch.rand(shape, generator=generator).to(dtype))
        else:
            scale = shape[-1] ** -0.5 if kind == "param" and len(shape) > 1 else 1.0
            inputs.append((torch.randn(shape, generator=generator) * scale).to(dtype))
    return inputs


def _result_table(module: Module, results: Sequence[Tensor], distances: Sequence[float] | None = None) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for index, (value, tensor) in enumerate(zip(module.main.results, results, strict=True)):
        role = module.main.result_role(index)
        name = " ".join(word for word in (role.kind, role.label or value.name or str(index)) if word)
        numbers = tensor.double().flatten()
        spread = [numbers.mean(), numbers.min(), numbers.max()] if numbers.numel() else []
        cells = [f"{number.item():.6g}" for number in spread] or ["", "", ""]
        away = [] if distances is None else [f"{distances[index]:.1e}"]
        rows.append((name, render_type(value.type, module.mesh), *cells, *away))
    head = ("result", "type", "mean", "least", "most", *([] if distances is None else ["off by"]))
    return _table(head, rows)


def _capture(chosen: argparse.Namespace) -> int:
    from moaic.capture.trace_only import take_model, take_script

    if chosen.source.endswith(".py"):
        taken = take_script(chosen.source, chosen.of_script)
    else:
        taken = take_model(*_model(chosen))
    text = render(Module((taken.captured.function,)))
    if chosen.output is None:
        print(text, end="")
    else:
        Path(chosen.output).write_text(text, encoding="utf-8")
    return 0


def _model(chosen: argparse.Namespace) -> tuple[ModelSource, Sample]:
    from moaic.capture.trace_only import Sample

    training = not chosen.inference
    return _source(chosen), Sample(chosen.batch, chosen.sequence, training=training, padding=not chosen.no_padding)


def _source(chosen: argparse.Namespace) -> ModelSource:
    from moaic.capture.trace_only import ModelSource

    return ModelSource(chosen.source, dict(map(_setting, chosen.set)), chosen.trust_remote_code)


def _guide(chosen: argparse.Namespace) -> int:
    """Prints a table in Markdown, a line as soon as it is known; of GPUs also where its numbers come from."""
    from moaic.planner.processes import ProcessPool
    from moaic.predict import gpu_machine
    from moaic.predict.guide import Estimate, answers, head, row, sources
    from moaic.runtime.host.cores import cores

    question = _question(chosen)
    found: list[Estimate] = []
    pool = ProcessPool(cores())
    try:
        for answer in answers(question, pool):
            print(row(answer, question) if found else f"{head()}\n{row(answer, question)}", flush=True)
            found.append(answer)
    finally:
        pool.close()
    if chosen.machine is not None and gpu_machine.is_target(chosen.machine):
        said = [*gpu_machine.sources(question.machine), *(sources(answer) for answer in found if not answer.reason)]
        print("\n".join(["", f"{question.machine.name}:", "", *said]))
    return 0


def _question(chosen: argparse.Namespace) -> Question:
    """What the guide was asked. Raises Diagnostic."""
    from moaic.planner.request import parse_request
    from moaic.predict import gpu_machine
    from moaic.predict.guide import WORKERS, Question
    from moaic.predict.kernel_cache import MadeKernels

    batches, request = _numbers("batch", chosen.batch), parse_request(chosen.plan)
    sizes = None if chosen.workers is None else _numbers("workers", chosen.workers)
    folder = None if chosen.output is None else Path(chosen.output)
    kernels: MadeKernels | None = None
    if chosen.machine is not None and gpu_machine.is_target(chosen.machine):
        target, gpus = gpu_machine.target_and_workers(chosen.machine)
        sizes = sizes or (WORKERS if gpus is None else [gpus])
        kernels = MadeKernels(target, cache_folder(os.environ))
        machine = gpu_machine.machine_of(target, max(sizes), kernels.known)
    elif chosen.kernels:
        raise Diagnostic("--kernels makes the kernels of GPUs", hint="name these too, such as --machine sm_90:8")
    else:
        machine = _machine(chosen.machine)
    making = kernels if chosen.kernels else None
    padding, workers = not chosen.no_padding, sizes or WORKERS
    return Question(_source(chosen), batches, chosen.sequence, machine, workers, request, padding, making, folder)


def _machine(path: str | None) -> Machine:
    """What a JSON file describes, or else this machine, measured. Raises Diagnostic."""
    if path is None:
        from moaic.compile.planning import this_machine

        return this_machine()
    from moaic.passes.perf.machine import from_text
    from moaic.runtime.host.gpu_specs import TARGETS

    if path != "-" and not Path(path).exists():
        raise Diagnostic(
            f"`{path}` is no file that describes a machine, and no GPU's name",
            hint=f"GPUs are {', '.join(TARGETS)}; eight of the first are {next(iter(TARGETS))}:8",
        )
    return from_text(_text_in(path))


def _numbers(name: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise Diagnostic(f"--{name} takes whole numbers such as 1,2,4, not `{text}`")
    return [int(word) for word in words]


def _check(chosen: argparse.Namespace) -> int:
    """Prints a verdict for each plan as soon as there is one, and how many there were."""
    from moaic.check.proof import ProofOutcome
    from moaic.check.report import Asked, Checked, VerdictTable, check, devices_from, summary
    from moaic.planner.request import parse_request

    request = parse_request(chosen.plan)
    asked = Asked(devices_from(chosen.devices), chosen.all_plans, request, chosen.workers, chosen.compile)
    step = _checked_step(chosen)
    table = VerdictTable(step, asked)
    print(table.head())
    found: list[Checked] = []
    for checked in check(step, asked):
        found.append(checked)
        print(table.line(checked), flush=True)
    print(f"\n{summary(found)}")
    search_result = {checked.verdict.fate for checked in found}
    return WRONG if ProofOutcome.FAIL in search_result or ProofOutcome.PASS not in search_result else 0


def _doctor(chosen: argparse.Namespace) -> int:
    from moaic.tools.doctor import report

    text, works = report(os.environ)
    print(text)
    return 0 if works else WRONG


def _checked_step(chosen: argparse.Namespace) -> CapturedStep:
    from moaic.capture.trace_only import take_script, take_small_model
    from moaic.check.proof import CapturedStep, step_of
    from moaic.check.report import LARGEST

    if chosen.source.endswith(".py"):
        return step_of(take_script(chosen.source, chosen.of_script))
    if not chosen.source.endswith(".moai"):
        return step_of(take_small_model(*_model(chosen), LARGEST))
    module = read(chosen.source)
    _check_ops(module)
    return CapturedStep(module, tuple(_random_inputs(module.main, 0))).cast("f64")


def _setting(text: str) -> tuple[str, object]:
    """`name=value`; the value is a Python literal, or a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise Diagnostic(f"a setting reads NAME=VALUE, not `{text}`")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def _print_comment(lines: Iterable[str]) -> None:
    """Prints lines so that whoever reads the output as IR passes over them."""
    print("\n".join(f"// {line}".rstrip() for line in lines), end="\n\n")


def _named(module: Module, name: str) -> Function:
    for function in module.functions:
        if function.name == name.removeprefix("@"):
            return function
    names = ", ".join(f"@{function.name}" for function in module.functions)
    raise Diagnostic(f"there is no function `@{name.removeprefix('@')}`", hint=f"the file has {names or 'none'}")


def _summary(module: Module) -> list[str]:
    """The whole in one line, then a line per function."""
    runs = module.runs()
    flops = {function.name: sum(map(flops_of, function.ops)) for function in module.functions}
    total = sum(runs[name] * flops[name] for name in flops)
    ops = sum(len(function.ops) for function in module.functions)
    mesh = f", mesh {module.mesh} of {_count(module.mesh.ranks, 'rank')}" if module.mesh.axes else ""
    head = f"{_count(len(module.functions), 'function')}, {_count(ops, 'op')}{mesh}, {amount(total)}FLOP a run"
    rows = [
        (
            f"@{function.name}",
            str(runs[function.name]),
            str(len(function.ops)),
            f"{amount(flops[function.name])}FLOP",
            *(f"{amount(size)}B" for size in _ends(function, module)),
        )
        for function in module.functions
    ]
    return [head, "", *_table(("function", "runs", "ops", "work", "reads", "returns"), rows)]


def _ends(function: Function, module: Module) -> tuple[int, int]:
    """Bytes of the parameters and of the results that one rank holds."""
    ends = (dict.fromkeys(function.params), dict.fromkeys(function.results))
    reads, returns = (sum(value.type.local_nbytes(module.mesh) for value in values) for values in ends)
    return reads, returns


def _op_table(module: Module) -> list[str]:
    """Ops by how much they compute, then by how often they run; those without a rule are marked."""
    runs = module.runs()
    count, work = Counter[str](), Counter[str]()
    for function, op in _all_ops(module):
        count[op.name] += runs[function.name]
        work[op.name] += runs[function.name] * flops_of(op)
    total = max(1, work.total())
    names = sorted(count, key=lambda name: (-work[name], -count[name], name))
    rows = [
        (name, str(count[name]), f"{amount(work[name])}FLOP", f"{work[name] / total:.1%}", _remark(name))
        for name in names
    ]
    return _table(("op", "runs", "work", "share", ""), rows)


def _all_ops(module: Module) -> Iterable[tuple[Function, Op]]:
    return ((function, op) for function in module.functions for op in function.ops)


def _remark(name: str) -> str:
    return "" if name in OPS else "no rule: planned whole"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(row: tuple[str, ...]) -> str:
        first, *rest = zip(row, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)])

    return [line(row) for row in (head, *rows)]


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
