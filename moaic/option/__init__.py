"""`torch.moai.option`: one line, after which a program written for CUDA runs on the virtual accelerator as it is."""

from __future__ import annotations


def enable_advanced_parallelization(**options: object) -> None:
    """From now on "cuda" means the virtual accelerator in this process, and modules that lie there are compiled.

    Options are those of the backend (`pp`, `dp`, `cp`, `ep`, `tp`, `micro_batches`, `schedule`, `recompute`,
    `loss_chunks`, `gather_keys`, `distribute_param`, `distribute_low_prec_param`, `precision`, `compile`,
    `cuda_graphs`), and by their other names `pipeline_parallel`, `num_stages`, `num_micro_batches`,
    `activation_recomputation`, `distribute_parameter` and `mixed_precision`; what is left out is chosen. Called again,
    it takes the new options. Raises Diagnostic for an option or value that there is not.
    """
    from moaic.option import mode
    from moaic.options import choices_from

    mode.MODE.enable(choices_from(options))


def disable_advanced_parallelization() -> None:
    """Everything that was mapped is again what it was; harmless where nothing is."""
    from moaic.option import mode

    mode.MODE.disable()


def enable_by_environment(word: str) -> None:
    """What MOAI_ENABLE_ADVANCED_PARALLELIZATION asks for; ends the program for a word that says neither yes nor no."""
    if word not in ("0", "1"):
        raise SystemExit(
            f"error: MOAI_ENABLE_ADVANCED_PARALLELIZATION={word} is not known\nhint: set 1, or leave it out"
        )
    if word == "1":
        enable_advanced_parallelization()
