"""The entry point that `import torch` calls: registers the device `moai` lazily.

MOAI_DEVICE=1 registers the device at once, MOAI_DEVICE=0 never; without either, `moaic.device.registration` decides.
MOAI_ENABLE_ADVANCED_PARALLELIZATION=1 has the effect of `torch.moai.option.enable_advanced_parallelization()`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from moaic.device import registration, torch_private

ENABLE: Final = "MOAI_ENABLE_ADVANCED_PARALLELIZATION"


def autoload() -> None:
    """Runs at the end of `import torch`; must take far less than 50 ms and never raise."""
    wish = os.environ.get("MOAI_DEVICE", "")
    if wish == "0" or torch_private.renamed():
        return
    if wish == "1" or not registration.real_accelerator():
        registration.register()
    else:
        registration.register_on_request()
    if os.environ.get(ENABLE):
        from moaic import option

        option.enable_by_environment(os.environ[ENABLE])
    elif _script_contains(b"enable_advanced_parallelization"):
        from moaic.option.adamw_import_hook import ADAMW_IMPORT_HOOK

        ADAMW_IMPORT_HOOK.install()


def _script_contains(words: bytes) -> bool:
    """Whether the program is a script that contains `words`: its imports above that line need the hook already."""
    try:
        return words in Path(str(sys.modules["__main__"].__file__)).read_bytes()
    except (AttributeError, OSError):
        return False
