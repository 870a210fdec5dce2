"""A sample of `make opinfo`: cases of every area that were wrong before, or crashed the workers."""

from __future__ import annotations

import pytest

from tests.opinfo.areas import AREAS
from tests.opinfo.record import Outcome
from tests.opinfo.worker import outcome_of

pytestmark = [pytest.mark.filterwarnings("ignore")]

CASES = {
    "forward": ("view_as_real", "native_batch_norm", "nn_functional_multilabel_margin_loss"),
    "backward": ("nn_functional_scaled_dot_product_attention", "linalg_solve"),
    "strided": ("nn_functional_group_norm", "nn_functional_dropout"),
    "in place": ("masked_scatter",),
    "out=": ("linalg_qr", "fft_fft", "index_copy"),
    "dp=2": ("nn_functional_avg_pool2d",),
}


@pytest.mark.parametrize(("area", "name"), [(area, name) for area, names in CASES.items() for name in names])
def test_the_database_of_pytorch(area: str, name: str) -> None:
    outcomes = [outcome_of(run) for run in AREAS[area].samples(name)]
    assert outcomes
    assert all(outcome in (Outcome.RIGHT, Outcome.ABSENT) for outcome, _ in outcomes), outcomes
