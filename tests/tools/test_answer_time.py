"""How much `moai-smi` computes for an answer: with no test beside it, whose use of caches would count, too."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.tools.conftest import Person


def test_answers_without_torch_and_at_once(person: Person) -> None:
    """Twenty times, in processor time: how long it takes beside others is not the tool's to say."""
    heavy = "{'torch', 'rich', 'numpy', 'tomllib'}"
    code = f"import sys; from moaic.tools.smi import main; main([]); assert not {heavy} & {{*sys.modules}}"
    spent: list[float] = []
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], env=person.environment, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert sorted(spent)[18] < 0.24
