"""Registers `moai` as a device of PyTorch, at import or on request.

With a real accelerator in the machine a registered device would change programs that do not use it (torch prefers a
device of this kind to CUDA). There it is registered on request: by `register()`, which `torch.compile(backend="moai")`
calls, or by `model.to("moai")`. `torch.moai` exists in both cases; `torch.moreh` is its other name.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from moaic.device import torch_private
from moaic.device.collector import collect_seldom_during_import, collecting_seldom
from moaic.device.lifecycle import LIFECYCLE

OTHER_NAME: Final = "moreh"


@cache
def register() -> None:
    """Register `moai` in this process, if it is not registered yet."""
    if torch_private.renamed():
        if torch_private.backend_name() == torch_private.NAME:
            return
        raise RuntimeError(
            "device moai cannot be registered: PyTorch supports one device of its kind (PrivateUse1) per process, "
            f"and {torch_private.backend_name()} is registered"
        )
    from moaic.device import guard, import_hooks, torch_module

    LIFECYCLE.set_start(_start)
    if hasattr(torch, torch_private.NAME):
        delattr(torch, torch_private.NAME)
    other = torch.accelerator.current_accelerator()
    torch_private.register_device(torch_module, guard.Guard())
    collect_seldom_during_import("torch._dynamo")
    setattr(torch, OTHER_NAME, torch_module)
    import_hooks.install(other)


def _start() -> None:
    with collecting_seldom():
        from moaic.device import register_kernels

        register()
        register_kernels.start()


def real_accelerator() -> bool:
    """Whether the machine has an accelerator that this PyTorch can use; does not start its driver."""
    if not torch_private.compiled_for_accelerators():
        return False
    if torch.backends.mps.is_built():
        return torch.backends.mps.is_available()
    if torch.version.cuda or torch.version.hip:
        count = torch_private.cuda_devices()
        return count > 0 or (count < 0 and any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd")))
    return Path("/dev/dri").exists()


def register_on_request() -> None:
    """Register the device when a module is moved to it, or `torch.moai` is used."""
    from moaic.device import torch_module

    LIFECYCLE.set_start(_start)
    for name in (torch_private.NAME, OTHER_NAME):
        setattr(torch, name, torch_module)

    def make(real: Any) -> Any:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = args[0] if args else kwargs.get("device")
            if isinstance(wanted, str) and wanted.split(":", maxsplit=1)[0] == torch_private.NAME:
                register()
            return real(self, *args, **kwargs)

        return to

    torch_private.MODULE_TO.patch(make)
