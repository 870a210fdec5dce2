"""The user's accelerators, up to five, and the flavor selected for each, kept between programs."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.flavors import Flavor, asked_for, flavors, hosts, named, startable
from moaic.runtime.host.folders import state_folder
from moaic.text.files import write_whole

MOST_ACCELERATORS: Final = 5


@dataclass(frozen=True, slots=True)
class AcceleratorSelection:
    """The user's accelerators by number, each with its flavor's size, and the current one, which programs use."""

    current: int
    sizes: Mapping[int, str]

    def chosen(self, accelerator: int) -> str:
        """The size of an accelerator's flavor; raises Diagnostic if there is no such accelerator."""
        if accelerator not in self.sizes:
            have = ", ".join(map(str, sorted(self.sizes)))
            raise Diagnostic(
                f"there is no accelerator {accelerator}: you have {have}",
                hint="`moai-smi device --list` shows them, `moai-smi device --add` makes one more",
            )
        return self.sizes[accelerator]

    def switched(self, accelerator: int) -> AcceleratorSelection:
        """The selection with another current accelerator."""
        self.chosen(accelerator)
        return replace(self, current=accelerator)

    def with_flavor(self, accelerator: int, flavor: Flavor) -> AcceleratorSelection:
        self.chosen(accelerator)
        return replace(self, sizes={**self.sizes, accelerator: flavor.size})

    def added(self, flavor: Flavor) -> tuple[AcceleratorSelection, int]:
        """The selection with a new accelerator, and its number."""
        free = next((number for number in range(MOST_ACCELERATORS) if number not in self.sizes), None)
        if free is None:
            raise Diagnostic(
                f"you have {MOST_ACCELERATORS} accelerators, which is the limit",
                hint="`moai-smi device --rm N` removes one",
            )
        return replace(self, sizes={**self.sizes, free: flavor.size}), free

    def removed(self, accelerator: int) -> AcceleratorSelection:
        """The selection without an accelerator; if it was the current one, the first of the others becomes current."""
        self.chosen(accelerator)
        left = {number: size for number, size in self.sizes.items() if number != accelerator}
        if not left:
            raise Diagnostic(f"accelerator {accelerator} is your only one and cannot be removed")
        return AcceleratorSelection(self.current if self.current != accelerator else min(left), left)


def choice(environment: Mapping[str, str]) -> AcceleratorSelection:
    """The user's selection; by default one accelerator that takes this whole host. Raises Diagnostic."""
    path = _path(environment)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return AcceleratorSelection(
            int(data["current"]), {int(number): str(size) for number, size in data["sizes"].items()}
        )
    except FileNotFoundError:
        return AcceleratorSelection(0, {0: _whole(environment).size})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Diagnostic(
            f"{path} cannot be read: {type(error).__name__}: {error}",
            hint=f"`rm {path}` resets your accelerators and their flavors",
        ) from None


def keep(environment: Mapping[str, str], new: AcceleratorSelection) -> None:
    """Store a selection for the programs that start from now on. Raises Diagnostic."""
    path = _path(environment)
    sizes = {str(number): size for number, size in sorted(new.sizes.items())}
    try:
        write_whole(path, json.dumps({"current": new.current, "sizes": sizes}) + "\n")
    except OSError as error:
        raise Diagnostic(f"cannot write the selection to {path}: {error.strerror}") from None


def current(environment: Mapping[str, str]) -> int:
    """The number of the accelerator that a program uses: MOAI_ACCELERATOR, else the current one. Raises Diagnostic."""
    known, text = choice(environment), environment.get("MOAI_ACCELERATOR")
    if text is None:
        return known.current
    if not text.isdecimal():
        raise Diagnostic(f"MOAI_ACCELERATOR must be the number of one of your accelerators, not `{text}`")
    known.chosen(int(text))
    return int(text)


def current_flavor(environment: Mapping[str, str]) -> Flavor:
    """The flavor of the next program: MOAI_FLAVOR, a name or a number of workers, else the selected one.

    Raises Diagnostic if there is no such flavor.
    """
    if (text := environment.get("MOAI_FLAVOR")) is not None:
        return asked_for(text, environment)
    return flavor_of(choice(environment).chosen(current(environment)), flavors(environment), environment)


def flavor_of(size: str, known: Sequence[Flavor], environment: Mapping[str, str]) -> Flavor:
    """The selected flavor by its size. Raises Diagnostic if this machine does not have it any more."""
    found = named(size, known)
    if found is None:
        raise Diagnostic(
            f"this machine does not have the selected flavor `{size}`",
            hint="select another by `moai-switch-model`, or set MOAI_FLAVOR",
        )
    return startable(found, known, environment)


def next_job(environment: Mapping[str, str]) -> int:
    """A new job number: one more than the last one given to a program of this user."""
    path = _path(environment).with_name("job")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path) as text:
        number = int(text.strip()) + 1 if text.strip().isdecimal() else 1
        path.write_text(f"{number}\n", encoding="ascii")
    return number


@contextmanager
def _locked(path: Path) -> Generator[str]:
    """The text of the file, locked against other programs for the time of the context."""
    with path.open("a+", encoding="ascii") as file:
        flock(file, LOCK_EX)
        file.seek(0)
        yield file.read()


def _path(environment: Mapping[str, str]) -> Path:
    return state_folder(environment) / "accelerators.json"


def _whole(environment: Mapping[str, str]) -> Flavor:
    here, *_ = hosts(environment)
    return here.flavor(here.workers)
