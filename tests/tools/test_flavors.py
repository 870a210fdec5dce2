"""The list of flavors, and that the next program has the selected one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moaic.ir.errors import Diagnostic
from moaic.runtime.controller.calibrate import memory_per_worker
from moaic.runtime.host.flavors import Host, asked_for, flavors, ladder, this_host
from moaic.runtime.host.memory import USABLE
from moaic.runtime.host.selection import AcceleratorSelection, choice, current_flavor, keep, next_job
from moaic.text.units import GIB, count

if TYPE_CHECKING:
    from tests.tools.conftest import Person


def test_the_ladder_of_a_small_host() -> None:
    names = [flavor.name for flavor in ladder(Host(cores=2, memory=24 * GIB))]
    assert names == ["Small.12GB", "Medium.24GB", "Large.24GB", "xLarge.24GB"]


def test_the_ladder_of_a_large_host() -> None:
    found = ladder(Host(cores=64, memory=512 * GIB))
    assert [flavor.name for flavor in found][:6] == [
        *("Small.64GB", "Medium.128GB", "Large.256GB", "xLarge.512GB"),
        *("1.5xLarge.512GB", "2xLarge.512GB"),
    ]
    assert [flavor.workers for flavor in found] == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]


def test_a_host_of_an_odd_size_has_a_flavor_that_takes_it_whole() -> None:
    host = Host(cores=6, memory=96 * GIB)
    assert host.flavor(6) in ladder(host)
    assert host.flavor(6).name == "0.75xLarge.96GB"


def test_a_flavor_is_asked_for_by_name_by_size_and_by_workers(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}
    known = flavors(environment)
    for text in ("medium", known[1].name, "2"):
        assert asked_for(text, environment) == known[1]
    assert asked_for("3", environment).workers == 3
    with pytest.raises(Diagnostic, match="there is no flavor `many`") as raised:
        asked_for("many", environment)
    assert known[0].name in raised.value.hint


def test_the_environment_wins_over_the_choice(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}
    assert current_flavor(environment).workers == this_host({}).workers
    keep(environment, choice(environment).with_flavor(0, asked_for("4", environment)))
    assert current_flavor(environment).size == "Large"
    assert current_flavor({**environment, "MOAI_FLAVOR": "3"}).workers == 3
    assert current_flavor({**environment, "MOAI_FLAVOR": "small"}).workers == 1


OWN = """
[[flavor]]
name = "night"
workers = 3
memory = "1.5GB"

[[flavor]]
name = "Small"
workers = 1
"""


def test_people_have_flavors_of_their_own(person: Person) -> None:
    person.flavors_file.write_text(OWN, encoding="utf-8")
    found = flavors(person.environment)
    assert [flavor.size for flavor in found][-2:] == ["night", "Small"]
    assert (found[-2].workers, found[-2].memory, found[-2].name) == (3, 3 * GIB // 2, "night.2GB")
    assert sum(flavor.size == "Small" for flavor in found) == 1


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ('[[flavor]]\nname = "a"\nworkers = = 2\n', ":3:11", "Invalid value"),
        ('[[flavor]]\nname = "a"', ":1:3", "needs workers, an integer"),
        ('[[flavor]]\nname = "a"\nworkers = "two"\n', ":3:1", "needs workers, an integer"),
        ('[[flavor]]\nname = "a"\nworkers = 1\n\n[[flavor]]\nname = "b"\nworkers = 0\n', ":7:1", "`b` needs workers"),
        ('[[flavor]]\nname = "a"\nworkers = 1\n  memory = "much"\n', ":4:3", "an amount such as"),
        ('[[flavor]]\nname = "a"\nworkers = 1\nmemory = "90TB"\n', ":4:1", "this host has"),
        ('[[flavor]]\nname = "a"\nworkers = 1\ncolour = 3\n', ":4:1", "has no `colour`"),
        ("[[flavor]]\nworkers = 1\n", ":1:3", "needs a name"),
        ("[flavour]\nworkers = 1\n", ":1:2", "`flavour` is no list of tables"),
        ("\nflavor = 3\n", ":2:1", "`flavor` is no list of tables"),
    ],
)
def test_a_broken_file_is_named_with_its_line(person: Person, text: str, place: str, message: str) -> None:
    person.flavors_file.write_text(text, encoding="utf-8")
    with pytest.raises(Diagnostic, match=message) as raised:
        flavors(person.environment)
    assert f"flavors.toml{place}: error: " in str(raised.value)


def test_up_to_five_accelerators() -> None:
    small = Host(2, 24 * GIB).flavor(1)
    have = AcceleratorSelection(0, {0: "Medium"})
    for number in range(1, 5):
        have, made = have.added(small)
        assert made == number
    with pytest.raises(Diagnostic, match="you have 5 accelerators"):
        have.added(small)
    assert have.switched(3).removed(3).current == 0
    with pytest.raises(Diagnostic, match="there is no accelerator 7: you have 0, 1, 2, 3, 4"):
        have.switched(7)
    with pytest.raises(Diagnostic, match="your only one"):
        AcceleratorSelection(0, {0: "Medium"}).removed(0)


def test_a_choice_that_cannot_be_read_says_how_to_forget_it(person: Person) -> None:
    keep(person.environment, choice(person.environment))
    path = person.home / ".local" / "state" / "moai" / "accelerators.json"
    path.write_text("{", encoding="utf-8")
    done = person.ask("switch_model", "--list")
    assert done.returncode == 2
    assert f"hint: `rm {path}`" in done.stderr


def test_jobs_are_counted(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}
    assert [next_job(environment) for _ in range(3)] == [1, 2, 3]


def test_switching_as_people_know_it(person: Person) -> None:
    known = flavors(person.environment)
    names = [flavor.name for flavor in known]
    now = current_flavor(person.environment)

    def lines(star: str) -> str:
        rows = [f"{n}. {each.name}  ({count(each.workers, 'worker')})" for n, each in enumerate(known, 1)]
        return "".join(f"{row} {' *' if each.name == star else ''}\n" for row, each in zip(rows, known, strict=True))

    done = person.ask("switch_model", typed="4\nq\n")
    prompt = f"Selection (1-{len(names)}, q, Q): "
    assert done.stdout == (
        f"Current MoAI Accelerator: {now.name}\n\n{lines(now.name)}\n{prompt}"
        f'The MoAI Accelerator flavor is successfully switched to  "{names[3]}".\n\n{lines(names[3])}\n{prompt}'
    )
    assert done.returncode == 0
    assert current_flavor(person.environment) == known[3]
    assert person.ask("switch_model", "--list").stdout == f"{lines(names[3])}\n"


def test_switching_without_a_prompt(person: Person) -> None:
    assert person.ask("switch_model", "-M", "1").returncode == 0
    assert current_flavor(person.environment).size == "Small"
    done = person.ask("switch_model", "-M", "LARGE", MOAI_FLAVOR="2")
    assert "MOAI_FLAVOR=2 is set and wins over this choice." in done.stderr
    assert current_flavor(person.environment).size == "Large"


@pytest.mark.parametrize("word", ["0", "99", "Huge"])
def test_an_unknown_flavor_is_one_message(person: Person, word: str) -> None:
    done = person.ask("switch_model", "-M", word)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: there is no flavor `{word}`\nhint: give a number from 1 to ")
    assert "Traceback" not in done.stderr
    assert not list((person.home / ".local").rglob("*.json"))


def test_a_flavor_of_another_machine_can_be_switched_away_from(person: Person) -> None:
    keep(person.environment, AcceleratorSelection(0, {0: "48xLarge"}))
    assert "48xLarge" in person.ask("smi").stdout
    with pytest.raises(Diagnostic, match="this machine does not have the selected flavor `48xLarge`"):
        current_flavor(person.environment)
    done = person.ask("switch_model", typed="1\nq\n")
    assert done.stdout.startswith("Current MoAI Accelerator: 48xLarge, which this machine does not have\n")
    assert current_flavor(person.environment).size == "Small"


def test_the_planner_plans_against_the_flavors_memory() -> None:
    host, idle = Host(cores=2, memory=24 * GIB), {"pss": GIB, "data": 0}
    half, whole, split = (memory_per_worker(host.flavor(workers), idle) for workers in (1, 2, 4))
    assert half == whole == int(USABLE * 12 * GIB) - GIB
    assert split == int(USABLE * 6 * GIB) - GIB


CHOSEN = """
import torch
from moaic.runtime.controller.session import SESSION
print(SESSION.accelerator().flavor, SESSION.flavor().name)
"""


def test_the_chosen_flavor_decides_the_workers(person: Person) -> None:
    person.ask("switch_model", "-M", "Small")
    out, _ = person.start(CHOSEN).communicate()
    assert out.split() == ["1", flavors(person.environment)[0].name]
