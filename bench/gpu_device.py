"""The machine of `bench/gpu.py` as one JSON object, from a process of its own, so that no GPU memory stays in use."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Any, cast

import torch

PACKAGES = ("triton", "transformers", "liger-kernel", "moaic")


def versions() -> dict[str, str]:
    """Of what figures depend on; without what is not installed."""
    # As PyTorch says it itself, with what it was built for.
    found: dict[str, str] = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    drivers = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return found | {name: version for name, version in drivers.items() if version}


def gpu() -> dict[str, object] | None:
    """The first GPU; None where this PyTorch can use none."""
    if not torch.cuda.is_available():
        return None
    properties = cast("Any", torch.cuda.get_device_properties(0))
    return {"name": str(properties.name), "memory_bytes": int(properties.total_memory)}


def main() -> None:
    print(json.dumps({"gpu": gpu(), "versions": versions()}))


if __name__ == "__main__":
    main()
