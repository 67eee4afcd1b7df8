"""Checkpoints of a model and all its optimizers, through ``torch.distributed.checkpoint``: any number of ranks reads
them.

A folder appears under its name only once all of it is written, so a save that is cut off leaves the one before as it
was, and :func:`latest` finds that.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from distmuon.state import other_parameters

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter name, whatever the groups
_UNFINISHED = ".unfinished"
_WRITTEN_LAST = ".metadata"


def save(folder: Path | str, model: nn.Module, optimizers: Sequence[Optimizer], **others: Stateful) -> None:
    """Write a checkpoint. Collective; on several hosts the folder must be one that all of them see.

    Args:
        folder: where to; a new one.
        model: whose parameters and buffers to save.
        optimizers: of its parameters, together.
        others: what else has a ``state_dict``, as schedulers do, by a name of its own.

    Raises:
        ValueError: the folder exists.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists: give each checkpoint a folder of its own")
    unfinished = folder.with_name(folder.name + _UNFINISHED)
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:  # what a save that was cut off has left
        shutil.rmtree(unfinished, ignore_errors=True)
    _meet()
    with _alone_without_warning():
        dcp.save(_state_dict(model, optimizers, others), checkpoint_id=unfinished)
    if first:
        unfinished.rename(folder)
    _meet()


def load(folder: Path | str, model: nn.Module, optimizers: Sequence[Optimizer], **others: Stateful) -> None:
    """Read a checkpoint into what :func:`save` was given, or its like on another number of ranks. Collective.

    Raises:
        ValueError: it is of other parameters; names what is missing in it, and what is extra.
    """
    state_dict = _state_dict(model, optimizers, others)
    with _alone_without_warning():
        reader = dcp.FileSystemReader(folder)
        _refuse_other_parameters(folder, state_dict, reader.read_metadata())
        dcp.load(state_dict, storage_reader=reader)
    set_state_dict(
        model,
        optimizers,
        model_state_dict=state_dict["model"],
        optim_state_dict=state_dict["optimizers"],
        options=_OPTIONS,
    )


def latest(folder: Path | str) -> Path | None:
    """The checkpoint in ``folder`` that was written last; None without any that is whole."""
    whole = [mark.parent for mark in Path(folder).glob(f"*/{_WRITTEN_LAST}") if mark.parent.suffix != _UNFINISHED]
    return max(whole, key=lambda each: (each / _WRITTEN_LAST).stat().st_mtime_ns, default=None)


def _state_dict(model: nn.Module, optimizers: Sequence[Optimizer], others: dict[str, Stateful]) -> dict[str, Any]:
    of_model, of_optimizers = get_state_dict(model, list(optimizers), options=_OPTIONS)
    return {"model": of_model, "optimizers": of_optimizers, **others}


def _refuse_other_parameters(folder: Path | str, state_dict: dict[str, Any], metadata: dcp.Metadata) -> None:
    def is_state(key: str) -> bool:
        return key.startswith(("model.", "optimizers.state."))

    mine = {
        f"{part}.{key}"
        for part in ("model", "optimizers")
        for key, value in state_dict[part].items()
        if isinstance(value, Tensor)
    }
    everyone = [mine]
    if dist.is_initialized():
        everyone = [set()] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    wanted = set(filter(is_state, set().union(*everyone)))
    stored = metadata.state_dict_metadata.items()
    saved = {key for key, value in stored if is_state(key) and isinstance(value, TensorStorageMetadata)}
    if wanted != saved:
        raise ValueError(other_parameters(f"checkpoint {folder}", sorted(wanted - saved), sorted(saved - wanted)))


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    """One process is meant where there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
