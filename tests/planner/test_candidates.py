from __future__ import annotations

from contextlib import suppress
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moaic.ir.errors import Diagnostic
from moaic.ir.verify import load
from moaic.passes.config import Config, Request, simplicity
from moaic.planner.candidates import candidate_space, candidates, relaxed
from moaic.planner.request import parse_request
from tests.passes.steps import dense, evaluation


def test_one_worker_has_no_mesh_and_no_distribution() -> None:
    found = candidates(dense(), 1, Request(recompute="saved"))
    assert found == [Config(micro_batches=n) for n in (1, 2, 4, 8)]


def test_two_workers_take_every_mesh_and_level() -> None:
    found = candidates(dense(), 2, Request(micro_batches=1, recompute="saved"))
    levels = [Config(dp=2, distribute_param=level) for level in ("none", "optimizer", "step", "use")]
    assert sorted(found) == sorted([Config(), Config(tp=2), *levels])


def test_all_on_one_device_and_simple_plans_come_first() -> None:
    found = candidates(dense(), 4, Request())
    assert found[0] == Config()
    assert found == sorted(found, key=simplicity)
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    "asked", ["", "dp=2", "pp=2", "micro_batches=4", "distribute_param=use", "recompute=full,cp=2"]
)
def test_the_candidates_on_a_mesh_are_known_without_listing_them(asked: str) -> None:
    space = candidate_space(dense(), 4, parse_request(asked))
    for mesh in space.meshes:
        listed = space.on(mesh)
        assert (space.simplest(mesh), space.count(mesh)) == (listed[0], len(listed))
        fewer = space.without(listed[:1])
        assert (mesh in fewer.meshes) == (len(listed) > 1)
        assert fewer.count(mesh) == len(listed) - 1
        assert len(listed) == 1 or fewer.simplest(mesh) == listed[1]
    assert space.total == len(candidates(dense(), 4, parse_request(asked)))


def test_meshes_of_fewer_ranks_than_workers_are_among_them() -> None:
    found = candidates(dense(), 6, Request(recompute="saved", distribute_param="none", micro_batches=1))
    assert {(config.dp, config.tp) for config in found} == {
        *((1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6)),
        *((2, 1), (2, 2), (2, 3)),
        *((3, 1), (3, 2)),
        (4, 1),
    }


def test_micro_batches_divide_what_a_rank_has() -> None:
    found = candidates(dense(rows=12), 2, Request(dp=2, recompute="saved", distribute_param="none"))
    assert [config.micro_batches for config in found] == [1, 2, 3, 6]


@pytest.mark.parametrize("rows", [5, 6, 9, 17, 100, 2048, 4096])
@pytest.mark.parametrize("workers", [1, 4])
def test_some_micro_batches_have_few_rows_whatever_the_batch(rows: int, workers: int) -> None:
    """What fits of a small batch fits of any: more rows do not need a plan that computes twice."""
    found = candidates(dense(rows=rows * workers), workers, Request(dp=workers, recompute="saved"))
    assert {1, 2} <= {ceil(rows / config.micro_batches) for config in found}


def test_more_micro_batches_than_anybody_wants_are_made_only_if_asked_for() -> None:
    found = candidates(dense(rows=4096), 1, Request(recompute="saved"))
    assert [config.micro_batches for config in found] == [1, 2, 4, 8, 16, 32, 64, 1024, 2048, 4096]
    found = candidates(dense(rows=4096), 2, Request(pp=2, schedule="1f1b", recompute="saved"))
    assert [config.micro_batches for config in found] == [1, 2, 4, 8, 16, 32, 64]
    assert candidates(dense(rows=4096), 1, Request(micro_batches=128, recompute="saved")) == [Config(micro_batches=128)]


def test_evaluation_has_nothing_to_recompute_or_to_distribute() -> None:
    found = candidates(evaluation(), 2, Request(micro_batches=1))
    assert sorted(found) == sorted([Config(), Config(dp=2), Config(tp=2)])


def test_evaluation_keeps_to_the_level_of_training() -> None:
    found = candidates(evaluation(), 2, Request(distribute_param="step"))
    assert {(config.dp, config.distribute_param) for config in found} == {(1, "none"), (2, "step")}


def test_a_request_for_everything_leaves_one() -> None:
    request = parse_request("dp=2,tp=2,micro_batches=2,recompute=full,distribute_param=use")
    assert candidates(dense(), 4, request) == [Config(2, 2, 2, "full", "use")]


@pytest.mark.parametrize(
    ("workers", "request_text", "message"),
    [
        (2, "dp=3", "dp=3 needs 3 workers, there are 2"),
        (1, "tp=2", "tp=2 needs 2 workers, there is 1"),
        (2, "dp=2,tp=2", "dp=2 with tp=2 needs 4 workers, there are 2"),
        (2, "micro_batches=9", "micro_batches=9 makes 9 parts of a batch of 8: at most 8 are possible"),
        (16, "dp=12", "dp=12 makes 12 parts of a batch of 8: at most 8 are possible"),
        (2, "dp=2,micro_batches=8", "dp=2 with micro_batches=8 makes 16 parts of a batch of 8"),
        (2, "dp=1,distribute_param=step", "dp=1 leaves no one to share with"),
        (2, "tp=2,distribute_param=use", "with tp=2 needs 4 workers, there are 2"),
        (2, "distribute_param=step,micro_batches=8", "no dp from 2 to 2 splits a batch of 8 in 8 micro-batches"),
        (2, "tp=2,schedule=gpipe", "stages of a pipeline, which with tp=2 needs 4 workers, there are 2"),
        (2, "distribute_param=use,schedule=gpipe", "over dp, which with schedule=gpipe needs 4 workers, there are 2"),
        (2, "distribute_param=none,distribute_low_prec_param=true", "distribute_param=none gathers none"),
    ],
)
def test_an_impossible_request_says_why(workers: int, request_text: str, message: str) -> None:
    with pytest.raises(Diagnostic) as raised:
        candidates(dense(), workers, parse_request(request_text))
    assert message in raised.value.message


AXIS = st.sampled_from([None, None, None, 1, 2, 3, 4])


@given(
    workers=st.integers(1, 12),
    rows=st.sampled_from([1, 6, 8]),
    request=st.builds(
        Request,
        dp=AXIS,
        tp=AXIS,
        pp=AXIS,
        cp=AXIS,
        ep=AXIS,
        micro_batches=AXIS,
        schedule=st.sampled_from([None, None, "gpipe", "1f1b", "zero-bubble"]),
        distribute_param=st.sampled_from([None, None, "none", "optimizer", "use"]),
        distribute_low_prec_param=st.sampled_from([None, None, True]),
    ),
)
def test_every_request_has_candidates_or_says_why(workers: int, rows: int, request: Request) -> None:
    for step in (dense(rows), evaluation(rows)):
        with suppress(Diagnostic):
            assert candidate_space(step, workers, request).total > 0


def test_a_batch_of_no_rows_is_not_split() -> None:
    assert {(config.dp, config.micro_batches) for config in candidates(evaluation(rows=0), 2, Request())} == {(1, 1)}
    with pytest.raises(Diagnostic, match="dp=2 makes 2 parts of a batch of 0: at most 1 are possible"):
        candidates(evaluation(rows=0), 2, Request(dp=2))


def test_evaluation_of_a_last_batch_may_be_split_otherwise() -> None:
    request = Request(dp=2, micro_batches=2, distribute_param="step")
    assert relaxed(evaluation(rows=4), request) == request
    assert relaxed(evaluation(rows=5), request) == request
    assert relaxed(evaluation(rows=3), request) == Request(distribute_param="step")
    assert relaxed(dense(rows=3), request) == request


def test_a_batch_is_padded_unasked_by_a_quarter_at_most() -> None:
    found = candidates(dense(rows=7), 4, Request(recompute="saved", distribute_param="none"))
    assert {(config.dp, config.micro_batches) for config in found if config.tp == config.pp == 1} == {
        *((1, 1), (1, 2), (1, 4), (1, 7)),
        *((2, 1), (2, 2)),
        (4, 1),
    }
    asked = candidates(dense(rows=9), 8, Request(dp=8, micro_batches=1, recompute="saved", distribute_param="none"))
    assert asked == [Config(dp=8)]


def test_a_batch_of_open_size_is_not_padded() -> None:
    step = load("""// moai 1
sizes s0 = 7
func @step(%x: f32[s0, 4] input "x") -> (f32[s0, 4] output "y") {
  %y = aten.exp %x : f32[s0, 4] forward
  return %y
}""")
    assert {(config.dp, config.micro_batches) for config in candidates(step, 4, Request())} == {(1, 1), (1, 7)}
    with pytest.raises(Diagnostic, match="dp=2 does not divide a batch of 7: 1 would"):
        candidates(step, 4, Request(dp=2))


def test_dp_may_be_the_most_that_divides_the_batch() -> None:
    for rows, workers, dp in ((5, 6, 5), (480, 256, 240), (7, 64, 7)):
        assert dp in {mesh.dp for mesh in candidate_space(dense(rows), workers, Request()).meshes}
