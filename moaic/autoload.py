"""The entry point that `import torch` calls: makes `moai` a device, without doing anything for it yet.

MOAI_DEVICE=1 gives the device its name at once, MOAI_DEVICE=0 keeps it out altogether; without either,
`moaic.device.registration` says when. With MOAI_ENABLE_ADVANCED_PARALLELIZATION=1 the program runs as if it had said
the line `torch.moai.option.enable_advanced_parallelization()`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from moaic.device import registration, torch_private

ENABLE: Final = "MOAI_ENABLE_ADVANCED_PARALLELIZATION"


def autoload() -> None:
    """Called at the end of `import torch`. Must stay far below 50 ms and never raise."""
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
    elif _script_says(b"enable_advanced_parallelization"):
        from moaic.option.import_transformers import SUPPLY

        SUPPLY.install()


def _script_says(words: bytes) -> bool:
    """Whether the program is a script with these words: what it imports above that line is needed before it."""
    try:
        return words in Path(str(sys.modules["__main__"].__file__)).read_bytes()
    except (AttributeError, OSError):
        return False
