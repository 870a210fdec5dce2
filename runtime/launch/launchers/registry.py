"""The launcher that `cluster.toml` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from moaic.runtime.host.cluster_settings import ClusterSettings, LauncherName
from moaic.runtime.launch.launchers.connect import Connect
from moaic.runtime.launch.launchers.launcher import Launcher, Say
from moaic.runtime.launch.launchers.ray import Ray
from moaic.runtime.launch.launchers.slurm import Slurm
from moaic.runtime.launch.launchers.ssh import Ssh

LAUNCHERS: Final[Mapping[LauncherName, Callable[[ClusterSettings, Mapping[str, str], Say], Launcher]]] = {
    LauncherName.CONNECT: Connect,
    LauncherName.SSH: Ssh,
    LauncherName.RAY: Ray,
    LauncherName.SLURM: Slurm,
}


def launcher_for(settings: ClusterSettings, environment: Mapping[str, str], say: Say) -> Launcher:
    """The launcher of these settings. Raises Diagnostic for one that cannot be used here.

    `environment` is that of this program. `say` gets what the user has to do or to know.
    """
    return LAUNCHERS[settings.launcher](settings, environment, say)
