"""Checkpoints of a model and all its optimizers, through ``torch.distributed.checkpoint``: any number of ranks reads
them.

A folder appears under its name only once all of it is written, so a save that is cut off leaves the one before as it
was, and :func:`latest` finds that.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
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

from distmuon.agreement import gather, host_group, raise_first, told
from distmuon.state import other_parameters, refuse_other_matrices

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter name, whatever the groups
_UNFINISHED = ".unfinished"
_WRITTEN_LAST = ".metadata"
_GROUPS, _BLOCKS = "param_groups.", ".row_blocks"  # around a parameter's name, in a state dict of the options above


def save(folder: Path | str, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], **others: Stateful) -> None:
    """Write a checkpoint. Collective; on several hosts the folder must be one that all of them see.

    Args:
        folder: where to; a new one.
        model: whose parameters and buffers to save.
        optimizers: of its parameters, all of them; one without parameters, as a pipeline stage has it, is left out.
        others: what else has a ``state_dict``, as each scheduler does, by a name of its own.

    Raises:
        ValueError: the folder exists, or an optimizer is of another model. On all ranks, if one finds it so.
        TypeError: ``optimizers`` are none, or one of ``others`` has no ``state_dict``; likewise.
        OSError: it can't be written; likewise.
    """
    folder = Path(folder)
    unfinished = folder.with_name(folder.name + _UNFINISHED)
    first = not dist.is_initialized() or dist.get_rank() == 0
    with _agreed():
        optimizers = _checked(model, optimizers, others)
        if folder.exists():
            raise ValueError(f"{folder} exists: give each checkpoint a folder of its own")
        if first and unfinished.exists():  # what a save that was cut off has left
            shutil.rmtree(unfinished)
    with _alone_without_warning():
        dcp.save(_state_dict(model, optimizers, others), checkpoint_id=unfinished)
    with _agreed():
        if first:
            unfinished.rename(folder)


def load(folder: Path | str, model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], **others: Stateful) -> None:
    """Read a checkpoint into what :func:`save` was given, or its like on another number of ranks. Collective.

    Raises:
        ValueError: it is of other parameters (names what is missing in it, and what is extra), shapes or matrices, or
            has nothing for one of ``others``. Nothing has been loaded then.
        TypeError: as of :func:`save`, or ``folder`` is None, as :func:`latest` found no checkpoint.
        OSError: it is none, or can't be read. On all ranks, if one finds it so.
    """
    with _agreed():
        if folder is None:
            raise TypeError("folder is None: there is no checkpoint to load where latest() finds none")
        optimizers = _checked(model, optimizers, others)
        if not (Path(folder) / _WRITTEN_LAST).exists():
            raise FileNotFoundError(f"{folder} holds no checkpoint: give the folder of one, which latest() finds")
        reader = dcp.FileSystemReader(folder)
        metadata = reader.read_metadata()
    state_dict = _state_dict(model, optimizers, others)
    with _alone_without_warning():
        _refuse_others(folder, state_dict, metadata)
        _refuse_other_matrices(state_dict, reader, metadata)
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


def _checked(
    model: nn.Module, optimizers: Optimizer | Sequence[Optimizer], others: Mapping[str, Stateful]
) -> list[Optimizer]:
    """Optimizers that have parameters, as torch looks for the state of the first one; all that is given being fit."""
    for name, other in others.items():
        if not isinstance(other, Stateful):
            raise TypeError(
                f"{name} is a {type(other).__name__}, which has no state_dict to save or load: give each scheduler, or "
                "what else has one, a name of its own"
            )
    every = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    own = set(model.parameters())
    for each in every:
        if not isinstance(each, Optimizer):
            raise TypeError(f"optimizers has a {type(each).__name__}: give an optimizer, or a list of them")
        for parameter in (parameter for group in each.param_groups for parameter in group["params"]):
            if parameter not in own:
                raise ValueError(
                    f"{type(each).__name__} has a parameter of shape {tuple(parameter.shape)} that the model has not: "
                    "give the model that its optimizers were made for"
                )
    return [each for each in every if any(group["params"] for group in each.param_groups)]


def _state_dict(model: nn.Module, optimizers: list[Optimizer], others: dict[str, Stateful]) -> dict[str, Any]:
    of_model, of_optimizers = get_state_dict(model, optimizers, options=_OPTIONS)
    return {"model": of_model, "optimizers": of_optimizers, **others}


def _refuse_others(folder: Path | str, state_dict: dict[str, Any], metadata: dcp.Metadata) -> None:
    """Refuse a checkpoint of other parameters or shapes, or without one of the others, before anything is read."""

    def is_state(key: str) -> bool:
        return key.startswith(("model.", "optimizers.state."))

    mine = {
        f"{part}.{key}": tuple(value.shape)
        for part in ("model", "optimizers")
        for key, value in state_dict[part].items()
        if isinstance(value, Tensor)
    }
    everyone = gather("says who has which parameters", mine, host_group())
    wanted = {key: shape for of_rank in everyone for key, shape in of_rank.items() if is_state(key)}
    stored = metadata.state_dict_metadata
    saved = {
        key: tuple(value.size)
        for key, value in stored.items()
        if is_state(key) and isinstance(value, TensorStorageMetadata)
    }
    if missing_or_extra := wanted.keys() ^ saved.keys():
        missing, extra = (sorted(keys & missing_or_extra) for keys in (wanted.keys(), saved.keys()))
        raise ValueError(other_parameters(f"checkpoint {folder}", missing, extra))
    for key, shape in wanted.items():
        if shape != saved[key]:
            raise ValueError(f"{key} has shape {saved[key]} in checkpoint {folder}, but {shape} here")
    for part in state_dict:
        if not any(key.startswith(f"{part}.") or key == part for key in stored):
            raise ValueError(f"checkpoint {folder} has nothing for {part!r}: it was saved without")


def _refuse_other_matrices(state_dict: dict[str, Any], reader: dcp.FileSystemReader, metadata: dcp.Metadata) -> None:
    """Refuse a checkpoint of parameters that were cut into other matrices, before anything else is read."""
    own = {
        key: value
        for key, value in state_dict["optimizers"].items()
        if key.startswith(_GROUPS) and key.endswith(_BLOCKS) and f"optimizers.{key}" in metadata.state_dict_metadata
    }
    saved = {"optimizers": dict(own)}
    dcp.load(saved, storage_reader=reader)
    with _agreed():
        for key, row_blocks in saved["optimizers"].items():
            name = key.removeprefix(_GROUPS).removesuffix(_BLOCKS)
            momentum = state_dict["optimizers"].get(f"state.{name}.momentum_buffer")
            if momentum is not None:  # that of a frozen parameter is not saved
                refuse_other_matrices(name, tuple(momentum.shape), own[key], row_blocks)


@contextmanager
def _agreed() -> Iterator[None]:
    """What is done within has been done on all ranks after it, or raises on all."""
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    messages = gather("agrees on a checkpoint", told(error), host_group())
    raise_first(error, messages, "can't handle the checkpoint, so no rank does")


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    """One process is meant where there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
