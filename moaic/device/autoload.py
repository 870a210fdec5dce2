"""The entry point that `import torch` calls: makes `moai` a device, without doing anything for it yet.

Where a real accelerator exists even the name would be visible (torch lets a device of this kind win over CUDA), so
there the name is given only when the program asks for it: through `register()`, which `import moaic` and
`torch.compile(backend="moai")` may call, by `model.to("moai")`, or with MOAI_DEVICE=1 in the environment.
MOAI_DEVICE=0 keeps the device out altogether.

`torch.moai` can be asked all the same, and `torch.moreh` is its other name. With
MOAI_ENABLE_ADVANCED_PARALLELIZATION=1 the program runs as if it had said the line
`torch.moai.option.enable_advanced_parallelization()`.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from moaic.device import torch_private


def autoload() -> None:
    """Called at the end of `import torch`. Must stay far below 50 ms and never raise."""
    wish = os.environ.get("MOAI_DEVICE", "")
    if wish == "0" or torch_private.renamed():
        return
    if wish == "1" or not real_accelerator():
        register()
    else:
        _register_on_request()
    if os.environ.get(ENABLE):
        from moaic import option

        option.enable_by_environment(os.environ[ENABLE])
    elif _script_says(b"enable_advanced_parallelization"):
        from moaic.option.import_transformers import SUPPLY

        SUPPLY.install()


ENABLE: Final = "MOAI_ENABLE_ADVANCED_PARALLELIZATION"
OTHER_NAME: Final = "moreh"


@cache
def register() -> None:
    """Make `moai` a device of this process; harmless when it is one already."""
    if torch_private.renamed():
        if torch_private.backend_name() == torch_private.NAME:
            return
        raise RuntimeError(
            f"device moai cannot be registered: PyTorch has room for one device of its kind and "
            f"{torch_private.backend_name()} has taken it"
        )
    from moaic.device import guard, import_hooks, torch_module

    if hasattr(torch, torch_private.NAME):
        delattr(torch, torch_private.NAME)
    other = torch.accelerator.current_accelerator()
    torch_private.register_device(torch_module, guard.Guard())
    setattr(torch, OTHER_NAME, torch_module)
    import_hooks.install(other)


def real_accelerator() -> bool:
    """Whether the machine has an accelerator that this PyTorch could use, asked without starting its driver."""
    if not torch_private.compiled_for_accelerators():
        return False
    if torch.backends.mps.is_built():
        return torch.backends.mps.is_available()
    if torch.version.cuda or torch.version.hip:
        count = torch_private.cuda_devices()
        return count > 0 or (count < 0 and any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd")))
    return Path("/dev/dri").exists()


def _register_on_request() -> None:
    """Give the device its name when a module is moved to it, or `torch.moai` is used."""
    from moaic.device import torch_module

    for name in (torch_private.NAME, OTHER_NAME):
        setattr(torch, name, torch_module)

    def make(real: Any) -> Any:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = args[0] if args else kwargs.get("device")
            if isinstance(wanted, str) and wanted.split(":", maxsplit=1)[0] == torch_private.NAME:
                register()
            return real(self, *args, **kwargs)

        return to

    torch_private.MODULE_TO.take_over(make)


def _script_says(words: bytes) -> bool:
    """Whether the program is a script with these words: what it imports above that line is needed before it."""
    try:
        return words in Path(str(sys.modules["__main__"].__file__)).read_bytes()
    except (AttributeError, OSError):
        return False
