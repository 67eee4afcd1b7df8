"""Models of transformers under ``fully_shard``, routed without a pattern: their loss is that of ``torch.optim.Muon`` in
one process, and states go over from one to the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from distmuon import DistMuon, matrix_rows, split_parameters
from distmuon.routing import Split
from distmuon.workloads.text import standard_library

transformers = pytest.importorskip("transformers", reason="models of transformers: pip install -e '.[models]'")

README = Path(__file__).parents[1] / "README.md"

#: How far the loss of a step on four ranks may lie from that of one process, relative. Newton-Schulz is in bf16, where
#: gradients that differ in a last bit, being summed in another order, come out further apart.
TOLERANCE = 2e-4
RATES = {"lr": 5e-3, "weight_decay": 0.1}
STEPS, SEQUENCES, TOKENS, VOCABULARY = 8, 4, 48, 256

COMMON = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 64}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **COMMON,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 28,
        "n_group": 2,
        "topk_group": 1,
    },
    "qwen3": {
        **COMMON,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 14,
        "tie_word_embeddings": True,
    },
    "llama": {**COMMON, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3},
}
#: The rows of each matrix: gate and up, (E, 2F, D) in one parameter, and a query projection's heads.
FUSED = {"deepseek_v3": {"*.gate_up_proj": 28, "*.q_b_proj.weight": 24}}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **CONFIGURATIONS[kind])
    )


def build_sharded(kind: str) -> nn.Module:
    model = build(kind)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def losses(model: nn.Module, optimizers: Sequence[Any], steps: range, rank: int = 0, ranks: int = 1) -> list[float]:
    """Train on this rank's share of real text; the mean loss of each step over all of it."""
    share = SEQUENCES // ranks
    found = []
    for step in steps:
        tokens, _ = standard_library().batch(step, range(rank * share, (rank + 1) * share), SEQUENCES, TOKENS)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        total = loss.detach()
        if ranks > 1:
            torch.distributed.all_reduce(total)
        found.append(total.item() / ranks)
    return found


class MuonOnMatrices:
    """``torch.optim.Muon``, which takes 2-D parameters alone, with one for each matrix: a view of the model's."""

    def __init__(self, split: Split) -> None:
        (group,) = split.muon
        self.views: list[tuple[nn.Parameter, nn.Parameter, slice]] = []
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            rows = matrix_rows(name, tuple(parameter.shape), group["row_blocks"])
            rows *= len(parameter) if parameter.ndim == 3 else 1
            ends = torch.tensor(rows).cumsum(0).tolist()
            for start, end in zip([0, *ends], ends, strict=False):
                view = nn.Parameter(parameter.detach().flatten(0, -2)[start:end])
                self.views.append((view, parameter, slice(start, end)))
        self.optimizer = torch.optim.Muon([view for view, _, _ in self.views], **RATES)

    def step(self) -> None:
        for view, parameter, rows in self.views:
            view.grad = parameter.grad.flatten(0, -2)[rows]
        self.optimizer.step()


def routed(model: nn.Module, kind: str, cut: bool) -> Split:
    return split_parameters(model, row_blocks=FUSED[kind] if cut else None)


def losses_on_ranks(rank: int, ranks: int, kind: str, cut: bool) -> list[float]:
    model = build_sharded(kind)
    split = routed(model, kind, cut)
    return losses(model, [DistMuon(split.muon, **RATES), AdamW(split.adamw, **RATES)], range(STEPS), rank, ranks)


def losses_alone(rank: int, ranks: int, kind: str, cut: bool) -> list[float]:
    model = build(kind)
    split = routed(model, kind, cut)
    return losses(model, [MuonOnMatrices(split), AdamW(split.adamw, **RATES)], range(STEPS))


@pytest.mark.parametrize(
    ("kind", "cut"), [*((kind, False) for kind in CONFIGURATIONS), *((kind, True) for kind in FUSED)]
)
def test_its_loss_is_that_of_torch_muon_in_one_process(pool: Pool, kind, cut):
    (expected,) = pool.run(1, losses_alone, kind, cut, timeout=200)
    assert expected[-1] < expected[0] - 1
    ours = pool.run(4, losses_on_ranks, kind, cut, timeout=200)
    assert ours == [ours[0]] * 4
    assert ours[0] == pytest.approx(expected, rel=TOLERANCE)


def test_it_is_routed_without_a_pattern():
    table = split_parameters(build("deepseek_v3")).table
    to_adamw = {row.name for row in table if row.optimizer == "AdamW" and len(row.shape) > 1}
    assert to_adamw == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(
        row.optimizer == ("Muon" if len(row.shape) > 1 else "AdamW") for row in table if row.name not in to_adamw
    )
    assert table["lm_head.weight"].reason == "output head: get_output_embeddings()"
    assert table["model.layers.1.mlp.gate.weight"].reason == "matrix of DeepseekV3TopkRouter"
    assert table["model.layers.1.mlp.experts.gate_up_proj"].matrices == 6
    cut = split_parameters(build("deepseek_v3"), row_blocks=FUSED["deepseek_v3"]).table
    assert cut["model.layers.1.mlp.experts.gate_up_proj"].matrices == 2 * 6
    tied = split_parameters(build("qwen3")).table
    assert tied["model.embed_tokens.weight"].reason == "embedding, tied to lm_head.weight"


# From one process to four ranks, and back


Weights = dict[str, Tensor]
State = dict[str, Any]


def optimizers_of(model: nn.Module, muon: Any) -> list[Optimizer]:
    split = split_parameters(model)
    return [muon(split.muon, **RATES), AdamW(split.adamw, **RATES)]


def take(model: nn.Module, optimizers: list[Optimizer]) -> tuple[Weights, list[State]]:
    """Weights and states, whole."""

    def whole(tensor: Tensor) -> Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    states = []
    for optimizer in optimizers:
        state = optimizer.state_dict()
        state["state"] = {
            key: {name: whole(value) for name, value in each.items()} for key, each in state["state"].items()
        }
        states.append(state)
    return {name: whole(parameter) for name, parameter in model.named_parameters()}, states


def go_on(rank: int, ranks: int, kind: str, weights: Weights, states: list[State]) -> tuple[list[float], Any]:
    model = build(kind)
    model.load_state_dict(weights, strict=False)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizers = optimizers_of(model, DistMuon)
    optimizers[0].load_state_dict(states[0])
    found = losses(model, optimizers[:1], range(3, 6), rank, ranks)
    return found, take(model, optimizers[:1])


def test_a_run_of_torch_muon_goes_on_with_distmuon_and_back(pool: Pool):
    model = build("qwen3")
    optimizers = optimizers_of(model, torch.optim.Muon)
    losses(model, optimizers[:1], range(3))
    weights, states = take(model, optimizers)
    expected = losses(model, optimizers[:1], range(3, 9))
    ours, (weights, states) = pool.run(4, go_on, "qwen3", weights, states, timeout=200)[0]
    back = build("qwen3")
    back.load_state_dict(weights, strict=False)
    optimizers = optimizers_of(back, torch.optim.Muon)
    optimizers[0].load_state_dict(states[0])
    assert ours + losses(back, optimizers[:1], range(6, 9)) == pytest.approx(expected, rel=TOLERANCE)
    forgotten = build("qwen3")
    forgotten.load_state_dict(weights, strict=False)
    without = losses(forgotten, optimizers_of(forgotten, torch.optim.Muon)[:1], range(6, 9))
    assert without != pytest.approx(expected[3:], rel=TOLERANCE)  # so the momentum has gone over


# The example


def run_example(rank: int, ranks: int, code: str) -> tuple[float, float, str]:
    found: State = {}
    exec(code, found)
    first = math.log(found["sizes"]["vocab_size"])  # the loss of a model that knows nothing
    return found["loss"].item(), first, found["optimizer"].table.summary


def test_the_example_of_the_readme_trains(pool: Pool):
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "transformers" in block
    ]
    for loss, first, summary in pool.run(4, run_example, code, timeout=200):
        assert loss < first - 1
        assert summary == "Muon: 28 parameters, 116 matrices; AdamW: 19 parameters"
