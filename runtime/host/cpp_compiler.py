"""What Inductor compiles kernels for cores with: a C++ compiler, and the headers of Python."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

MEND_COMPILER = "apt-get install g++, or set CXX to a compiler, or MOAI_COMPILE=0 to do without"

MEND_HEADER = "apt-get install python3-dev"


def compiler_name(environment: Mapping[str, str]) -> str:
    """The name or path of the compiler that Inductor calls."""
    return environment.get("CXX", "g++")


def compiler_path(environment: Mapping[str, str]) -> str | None:
    """The path of that compiler; None if there is none."""
    return shutil.which(compiler_name(environment), path=environment.get("PATH"))


def python_header() -> Path:
    """The header that kernels include, which may be missing."""
    return Path(sysconfig.get_path("include")) / "Python.h"
