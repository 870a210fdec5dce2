"""The cost and the effects of `import torch`, in new processes: none, until the device is used."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moaic.device import registration

ROOT = Path(__file__).resolve().parents[1]


def run(program: str, **environment: str) -> str:
    """What the program prints; `import torch` does not load the device by itself in it, and nothing is compiled."""
    ours = {"PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "MOAI_COMPILE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **ours, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LOOK = """
import sys, warnings
import torch
{load}
from torch.utils.data import DataLoader
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    list(DataLoader(torch.arange(4.0), pin_memory=True))
torch.manual_seed(0)
print([str(w.message) for w in caught], torch.rand(2).tolist())
print(torch.accelerator.current_accelerator(), torch.accelerator.current_accelerator(check_available=True))
print(torch.accelerator.is_available(), torch.accelerator.device_count())
print(torch._C._get_accelerator(), torch._utils._get_available_device_type())
print(torch.nn.DataParallel(torch.nn.Linear(2, 2)).module.weight.device, torch.get_device_module().__name__)
model = torch.nn.Linear(2, 2).half().float()
model(torch.ones(1, 2)).sum().backward()
print(model.weight.grad.tolist(), torch.empty(2).untyped_storage().nbytes())
assert not any(name.startswith("moaic.runtime") for name in sys.modules)
"""


def test_unused_it_changes_nothing() -> None:
    without = run(LOOK.format(load=""))
    assert run(LOOK.format(load="from moaic.autoload import autoload; autoload()")) == without


def test_it_adds_little_to_import_torch() -> None:
    program = """
import time
import torch
begin = time.process_time()
from moaic.autoload import autoload
autoload()
print(time.process_time() - begin)
"""
    assert any(float(run(program)) < 0.03 for _ in range(3))


USE = """
import torch
from moaic import autoload
from moaic.device import registration
{before}
autoload.autoload()
{after}
"""


def test_beside_a_real_accelerator_the_name_waits() -> None:
    program = USE.format(
        before="registration.real_accelerator = lambda: True",
        after="""
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
model = torch.nn.Linear(2, 2)
model.to("cpu")
assert torch.moai.device_count() == 1 and not torch.moai.is_initialized()
torch.moai.synchronize()
torch.moai.reset_peak_memory_stats()
assert torch.moai.memory_allocated() == 0 and not torch.moai.memory_stats()
assert not torch.moai.is_initialized()
assert torch._C._get_privateuse1_backend_name() == "privateuseone"
model.to("moai")
print(model.weight.device, torch.moai.device_count())
""",
    )
    assert run(program) == "moai:0 1"


def test_beside_a_real_accelerator_the_one_line_may_be_the_first() -> None:
    program = USE.format(
        before="registration.real_accelerator = lambda: True",
        after="""
torch.moreh.option.enable_advanced_parallelization()
print(torch.ones(2).cuda().device, torch.moreh is torch.moai)
""",
    )
    assert run(program, MOAI_FLAVOR="1") == "moai:0 True"


def test_the_environment_decides() -> None:
    show = USE.format(before="registration.real_accelerator = lambda: {real}", after="print(hasattr(torch, 'moai'))")
    assert run(show.format(real=True), MOAI_DEVICE="1") == "True"
    assert run(show.format(real=False), MOAI_DEVICE="0") == "False"


def test_another_device_of_its_kind_is_left_alone() -> None:
    program = USE.format(
        before='torch.utils.rename_privateuse1_backend("other")',
        after="""
try:
    registration.register()
except RuntimeError as error:
    print(error)
""",
    )
    assert "and other is registered" in run(program)


def test_a_process_ends_well_right_after_backward() -> None:
    program = USE.format(
        before="",
        after="""
x = torch.ones(3, device="moai", requires_grad=True)
(x * 2).sum().backward()
print(x.grad.tolist())
""",
    )
    assert run(program, MOAI_FLAVOR="1") == "[2.0, 2.0, 2.0]"


def test_threads_may_be_the_first_to_use_it_together() -> None:
    program = USE.format(
        before="import threading",
        after="""
together, found = threading.Barrier(3), []

def work():
    together.wait()
    found.append((torch.ones(2, device="moai") + 1).sum().item())

threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(found)
""",
    )
    assert run(program, MOAI_FLAVOR="1") == "[4.0, 4.0, 4.0]"


def test_a_process_forked_before_it_is_used_may_use_it() -> None:
    program = USE.format(
        before="import os",
        after="""
torch.moai.set_flavor(1)
child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    x = torch.ones(2, device="moai") + 1
    print(x.tolist(), torch.moai.memory_allocated())
""",
    )
    assert run(program, MOAI_FLAVOR="2") == "[2.0, 2.0] 8"


NODES = ("/dev/nvidiactl", "/dev/kfd")


def test_what_a_pytorch_for_gpus_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for CPUs is told that it was built for others; whether there is a GPU it asks the machine."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert registration.real_accelerator() == any(Path(node).exists() for node in NODES)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not registration.real_accelerator()
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "xpu", "20250000")
    assert registration.real_accelerator() == Path("/dev/dri").exists()
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    assert registration.real_accelerator() == torch.backends.mps.is_available()


def test_a_module_loaded_anew_finds_the_device_in_place() -> None:
    """As notebooks do with what was edited."""
    registration.register()
    importlib.reload(registration).register()
    assert torch.get_device_module("moai").device_count() == 1


def test_loaders_fork_while_the_device_is_in_use() -> None:
    program = USE.format(
        before="from torch.utils.data import DataLoader",
        after="""
x = torch.ones(3, device="moai") + 1
loader = DataLoader(torch.arange(4.0), batch_size=2, num_workers=2, multiprocessing_context="fork")
print([batch.to("moai").sum().item() for batch in loader], x.sum().item())
""",
    )
    assert run(program, MOAI_FLAVOR="1") == "[1.0, 5.0] 6.0"
