"""The start of a worker."""

from __future__ import annotations

import socket
import threading
from typing import cast

from moaic.ir.errors import Diagnostic
from moaic.runtime.comm.device_backend import DeviceBackend
from moaic.runtime.protocol.commands import AnswerCode
from moaic.runtime.protocol.frames import Connection
from moaic.runtime.protocol.wire import TENSORS
from moaic.runtime.worker import serve


class Unusable:
    def begin(self) -> None:
        raise Diagnostic("this PyTorch is of another kind", hint="take the one before")


def test_a_device_that_cannot_be_used_is_reported_with_its_reason() -> None:
    ends = socket.socketpair()
    here, there = (Connection(end, TENSORS) for end in ends)
    arguments = (cast("DeviceBackend", Unusable()), there)
    threading.Thread(target=serve._begin, args=arguments, daemon=True).start()  # pyright: ignore[reportPrivateUsage]
    _, code, line, command, kind, reason, details, *_ = here.receive().body
    assert (code, line, command, kind) == (AnswerCode.FAILED, -1, "starting", "Diagnostic")
    assert reason == "this PyTorch is of another kind"
    assert details.endswith("hint: take the one before")
    for end in ends:
        end.close()
