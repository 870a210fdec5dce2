"""`torch.moai.option`: one line, after which a program written for CUDA runs on the virtual accelerator as it is."""

from __future__ import annotations

from collections.abc import Mapping


def enable_advanced_parallelization(**options: object) -> None:
    """Makes "cuda" mean the virtual accelerator in this process, and compiles modules that are on it.

    Options are those of the backend (`pp`, `dp`, `cp`, `ep`, `tp`, `micro_batches`, `schedule`, `stage_shares`,
    `recompute`, `loss_chunks`, `gather_keys`, `distribute_param`, `distribute_low_prec_param`, `precision`, `compile`,
    `cuda_graphs`, `expected_steps`, `autotune`), and by their other names `pipeline_parallel`, `num_stages`,
    `num_micro_batches`, `activation_recomputation`, `distribute_parameter` and `mixed_precision`; others are chosen by
    the planner. A second call replaces the options. Raises Diagnostic for an unknown option or value.

    Workers start at once, beside what the program does before it uses them.
    """
    from moaic.runtime.controller.session import SESSION

    _enable(options)
    SESSION.expect()


def disable_advanced_parallelization() -> None:
    """Restores every mapped call; without effect if nothing is mapped."""
    from moaic.option import mode
    from moaic.runtime.controller.session import SESSION

    mode.MODE.disable()
    SESSION.expect_nothing()


def enable_by_environment(word: str) -> None:
    """Acts on the value of MOAI_ENABLE_ADVANCED_PARALLELIZATION; ends the program if it is neither 0 nor 1."""
    if word not in ("0", "1"):
        raise SystemExit(
            f"error: invalid value `{word}` for MOAI_ENABLE_ADVANCED_PARALLELIZATION\nhint: set 1, or leave it out"
        )
    if word == "1":
        # No workers yet: whatever imports torch in this environment comes here, PyTorch's compilers among others.
        _enable({})


def _enable(options: Mapping[str, object]) -> None:
    from moaic.option import mode
    from moaic.options import choices_from

    mode.MODE.enable(choices_from(options))
