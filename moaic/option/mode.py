"""The mode of `enable_advanced_parallelization`: installs all mappings and undoes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moaic.device import torch_private
from moaic.device.lifecycle import LIFECYCLE
from moaic.device.registration import register
from moaic.option import calls
from moaic.option.adamw_import_hook import ADAMW_IMPORT_HOOK
from moaic.option.compile_modules import AutoCompile, CompiledCall
from moaic.options import Choices


class Mode:
    """Whether "cuda" means the accelerator in this process."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def enable(self, choices: Choices) -> None:
        """Installs every mapping, with new choices if the mode is on already."""
        self.disable()
        register()
        LIFECYCLE.ensure_started()
        torch_private.read_tables_of_functions()
        torch_private.pass_over(AutoCompile.__get__)
        torch_private.pass_over(CompiledCall.__call__)
        self._undo.append(torch_private.watch_hooks())
        self._undo.append(torch_private.hush_warnings())
        auto_compile = AutoCompile(choices)
        self._undo.append(auto_compile.release)
        for mapping in calls.mappings(auto_compile):
            real = getattr(mapping.point.owner, mapping.point.name)
            self._undo.append(mapping.point.patch(mapping.make))
            ours = getattr(mapping.point.owner, mapping.point.name)
            self._undo.append(torch_private.script_as(ours, real))
            torch_private.pass_over(ours)
        ADAMW_IMPORT_HOOK.install()
        self._undo.append(ADAMW_IMPORT_HOOK.remove)

    def disable(self) -> None:
        """Undoes every mapping, the last first."""
        while self._undo:
            self._undo.pop()()


MODE: Final = Mode()
