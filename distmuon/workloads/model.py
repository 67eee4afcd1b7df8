"""The decoder: attention, then a dense feed-forward or routed and shared experts.

Plain modules with no knowledge of ranks. The one seam for expert parallelism is ``MoE.dispatch``: when it is set, it
takes the tokens to the ranks that hold their experts and back. Linear layers have no bias, so what is not a matrix is a
norm. Shapes in comments: B sequences, T tokens, D width, H heads, N tokens sent to experts (B * T * top_k), E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distmuon.workloads.attention import make_attention, rotary_table
from distmuon.workloads.config import Workload

#: Standard deviation of every matrix at the start.
INIT_STD = 0.02


def build_model(workload: Workload, device: torch.device | str = "cpu", seed: int = 0) -> Decoder:
    """The whole model in fp32, the same on every rank and for every number of ranks.

    Args:
        workload: sizes of the model.
        device: where its parameters live; "meta" allocates nothing.
        seed: of the weights. They are drawn on the CPU, so the device does not change them.
    """
    with torch.device("meta"):
        model = Decoder(workload)
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        initialize(model, seed)
    return model


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Draw every matrix from a normal distribution, in the order of the parameters, and set the norms to one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, INIT_STD, generator=generator))


class Decoder(nn.Module):
    """Token ids to logits."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload
        # Drawing weights that are drawn anew later costs a second where "meta" has it import a compiler.
        table = torch.empty(workload.vocabulary, workload.width)
        self.tok_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(Layer(workload, dense=n < workload.dense_layers) for n in range(workload.layers))
        self.norm = nn.RMSNorm(workload.width)
        self.output = nn.Linear(workload.width, workload.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) token ids to (B, T, vocabulary) logits."""
        rotation = rotary_table(self.workload.rope, self.workload.attention.rotated, tokens.shape[1], tokens.device)
        hidden = self.tok_embeddings(tokens)  # (B, T, D)
        for layer in self.layers:
            hidden = layer(hidden, rotation)
        return self.output(self.norm(hidden))


class Layer(nn.Module):
    """Attention, then a dense feed-forward or experts, each on the normalised stream and added to it."""

    def __init__(self, workload: Workload, dense: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(workload.width)
        self.attention = make_attention(workload)
        self.ffn_norm = nn.RMSNorm(workload.width)
        self.dense = dense
        if dense:
            self.feed_forward = FeedForward(workload.width, workload.dense_hidden)
        else:
            self.moe = MoE(workload)

    def forward(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        """(B, T, D) and the rotary table to (B, T, D)."""
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation)
        return hidden + (self.feed_forward if self.dense else self.moe)(self.ffn_norm(hidden))


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., D) to (..., D)."""
        return self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))


class Router(nn.Module):
    """Softmax scores over all experts; a token goes to its ``top_k`` and weighs each by its score."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.top_k = workload.top_k
        self.gate = nn.Linear(workload.width, workload.experts, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(B * T, D) tokens to their (B * T, top_k) scores and experts."""
        scores = F.softmax(self.gate(tokens), dim=-1, dtype=torch.float32)
        return torch.topk(scores, self.top_k, dim=-1)


class Experts(nn.Module):
    """Stacked SwiGLU experts: those of this rank, whole, when the stack is split over ranks."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        experts, width, hidden = workload.experts, workload.width, workload.expert_hidden
        self.w1 = nn.Parameter(torch.empty(experts, hidden, width))
        self.w2 = nn.Parameter(torch.empty(experts, width, hidden))
        self.w3 = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Each token through its expert.

        Args:
            tokens: (N, D), sorted by expert.
            counts: (experts here,) tokens of each expert.

        Returns:
            (N, D), in the order of ``tokens``.
        """
        # An expert without tokens takes part too: its weights then have gradients of zero, on every rank alike. unbind,
        # and not an index an expert, so that backward writes the stacked gradient once.
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        experts = zip(tokens.split(counts.tolist()), w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
        return torch.cat([F.linear(F.silu(F.linear(x, up)) * F.linear(x, gate), down) for x, up, down, gate in experts])


class MoE(nn.Module):
    """Routed experts, each token to its ``top_k``, plus shared experts that see every token.

    ``dispatch(experts, tokens, counts)`` applies the experts where they live; None when all live here.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.router = Router(workload)
        self.experts = Experts(workload)
        self.shared_experts = FeedForward(workload.width, workload.shared_hidden)
        self.dispatch: Callable[[Experts, Tensor, Tensor], Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        tokens = hidden.flatten(0, -2)  # (B * T, D)
        scores, chosen = self.router(tokens)
        # Sorting copies of the tokens is a permutation, so neither direction of it adds anything up: gradients come out
        # the same in every run, on a GPU too.
        order = chosen.flatten().argsort(stable=True)  # (N,)
        counts = torch.bincount(chosen.flatten(), minlength=self.router.gate.out_features)  # (E,)
        copies = tokens.unsqueeze(1).expand(-1, self.router.top_k, -1).flatten(0, 1)  # (N, D)
        by_expert = copies.index_select(0, order)
        if self.dispatch is None:
            done = self.experts(by_expert, counts)
        else:
            done = self.dispatch(self.experts, by_expert, counts)
        done = done.index_select(0, order.argsort()).unflatten(0, (-1, self.router.top_k))  # (B * T, top_k, D)
        routed = (done * scores.unsqueeze(-1).to(done.dtype)).sum(1)
        return (routed + self.shared_experts(tokens)).view_as(hidden)
