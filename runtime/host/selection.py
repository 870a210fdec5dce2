"""The accelerators that a person has, up to five, and the flavor chosen for each: kept between programs."""

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
    """The person's accelerators by number, each with its flavor's size, and the one that programs take."""

    current: int
    sizes: Mapping[int, str]

    def chosen(self, accelerator: int) -> str:
        """Raises Diagnostic for one that there is not."""
        if accelerator not in self.sizes:
            have = ", ".join(map(str, sorted(self.sizes)))
            raise Diagnostic(
                f"there is no accelerator {accelerator}: you have {have}",
                hint="`moai-smi device --list` shows them, `moai-smi device --add` makes one more",
            )
        return self.sizes[accelerator]

    def switched(self, accelerator: int) -> AcceleratorSelection:
        """Another accelerator for programs to take."""
        self.chosen(accelerator)
        return replace(self, current=accelerator)

    def with_flavor(self, accelerator: int, flavor: Flavor) -> AcceleratorSelection:
        self.chosen(accelerator)
        return replace(self, sizes={**self.sizes, accelerator: flavor.size})

    def added(self, flavor: Flavor) -> tuple[AcceleratorSelection, int]:
        """One accelerator more, and its number."""
        free = next((number for number in range(MOST_ACCELERATORS) if number not in self.sizes), None)
        if free is None:
            raise Diagnostic(
                f"you have {MOST_ACCELERATORS} accelerators, which is the most",
                hint="`moai-smi device --rm N` removes one",
            )
        return replace(self, sizes={**self.sizes, free: flavor.size}), free

    def removed(self, accelerator: int) -> AcceleratorSelection:
        """One accelerator less; programs take the first of the others if it was theirs."""
        self.chosen(accelerator)
        left = {number: size for number, size in self.sizes.items() if number != accelerator}
        if not left:
            raise Diagnostic(f"accelerator {accelerator} is your only one and stays")
        return AcceleratorSelection(self.current if self.current != accelerator else min(left), left)


def choice(environment: Mapping[str, str]) -> AcceleratorSelection:
    """What the person chose; one accelerator that takes this whole host where nobody has."""
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
            hint=f"`rm {path}` forgets which flavors you chose",
        ) from None


def keep(environment: Mapping[str, str], new: AcceleratorSelection) -> None:
    """Has it hold for the programs that start from now on. Raises Diagnostic."""
    path = _path(environment)
    sizes = {str(number): size for number, size in sorted(new.sizes.items())}
    try:
        write_whole(path, json.dumps({"current": new.current, "sizes": sizes}) + "\n")
    except OSError as error:
        raise Diagnostic(f"cannot keep the choice in {path}: {error.strerror}") from None


def current(environment: Mapping[str, str]) -> int:
    """The number of the accelerator that a program takes: MOAI_ACCELERATOR, else the chosen one. Raises Diagnostic."""
    known, text = choice(environment), environment.get("MOAI_ACCELERATOR")
    if text is None:
        return known.current
    if not text.isdecimal():
        raise Diagnostic(f"MOAI_ACCELERATOR is the number of one of your accelerators, not `{text}`")
    known.chosen(int(text))
    return int(text)


def current_flavor(environment: Mapping[str, str]) -> Flavor:
    """The flavor of the next program: MOAI_FLAVOR, a name or a number of workers, else the chosen one.

    Raises Diagnostic for one that there is not.
    """
    if (text := environment.get("MOAI_FLAVOR")) is not None:
        return asked_for(text, environment)
    return flavor_of(choice(environment).chosen(current(environment)), flavors(environment))


def flavor_of(size: str, known: Sequence[Flavor]) -> Flavor:
    """The flavor that was chosen by its size. Raises Diagnostic where it is not here any more."""
    found = named(size, known)
    if found is None:
        raise Diagnostic(
            f"the chosen flavor `{size}` is not one of this machine's",
            hint="choose another by `moai-switch-model`, or set MOAI_FLAVOR",
        )
    return startable(found, known)


def next_job(environment: Mapping[str, str]) -> int:
    """A number that no other program of this person has had."""
    path = _path(environment).with_name("job")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path) as text:
        number = int(text.strip()) + 1 if text.strip().isdecimal() else 1
        path.write_text(f"{number}\n", encoding="ascii")
    return number


@contextmanager
def _locked(path: Path) -> Generator[str]:
    """What the file says, while nobody else who asks so can change it."""
    with path.open("a+", encoding="ascii") as file:
        flock(file, LOCK_EX)
        file.seek(0)
        yield file.read()


def _path(environment: Mapping[str, str]) -> Path:
    return state_folder(environment) / "accelerators.json"


def _whole(environment: Mapping[str, str]) -> Flavor:
    here, *_ = hosts(environment)
    return here.flavor(here.workers)
