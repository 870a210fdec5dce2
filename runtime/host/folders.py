"""The user's folders for configuration, state, and running programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from moaic.ir.errors import Diagnostic

FOLDER: Final = "moai"
PRIVATE: Final = 0o700


def config_folder(environment: Mapping[str, str]) -> Path:
    """The folder of the files that the user writes: `flavors.toml`, `cluster.toml`."""
    return _below(environment, "XDG_CONFIG_HOME", ".config")


def cluster_file(environment: Mapping[str, str]) -> Path:
    """The user's list of hosts, which need not exist."""
    return config_folder(environment) / "cluster.toml"


def state_folder(environment: Mapping[str, str]) -> Path:
    """The folder of the state kept between programs: chosen flavors, the last job's number."""
    return _below(environment, "XDG_STATE_HOME", ".local/state")


def runtime_folder(environment: Mapping[str, str]) -> Path:
    """The folder of the entries of running programs, readable by the user alone; made if missing. Raises Diagnostic."""
    base = environment.get("XDG_RUNTIME_DIR")
    usable = base and os.access(base, os.W_OK)
    temporary = Path(environment.get("TMPDIR") or "/tmp")
    folder = Path(base) / FOLDER if base and usable else temporary / f"{FOLDER}-{os.getuid()}"
    try:
        folder.mkdir(mode=PRIVATE, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise Diagnostic(
            f"cannot make the folder {folder}: {error.strerror}", hint="set XDG_RUNTIME_DIR to a folder of your own"
        ) from None
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not folder.is_dir() or folder.is_symlink():
        raise Diagnostic(
            f"{folder} is not a private folder of yours",
            hint=f"`ls -ld {folder}` shows whose it is; set XDG_RUNTIME_DIR to a folder of your own",
        )
    return folder


def _below(environment: Mapping[str, str], variable: str, usual: str) -> Path:
    """The folder that the variable names, else the usual one in HOME, else one in the runtime folder."""
    if base := environment.get(variable):
        return Path(base) / FOLDER
    if home := environment.get("HOME"):
        return Path(home) / usual / FOLDER
    return runtime_folder(environment) / Path(usual).name
