"""Training a workload: text in, DistMuon for the matrices, AdamW for the rest.

The loss is the mean over all tokens of the global batch, whichever rank has them, and what a rank trains on is its
share of that batch. So one process with all the sequences and four ranks with one each compute the same steps, up to
rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from distmuon.clipping import clip_grad_norm_
from distmuon.newton_schulz import COEFFICIENTS, Coefficients
from distmuon.optimizer import DistMuon
from distmuon.routing import split_parameters
from distmuon.variants import Variant
from distmuon.workloads.config import ADAMW_RECIPE, LEARNING_RATE, MAX_GRAD_NORM, MUON_RECIPE, Workload
from distmuon.workloads.model import build_model
from distmuon.workloads.parallel import make_meshes, parallelize
from distmuon.workloads.storage import get_buckets
from distmuon.workloads.text import standard_library

#: How far loss and gradient norm of the first ten steps may lie from those of one process, relative, by ``ns_dtype``.
#: Only rounding sets them apart; in bf16 Newton-Schulz takes two gradients that differ in a last bit further apart.
ONE_PROCESS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-3}


@dataclass(frozen=True)
class StepRecord:
    """What a step was: its number, the mean loss (nats a token) and the gradient norm before clipping, of all ranks."""

    step: int
    loss: float
    grad_norm: float


class Trainer:
    """The model, its optimizers and its text, on one rank.

    Args:
        workload: what to train.
        ranks: ranks of the default process group; 1 needs none.
        ep: expert-parallel degree.
        replicas: copies of the model (HSDP).
        rank: this rank.
        device: of this rank.
        variant: of DistMuon.
        tokens: length of a sequence.
        sequences: of the global batch; None for one a rank. One process that is to train as four ranks do takes 4.
        seed: of the weights.
        lr: of both optimizers.
        ns_algorithm: by which DistMuon orthogonalises.
        ns_coefficients: of its iterations.
        ns_dtype: in which it does.
        buckets: "published" for the workload's own, "auto" for DistMuon's choice, or name patterns a bucket.

    Attributes:
        model: parallelized in place.
        split: what went to which optimizer, and why.
        muon: the DistMuon.
        adamw: the AdamW.

    Raises:
        ValueError: ranks, ep and the workload do not fit, or a name is unknown.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        ranks: int,
        ep: int,
        replicas: int = 1,
        rank: int,
        device: torch.device | str = "cpu",
        variant: str | Variant = "fused",
        tokens: int = 128,
        sequences: int | None = None,
        seed: int = 0,
        lr: float = LEARNING_RATE,
        ns_algorithm: str = "standard",
        ns_coefficients: Coefficients = COEFFICIENTS,
        ns_dtype: torch.dtype = torch.bfloat16,
        buckets: str | Sequence[Sequence[str]] = "published",
    ) -> None:
        workload.layout(ranks, ep, replicas)  # refuses what does not fit before anything is allocated
        self.sequences = ranks if sequences is None else sequences
        if self.sequences < 1 or self.sequences % ranks:
            raise ValueError(f"sequences={self.sequences} must be a multiple of ranks={ranks}")
        if workload.vocabulary < 256:
            raise ValueError(f"workload {workload.name!r} has {workload.vocabulary} token ids: bytes of text need 256")
        self.workload = workload
        self.tokens = tokens
        self.device = torch.device(device)
        self.text = standard_library()
        share = self.sequences // ranks
        self._ranks = ranks
        self._mine = range(rank * share, (rank + 1) * share)
        meshes = make_meshes(ranks, ep, self.device.type, replicas)
        self.model = build_model(workload, self.device, seed)
        parallelize(self.model, workload, meshes)
        self.split = split_parameters(self.model, row_blocks=workload.row_blocks)
        self.muon = DistMuon(
            self.split.muon,
            lr=lr,
            buckets=get_buckets(workload, buckets),
            variant=variant,
            ns_algorithm=ns_algorithm,
            ns_coefficients=ns_coefficients,
            ns_dtype=ns_dtype,
            **MUON_RECIPE,
        )
        self.adamw = torch.optim.AdamW(self.split.adamw, lr=lr, **ADAMW_RECIPE)

    def train_step(self, step: int) -> StepRecord:
        """Train on the global batch of that number."""
        loss = self.forward_backward(step)
        grad_norm = self.clip()
        self.optimizer_step()
        return StepRecord(step, loss, grad_norm)

    def forward_backward(self, step: int) -> float:
        """Add the gradients of that global batch; the mean loss over all its tokens, equal on all ranks.

        Raises:
            FloatingPointError: the loss is infinite or NaN; on all ranks.
        """
        inputs, targets = self.text.batch(step, self._mine, self.sequences, self.tokens)
        logits = self.model(inputs.to(self.device))
        total = F.cross_entropy(logits.flatten(0, 1), targets.to(self.device).flatten(), reduction="sum")
        loss = total / (self.sequences * self.tokens)  # this rank's share of the mean
        loss.backward()
        mean = loss.detach()
        if self._ranks > 1:
            dist.all_reduce(mean)
        return _finite(f"the loss of step {step}", mean.item())

    def clip(self) -> float:
        """Clip the gradients; their norm before, over all ranks.

        Raises:
            FloatingPointError: it is infinite or NaN; on all ranks.
        """
        return _finite("the norm of the gradients", clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM).item())

    def optimizer_step(self) -> None:
        """Step both optimizers and drop the gradients."""
        self.muon.step()
        self.adamw.step()
        self.model.zero_grad(set_to_none=True)

    def digest(self) -> str:
        """SHA-256, in hex, of the bytes of every parameter as this rank stores it."""
        digest = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            digest.update(name.encode())
            digest.update(local.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _finite(what: str, value: float) -> float:
    if not math.isfinite(value):
        raise FloatingPointError(f"{what} is {value}: the training has diverged, take a smaller learning rate")
    return value
