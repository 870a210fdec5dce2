"""The commands and their arguments, one function for each command."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from moaic.cli import agent_command, calibrate_command, cluster_command, ir_commands, model_commands
from moaic.support import environment
from moaic.tools.command import CommandParser, existing_folder, natural, new_file, new_folder, positive

IR_FILE: Final = "IR text; - is standard input"


class _Commands(Protocol):
    """The part of argparse's subparsers that declares a command."""

    def add_parser(self, name: str, *, help: str, epilog: str | None = None) -> ArgumentParser: ...  # noqa: A002


def parser() -> ArgumentParser:
    """The parser of all commands; `command` of what it returns is the function that runs the chosen one."""
    made = CommandParser("moaic", description="Read, check, change and run programs of the moaic compiler.")
    made.add_version()
    commands = made.add_subparsers(metavar="COMMAND", required=True)
    for declare in _DECLARATIONS:
        declare(commands)
    return made


def split_script_arguments(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The arguments of moaic, and those behind `--`, which the captured script is given."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def _verify(commands: _Commands) -> None:
    command = commands.add_parser("verify", help="check that files are well formed")
    command.add_argument("files", nargs="+", metavar="FILE", help=IR_FILE)
    _runs(command, ir_commands.verify)


def _show(commands: _Commands) -> None:
    command = commands.add_parser("show", help="print a summary, then the text")
    command.add_argument("file", metavar="FILE", help=IR_FILE)
    command.add_argument("--func", metavar="NAME", help="print only this function's text")
    command.add_argument("--stats", action="store_true", help="count ops and FLOPs instead of printing the text")
    _runs(command, ir_commands.show)


def _run(commands: _Commands) -> None:
    command = commands.add_parser("run", help="run the last function on random inputs, by the reference interpreter")
    command.add_argument("file", metavar="FILE", help=IR_FILE)
    command.add_argument("--ranks", action="store_true", help="also run on the ranks of the mesh, all in this process")
    command.add_argument(
        "--seed", type=natural, default=0, metavar="N", help="seed of the inputs (default: %(default)s)"
    )
    _runs(command, ir_commands.run)


def _opt(commands: _Commands) -> None:
    epilog = "`moaic opt --list` describes the passes."
    command = commands.add_parser("opt", help="print the text after passes", epilog=epilog)
    command.add_argument("file", nargs="?", metavar="FILE", help=IR_FILE)
    command.add_argument("-p", "--passes", default="", metavar="PASS,…", help="names of passes, with =OPTION if needed")
    command.add_argument("--list", action="store_true", help="describe every pass and do nothing")
    _runs(command, ir_commands.opt)


def _capture(commands: _Commands) -> None:
    command = commands.add_parser("capture", help="write the graph of a training step as IR text")
    _add_source(command, sequence=128)
    _add_sample(command)
    command.add_argument(
        "-o", "--output", type=new_file, metavar="FILE", help="write to a file instead of standard output"
    )
    _runs_in_environment(command, model_commands.capture)


def _kernels(commands: _Commands) -> None:
    about = "make the kernels of a plan for a GPU, which need not be here"
    command = commands.add_parser("kernels", help=about)
    command.add_argument("file", metavar="PLAN", help="IR text, a plan or its program; - is standard input")
    command.add_argument("--target", required=True, metavar="ARCH", help="sm_90, sm_80, gfx942 or gfx90a")
    command.add_argument(
        "-o", "--output", type=new_folder, metavar="DIR", help="also write sources, binaries and the table there"
    )
    _runs_in_environment(command, ir_commands.kernels)


def _check(commands: _Commands) -> None:
    command = commands.add_parser("check", help="prove that plans compute what a training step says")
    _add_source(command, sequence=8)
    _add_sample(command)
    command.add_argument(
        "--devices",
        default="2,4",
        metavar="N,…",
        help="numbers of devices to plan for (default: %(default)s)",
    )
    command.add_argument("--all-plans", action="store_true", help="check every candidate, not one of each kind")
    command.add_argument("--plan", default="", metavar="NAME=VALUE,…", help="check only plans with this, such as cp=2")
    command.add_argument("--workers", action="store_true", help="also run on real workers, in float32 and op by op")
    command.add_argument("--compile", action="store_true", help="with --workers: run compiled programs there")
    _runs_in_environment(command, model_commands.check)


def _doctor(commands: _Commands) -> None:
    about = "say what is installed, found and missing, and what a first run would do"
    _runs(commands.add_parser("doctor", help=about), model_commands.doctor)


def _guide(commands: _Commands) -> None:
    about = "predict plan, time and memory of a model on machines of several sizes"
    command = commands.add_parser("guide", help=about)
    _add_model(command, sequence=2048)
    command.add_argument("--batch", default="8", metavar="N,…", help="batch sizes (default: %(default)s)")
    command.add_argument(
        "--workers", metavar="N,…", help="numbers of workers (default: 1,2,4,8, or what --machine says)"
    )
    command.add_argument("--plan", default="", metavar="NAME=VALUE,…", help="only plans with this, such as tp=1")
    command.add_argument(
        "--machine",
        metavar="NAME[:N]|FILE",
        help="a cluster such as h100:16, its file, or JSON of a worker; without it this machine is measured",
    )
    command.add_argument(
        "--kernels", action="store_true", help="with GPUs as --machine: make the best plans' kernels and plan by them"
    )
    command.add_argument("-o", "--output", type=new_folder, metavar="DIR", help="also write the selected plans there")
    _runs_in_environment(command, model_commands.guide)


def _calibrate(commands: _Commands) -> None:
    about = "measure this machine anew, and the kernels that the best plans of a step use"
    command = commands.add_parser("calibrate", help=about)
    command.add_argument("step", nargs="?", metavar="FILE", help="a captured step, as `moaic capture` writes it")
    command.add_argument("-o", "--output", type=new_file, metavar="FILE", help="write the machine there, as JSON")
    _runs_in_environment(command, calibrate_command.calibrate)


def _agent(commands: _Commands) -> None:
    about = "let programs of another host use the workers of this one"
    command = commands.add_parser("agent", help=about, epilog="The secret is read from MOAI_TOKEN or standard input.")
    command.add_argument("--connect", metavar="HOST:PORT", required=True, help="where the program listens")
    command.add_argument(
        "--host", metavar="NAME", help="this host's name in the program's cluster.toml (default: its own)"
    )
    command.add_argument(
        "--wait", type=natural, default=60, metavar="SECONDS", help="for the program (default: %(default)s)"
    )
    command.add_argument("--stay", action="store_true", help="serve one program after the other, until interrupted")
    _runs(command, agent_command.agent)


def _cluster(commands: _Commands) -> None:
    command = commands.add_parser("cluster", help="look at the hosts of cluster.toml")
    below = command.add_subparsers(metavar="COMMAND", required=True)
    about = "reach all hosts: what they are, have and lack, and the links between them"
    check = below.add_parser("check", help=about)
    check.add_argument(
        "--folder",
        type=existing_folder,
        metavar="DIR",
        help="a folder that all hosts must see, such as that of checkpoints (default: this one, which may be missing)",
    )
    check.add_argument("--json", action="store_true", help="print everything as JSON, in bytes and seconds")
    _runs_in_environment(check, cluster_command.check)


_DECLARATIONS: Final = (
    *(_verify, _show, _run, _opt, _capture, _kernels, _check, _doctor, _calibrate, _guide),
    *(_agent, _cluster),
)
"""In the order in which `moaic --help` lists them."""


def _runs(command: ArgumentParser, function: Callable[[Namespace], int]) -> None:
    command.set_defaults(command=function)


def _runs_in_environment(command: ArgumentParser, function: Callable[[Namespace], int]) -> None:
    """As `_runs`, for a command that depends on the environment: its mistakes are found first."""

    def run(chosen: Namespace) -> int:
        environment.check(os.environ)
        return function(chosen)

    _runs(command, run)


def _add_source(command: ArgumentParser, sequence: int) -> None:
    """The arguments that name a script or model; `sequence` is the default number of tokens."""
    _add_model(
        command, sequence, "SCRIPT|MODEL", "a .py file (its own arguments behind --), a Hugging Face type or folder"
    )


def _add_model(
    command: ArgumentParser, sequence: int, metavar: str = "MODEL", about: str = "a Hugging Face type or folder"
) -> None:
    command.add_argument("source", metavar=metavar, help=about)
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a value of the model's configuration; may be repeated",
    )
    command.add_argument(
        "--sequence", type=positive, default=sequence, metavar="N", help="tokens in a row (default: %(default)s)"
    )
    command.add_argument("--no-padding", action="store_true", help="rows of full length, and no attention mask")
    command.add_argument("--trust-remote-code", action="store_true", help="run the code in the model's folder")


def _add_sample(command: ArgumentParser) -> None:
    """The arguments of the one batch that a step is captured with."""
    command.add_argument(
        "--batch", type=positive, default=8, metavar="N", help="rows in the batch (default: %(default)s)"
    )
    command.add_argument("--inference", action="store_true", help="capture the forward alone, without labels")
