"""From a model and texts to a trained drafter's folder: what a caller sees of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from portadraft.drafters.checkpoint import read_checkpoint
from portadraft.errors import OutOfMemory, PortadraftError
from portadraft.training.config import FitConfig, TrainConfig, config_from_json
from portadraft.training.distributed import join
from portadraft.training.finish import computation
from portadraft.training.request import Paths, check_init, request_for
from portadraft.training.stages import SHAPES, Stages, Trained
from portadraft.training.work import begin, check_folders, check_same, discard, read_request, work_folder

__all__ = ["SHAPES", "FitConfig", "TrainConfig", "Trained", "computation", "stored_config", "train"]


def train(
    model: str | Path,
    data: Paths = None,
    *,
    out: str | Path,
    text: Paths = None,
    config: TrainConfig | None = None,
    init: str | Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    work: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> Trained:
    """Train a drafter for a model and write its folder.

    model: a name, Hugging Face id, folder or GGUF file. data: files of prompts, conversations or
    texts, or data sets (`portadraft.training.data`); none at all: the model writes its own prompts.
    text: more of the same that the model only reads. init: the folder of a drafter to begin with, whose
    shape and draft vocabulary are kept.
    work: the folder in which unfinished runs are kept (beside `out`): features take 2 bytes × hidden
    size a token. resume: go on with an unfinished run, which arguments left out are taken from; begin
    one where there is none. overwrite: replace a drafter, or begin again.

    In one process, a run that is killed and resumed gives the same parameters as an unbroken one, bit
    for bit. Under a launcher of several processes all of them call this; each gets the result.

    Raises: InvalidArgument, ModelNotFound, IncompatibleDrafter and what loading a model raises; OSError
    for a full disk, after which it can be resumed. KeyboardInterrupt after the state is written.
    """
    out = Path(out)
    folder = work_folder(out, None if work is None else Path(work))

    def prepare() -> list[Any]:
        """Everything that can be refused before a model is loaded; then the run's folder stands."""
        check_folders(out, folder, resume, overwrite)
        before = read_request(folder) if resume else None
        request = request_for(model, data, text, config, init, dtype, before) | {"processes": processes.world}
        start = request["init"]
        if start is not None:
            check_init(config_from_json(request["config"]))
            read_checkpoint(start)
        if before is None:
            begin(folder, request)
        else:
            check_same(folder, before, request)
        return [before, request]

    with join(device) as processes:
        before, request = processes.lead(prepare)
        run = Stages(out, folder, request, processes, progress)
        try:
            return run.all(processes.device)
        except PortadraftError as error:
            # A mistake of the caller's in a new run: nothing is worth keeping.
            mistake = not isinstance(error, OutOfMemory)
            if mistake and before is None and processes.main and not run.made_something:
                discard(folder)
            raise


def stored_config(out: str | Path, work: str | Path | None = None) -> TrainConfig | None:
    """The configuration of the unfinished run that would write `out`, if there is one."""
    before = read_request(work_folder(Path(out), None if work is None else Path(work)))
    return None if before is None else config_from_json(before["config"])
