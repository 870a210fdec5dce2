"""The mode itself: on, it holds what puts everything back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moaic.device import torch_private
from moaic.device.lifecycle import LIFECYCLE
from moaic.device.registration import register
from moaic.option import calls
from moaic.option.compile_modules import AutoCompile, CompiledCall
from moaic.option.import_transformers import SUPPLY
from moaic.options import Choices


class Mode:
    """Whether "cuda" means the accelerator in this process."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def enable(self, choices: Choices) -> None:
        """Map every call; with new choices where it was on before."""
        self.disable()
        register()
        LIFECYCLE.ensure_started()
        torch_private.read_tables_of_functions()
        torch_private.pass_over(AutoCompile.__get__)
        torch_private.pass_over(CompiledCall.__call__)
        auto_compile = AutoCompile(choices)
        self._undo.append(auto_compile.release)
        for mapping in calls.mappings(auto_compile):
            self._undo.append(mapping.seam.take_over(mapping.make))
            torch_private.pass_over(getattr(mapping.seam.owner, mapping.seam.name))
        SUPPLY.install()
        self._undo.append(SUPPLY.remove)

    def disable(self) -> None:
        """Put everything back, the last first."""
        while self._undo:
            self._undo.pop()()


MODE: Final = Mode()
