from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("moaic", "ir", "passes", "runtime")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

PRIVATE_DEVICE_API = re.compile(
    r"_setup_privateuseone|rename_privateuse1|_construct_storage_from_data_pointer|_swap_tensor_impl|torch\._C\._acc"
)


def sources(folder: str) -> list[Path]:
    """The Python files of one folder of the house, without what is linked into it."""
    inside = (path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)
    return sorted(path for path in inside if path.resolve() == path)


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_folder_is_in_the_package_list() -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    folders = {"moaic": "moaic", **{f"moaic.{name}": name for name in FOLDERS[1:]}}
    found = {
        ".".join((package, *path.relative_to(ROOT / folder).parent.parts))
        for package, folder in folders.items()
        for path in sources(folder)
    }
    assert sorted(setuptools["packages"]) == sorted(found)
    assert setuptools["package-dir"] == folders


@pytest.mark.parametrize("name", FOLDERS[1:])
def test_links_lead_to_the_folders(name: str) -> None:
    link = ROOT / "moaic" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"


def test_every_data_file_is_in_the_wheel() -> None:
    listed = PROJECT["tool"]["setuptools"]["package-data"]
    patterns = {(package.rpartition(".")[2], pattern) for package, found in listed.items() for pattern in found}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.resolve() == path and path.is_file() and path.suffix not in {".py", ".pyc"}:
                assert any(name == folder and path.match(pattern) for name, pattern in patterns), path


def test_entry_points_lead_somewhere() -> None:
    project = PROJECT["project"]
    for group in (project["scripts"], *project["entry-points"].values()):
        for target in group.values():
            module, _, name = target.partition(":")
            path = ROOT.joinpath(*module.split("."))
            tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, target


def test_a_class_name_means_one_thing() -> None:
    names: dict[str, list[str]] = {}
    for path in (path for folder in FOLDERS for path in sources(folder)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in names.items() if len(paths) > 1} == {}


def test_layers() -> None:
    run(sys.executable, "-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports())")


@pytest.mark.parametrize("module", ["moaic", "moaic.ir", "moaic.ir.parser", "moaic.passes", "moaic.cli"])
def test_answers_without_torch(module: str) -> None:
    environment = "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'"
    run(sys.executable, "-c", f"{environment}; import sys, {module}; assert 'torch' not in sys.modules")


def test_few_files_read_fx_and_one_writes_it() -> None:
    """In capture/fx four files know FX; the rewrites of single ops do not.

    Two others put other layers and other writes into Dynamo's graph before it is read, one cuts a graph that cannot be
    read, and one writes the IR out as FX.
    """
    users = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in sources(folder)
        if any(each.startswith("torch.fx") for each in imports(path))
    }
    assert users == {
        "moaic/capture/fx/traced_graph.py",
        "moaic/capture/fx/reader.py",
        "moaic/capture/fx/assemble.py",
        "moaic/capture/fx/stubs.py",
        "moaic/capture/float8.py",
        "moaic/capture/before_autograd.py",
        "moaic/capture/op_by_op.py",
        "runtime/codegen/lower_to_fx.py",
    }


def test_one_file_touches_the_private_device_api() -> None:
    users = [path for folder in FOLDERS for path in sources(folder) if PRIVATE_DEVICE_API.search(path.read_text())]
    assert len(users) <= 1, users


def test_nothing_that_is_read_is_unpickled_or_evaluated() -> None:
    """SECURITY.md promises it. Scripts of the user are run by runpy, which is what they are for."""
    for path in (path for folder in FOLDERS for path in sources(folder)):
        assert not {"pickle", "marshal", "shelve", "dill", "joblib"} & set(imports(path)), path
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        for call in calls:
            called = ast.unparse(call.func)
            assert called not in {"eval", "exec", "__import__"}, f"{path}:{call.lineno}"
            if called == "torch.load":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                assert given.get("weights_only") == "True", f"{path}:{call.lineno}"


def names_of(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[<>=\[]", requirement)[0] for requirement in requirements}


def test_every_import_is_a_declared_dependency_and_the_other_way_round() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    declared = names_of([*PROJECT["project"]["dependencies"], *extras["hf"]])
    distributions = metadata.packages_distributions()
    files = [path for folder in (*FOLDERS, "examples", "tutorial") for path in sources(folder)]
    imported = {name.partition(".")[0] for path in files for name in imports(path)}
    scripts = {path.stem for folder in ("examples", "tutorial") for path in sources(folder)}
    foreign = imported - set(sys.stdlib_module_names) - scripts - {"moaic"}
    needed = {distributions.get(name, [name])[0] for name in foreign}
    assert (
        declared
        <= needed
        <= declared | names_of([*extras["ecosystem"], *extras["gpu"], *extras["float8"], *extras["cluster"]])
    )


def test_every_dependency_is_pinned() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {line.partition("==")[0].lower() for line in pins.splitlines() if "==" in line and line[0] != "#"}
    project = PROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(name for group in project["optional-dependencies"].values() for name in group),
    ]
    assert names_of(wanted) - {"moaic"} <= pinned


def test_readme_names_commands_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md", ".ci/run"):
        named = set(re.findall(r"(?:^|`)make ([a-z]+)\b", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE))
        assert named <= targets, page


def test_pages_name_files_that_exist() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in re.findall(r"`((?:moaic|ir|passes|runtime|tests|bench|examples)/[\w./]*)`", text):
            assert (ROOT / name).exists(), f"{page} names {name}"


def test_nothing_ignored_is_committed() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert run("git", "ls-files", "--cached", "--ignored", "--exclude-standard") == ""
