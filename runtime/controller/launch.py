"""The workers of an accelerator: those of this host, or of the hosts of a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from moaic.runtime.controller import startup_log
from moaic.runtime.host.cluster_settings import cluster_settings
from moaic.runtime.host.flavors import Flavor
from moaic.runtime.host.folders import cluster_file
from moaic.runtime.launch.channel import Workers
from moaic.runtime.launch.hosts import start_cluster
from moaic.runtime.launch.local_workers import LocalWorkers, start
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.wire import TENSORS


def launch(
    count: int,
    environment: Mapping[str, str] | None = None,
    *,
    devices: Sequence[str] = (),
    carrier: Carrier | None = None,
) -> LocalWorkers[Tensor]:
    """Start `count` workers of this host and return at once, as `local_workers.start` does."""
    return start(count, TENSORS, environment, devices=devices, carrier=carrier)


FOR_ALL_HOSTS: Final = "MOAI_"
"""Beginning of the names of the variables that workers of other hosts get, too."""

OF_THIS_HOST: Final = frozenset({"MOAI_TOKEN", "MOAI_FLAVOR", "MOAI_ACCELERATOR"})
"""Those among them that they do not get."""


def launch_flavor(flavor: Flavor) -> Workers[Tensor]:
    """Start the workers of a flavor, on all its hosts. Raises Diagnostic for a host that cannot be used."""
    settings = cluster_settings(cluster_file(os.environ)) if flavor.hosts else None
    if settings is None:
        return launch(flavor.workers, devices=flavor.devices)
    environment = {
        name: value for name, value in os.environ.items() if name.startswith(FOR_ALL_HOSTS) and name not in OF_THIS_HOST
    }
    return start_cluster(flavor, settings, TENSORS, environment, startup_log.about_hosts)
