"""`moai-switch-model`: lists the flavors and chooses one for programs that start from now on."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.flavors import Flavor, flavors, named, startable
from moaic.runtime.host.selection import choice, current, keep
from moaic.text.units import count
from moaic.tools.command import CommandParser, answered


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    chosen = parser().parse_args(arguments)
    return answered(lambda: _run(chosen, os.environ))


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        "moai-switch-model", description="Show the flavors of the MoAI Accelerator and switch to another one."
    )
    made.add_version()
    made.add_argument("-M", "--model", metavar="N", help="switch to the flavor of this number or name, without asking")
    made.add_argument("--list", action="store_true", help="print the flavors and do nothing")
    return made


def _run(chosen: argparse.Namespace, environment: Mapping[str, str]) -> int:
    known = flavors(environment)
    if chosen.list:
        print(listed(known, _current(environment, known)))
        return 0
    if chosen.model is not None:
        print(_switched(chosen.model, known, environment))
        return 0
    now, size = _current(environment, known), choice(environment).chosen(current(environment))
    print(f"Current MoAI Accelerator: {f'{size}, which this machine does not have' if now is None else now.name}\n")
    print(listed(known, now))
    while (word := _asked(len(known))) not in ("q", "Q", ""):
        try:
            print(f"{_switched(word, known, environment)}\n")
        except Diagnostic as error:
            print(f"{error}\n")
    return 0


def listed(known: Sequence[Flavor], now: Flavor | None) -> str:
    """The numbered flavors: `3. Large.256GB  *`. The current one has a star; other hosts of a flavor are named."""
    return (
        "\n".join(f"{numbered(n, flavor)} {' *' if flavor == now else ''}" for n, flavor in enumerate(known, 1)) + "\n"
    )


def numbered(number: int, flavor: Flavor) -> str:
    """A flavor as a line of a list."""
    others = f", with {flavor.others}" if flavor.others else ""
    return f"{number}. {flavor.name}  ({count(flavor.workers, 'worker')}{others})"


def _current(environment: Mapping[str, str], known: Sequence[Flavor]) -> Flavor | None:
    """The chosen flavor; None if this machine, or the user's file, does not have it any more."""
    return named(choice(environment).chosen(current(environment)), known)


def _switched(word: str, known: Sequence[Flavor], environment: Mapping[str, str]) -> str:
    """Saves the choice and returns the text that confirms it."""
    flavor = picked(word, known)
    keep(environment, choice(environment).with_flavor(current(environment), flavor))
    if "MOAI_FLAVOR" in environment:
        print(f"MOAI_FLAVOR={environment['MOAI_FLAVOR']} is set and wins over this choice.", file=sys.stderr)
    done = f'The MoAI Accelerator flavor is successfully switched to  "{flavor.name}".'
    return f"{done}\n\n{listed(known, flavor).rstrip(chr(10))}"


def picked(word: str, known: Sequence[Flavor]) -> Flavor:
    """The flavor with this number in the list, or with this name. Raises Diagnostic."""
    is_number = word.isdecimal() and 1 <= int(word) <= len(known)
    found = known[int(word) - 1] if is_number else named(word, known)
    if found is None:
        names = ", ".join(flavor.name for flavor in known)
        raise Diagnostic(
            f"there is no flavor `{word}`", hint=f"give a number from 1 to {len(known)}, or one of {names}"
        )
    return startable(found, known, os.environ)


def _asked(count: int) -> str:
    """The user's selection; `q` at the end of the input."""
    try:
        return input(f"Selection (1-{count}, q, Q): ").strip()
    except EOFError:
        print()
        return "q"
