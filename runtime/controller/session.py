"""The process-wide accelerator: made at its first use, ended with the process."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.ir.layout import Mesh
from moaic.runtime.controller import startup_log
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.early_workers import EarlyWorkers
from moaic.runtime.controller.idle_threads import let_sleep
from moaic.runtime.controller.launch import launch_flavor
from moaic.runtime.host.flavors import Flavor, asked_for
from moaic.runtime.host.gpu_specs import target_of
from moaic.runtime.host.gpus import usable
from moaic.runtime.host.jobs import UNUSED, Job, begin, jobs
from moaic.runtime.host.selection import current, current_flavor
from moaic.runtime.host.worker_kinds import emulated_target

VISIBILITY_VARIABLES: Final = frozenset({"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"})
"""Variables that select visible GPUs; they have no effect on a host without GPUs."""


class Session:
    """The accelerator of this process, its flavor, and its entry as a job in the list of moai-smi."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accelerator: Accelerator | None = None
        self._flavor: Flavor | None = None
        self._job: Job | None = None
        self._is_forked = False
        self._is_watched = False
        self._phase = ""
        self._early = EarlyWorkers()

    def accelerator(self) -> Accelerator:
        """The accelerator; workers start with the first call. Raises Diagnostic in a forked child."""
        if self._is_forked:
            raise Diagnostic(
                "this process was forked from one that uses the accelerator, whose workers are the parent's alone",
                hint="use the accelerator in the main process, and plain CPU tensors in loader processes",
            )
        with self._lock:
            if self._accelerator is None:
                self._start()
            assert self._accelerator is not None
            return self._accelerator

    def expect(self) -> None:
        """Start workers for an accelerator that is likely to be used; a flavor that is none is an error at its use."""
        with self._lock, suppress(Diagnostic):
            if self._accelerator is None and not self.flavor().hosts:
                self._early.start(self.flavor())
                if self._early.is_started():
                    self._show_unused()

    def expect_nothing(self) -> None:
        """End the workers that `expect` started and nobody has used."""
        with self._lock:
            self._early.discard()
            self._end_unused()

    def _show_unused(self) -> None:
        """List this program in moai-smi, because it has workers."""
        self._watch()
        number, flavor = current(os.environ), self.flavor()
        if self._job is None or not self._job.is_of(number, flavor):
            self._end_unused()
            # The first use tells why it cannot be listed.
            with suppress(OSError):
                self._job = begin(os.environ, number, flavor)
            self._publish_phase()

    def _end_unused(self) -> None:
        if self._job is not None and self._accelerator is None:
            self._job.close()
            self._job = None

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            atexit.register(self._end_unused)
            os.register_at_fork(after_in_child=self._forked)

    def is_running(self) -> bool:
        return self._accelerator is not None

    def flavor(self) -> Flavor:
        """The flavor of the accelerator, or of the next one. Raises Diagnostic for the name of an unknown flavor."""
        return current_flavor(os.environ) if self._flavor is None else self._flavor

    def set_flavor(self, flavor: int | str) -> None:
        """Choose a flavor or a number of workers. Raises Diagnostic once workers of another flavor run."""
        wanted = asked_for(str(flavor), os.environ)
        if self._accelerator is not None and wanted != self._flavor:
            raise Diagnostic(
                f"the accelerator already runs with {self._accelerator.flavor} workers",
                hint="call torch.moai.set_flavor before the device is first used, or set MOAI_FLAVOR",
            )
        self._flavor = wanted
        if self._early.is_started():
            self.expect()

    def planned(self, plan: str, mesh: Mesh) -> None:
        """Publish the plan of the last planned model to moai-smi."""
        if self._job is not None:
            self._job.planned(plan, mesh.axes)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Publish to moai-smi what the program does in this block; phases may be nested."""
        before, self._phase = self._phase, name
        self._publish_phase()
        try:
            yield
        finally:
            self._phase = before
            self._publish_phase()

    def _publish_phase(self) -> None:
        if self._job is not None:
            self._job.entered(self._phase or (UNUSED if self._accelerator is None else ""))

    def close(self) -> None:
        """End the workers, if there are any; tensors of the device are lost."""
        if self._accelerator is not None and not self._is_forked:
            self._accelerator.close()
            if self._job is not None:
                self._job.close()

    def _start(self) -> None:
        startup_log.requesting()
        for variable in () if usable({}) else VISIBILITY_VARIABLES & os.environ.keys():
            startup_log.without_effect(variable, os.environ[variable])
        flavor = self._flavor = self.flavor()
        if (target := emulated_target(flavor.device)) is not None:
            startup_log.interpreted(target_of(target).device, target)
        self._job = _begun(flavor, self._job)
        workers = self._early.take(flavor) or launch_flavor(flavor)
        startup_log.initializing()
        accelerator = self._accelerator = Accelerator(workers)
        if not flavor.gpus:
            let_sleep()
        self._publish_phase()
        atexit.register(self.close)
        self._watch()
        startup_log.follow(accelerator, self._job.number if self._job else None, self._ready)

    def _ready(self, pids: list[int]) -> None:
        if self._job is not None and self._accelerator is not None:
            self._job.started(pids, self._accelerator.status_descriptor, self._accelerator.hosts)

    def _forked(self) -> None:
        self._lock = threading.Lock()
        if self._job is not None:
            self._job.abandon()
        if self._accelerator is None:
            self._job = None
            return
        self._is_forked = True
        self._accelerator.abandon()


def _begun(flavor: Flavor, unused: Job | None) -> Job | None:
    """This program as a job, which may be `unused`; None if it cannot be registered: training works without."""
    number = current(os.environ)
    try:
        for other in jobs(os.environ):
            if other.accelerator == number and other.pid != os.getpid() and other.phase != UNUSED:
                startup_log.shared_with(other.job, other.command, other.pid, number)
        if unused is not None and unused.is_of(number, flavor):
            return unused
        if unused is not None:
            unused.close()
        return begin(os.environ, number, flavor)
    except (OSError, Diagnostic) as error:
        startup_log.untracked(error)
        return None


SESSION: Final = Session()


def accelerator() -> Accelerator:
    """The accelerator of this process; workers start with the first call."""
    return SESSION.accelerator()
