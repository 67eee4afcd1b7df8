"""Routing: what goes to Muon and what to AdamW, for models of many kinds, and how the table shows it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from distmuon.routing import split_parameters


class Decoder(nn.Module):
    """Embedding, a layer, a head; what most models have."""

    def __init__(self, words: int = 50, width: int = 8) -> None:
        super().__init__()
        self.wte = nn.Embedding(words, width)
        self.layer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.wte(tokens)))


class Stack(nn.Module):
    """One parameter of any shape, held by a module of no known kind."""

    def __init__(self, *shape: int, name: str = "weight") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.randn(shape)))


class Declares(Decoder):
    """Says itself which modules are its ends; its head has more outputs than there are words."""

    def __init__(self) -> None:
        super().__init__(words=50, width=8)
        self.positions = nn.Embedding(24, 8)  # as many rows as the hidden layer has features
        self.head = nn.Linear(8, 64, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def routes(model: nn.Module, **options) -> dict[str, str]:
    return {row.name: row.optimizer for row in split_parameters(model, **options).table}


def test_kinds_of_modules():
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(50, 8),
            "bag": nn.EmbeddingBag(30, 8),
            "linear": nn.Linear(8, 16),
            "attention": nn.MultiheadAttention(8, 2),
            "norm": nn.LayerNorm(8),
            "conv1d": nn.Conv1d(8, 4, 3),
            "conv2d": nn.Conv2d(8, 4, 3),
            "router": Stack(4, 8),
            "experts": Stack(4, 16, 8),
            "expert_biases": Stack(4, 16, name="up_bias"),
            "class_token": Stack(1, 1, 8),
            "positions": Stack(1, 9, 8),
            "scale": Stack(),
        }
    )
    assert routes(model) == {
        "embedding.weight": "AdamW",
        "bag.weight": "AdamW",
        "linear.weight": "Muon",
        "linear.bias": "AdamW",
        "attention.in_proj_weight": "Muon",
        "attention.in_proj_bias": "AdamW",
        "attention.out_proj.weight": "Muon",
        "attention.out_proj.bias": "AdamW",
        "norm.weight": "AdamW",
        "norm.bias": "AdamW",
        "conv1d.weight": "AdamW",
        "conv1d.bias": "AdamW",
        "conv2d.weight": "AdamW",
        "conv2d.bias": "AdamW",
        "router.weight": "Muon",
        "experts.weight": "Muon",
        "expert_biases.up_bias": "AdamW",
        "class_token.weight": "AdamW",
        "positions.weight": "AdamW",
        "scale.weight": "AdamW",
    }


def test_head_is_known_by_its_output_size():
    split = split_parameters(Decoder())
    assert split.table["head.weight"].optimizer == "AdamW"
    assert split.table["head.weight"].reason == "output head: 50 outputs, as many as wte has rows"
    assert [group["param_names"] for group in split.muon] == [["layer.1.weight", "layer.3.weight"]]


def test_head_is_known_by_what_the_model_declares():
    table = split_parameters(Declares()).table
    assert table["head.weight"].reason == "output head: get_output_embeddings()"
    assert table["positions.weight"].optimizer == "AdamW"
    assert table["layer.1.weight"].optimizer == "Muon"  # though there are as many positions as it has outputs


def test_a_part_that_declares_its_embeddings_speaks_for_itself_alone():
    tower = Declares()
    tower.get_input_embeddings = lambda: tower.patches  # as towers for images do
    tower.patches = nn.Conv2d(3, 8, 4)
    table = split_parameters(nn.ModuleDict({"tower": tower, "text": Decoder(words=60)})).table
    assert table["text.head.weight"].reason == "output head: 60 outputs, as many as text.wte has rows"
    assert table["tower.layer.1.weight"].optimizer == "Muon"  # though there are as many positions as it has outputs


def test_a_part_that_cannot_say_its_embeddings_is_passed_over():
    class Silent(Decoder):
        def get_input_embeddings(self):
            raise NotImplementedError

        get_output_embeddings = get_input_embeddings

    assert routes(Silent()) == routes(Decoder())


def test_head_is_known_by_its_tied_weight():
    model = Decoder()
    model.head.weight = model.wte.weight
    split = split_parameters(model)
    assert split.table["wte.weight"].reason == "embedding, tied to head.weight"
    assert sum(row.name in ("wte.weight", "head.weight") for row in split.table) == 1
    assert sum(parameter is model.wte.weight for parameter in split.adamw[0]["params"]) == 1


def test_tied_linear_layers_are_one_parameter():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    (row,) = split_parameters(model).table
    assert (row.name, row.matrices, row.reason) == ("0.weight", 1, "linear layer, tied to 1.weight")


def test_fused_and_lora_matrices_go_to_muon():
    model = Decoder()
    model.w13 = nn.Linear(8, 32, bias=False)
    model.lora = nn.ModuleDict({"A": nn.Linear(8, 2, bias=False), "B": nn.Linear(2, 8, bias=False)})
    model.lora_raw = Stack(2, 8, name="lora_A")
    split = split_parameters(model, row_blocks={"w13.weight": 16})
    for name, matrices in {"w13.weight": 2, "lora.A.weight": 1, "lora.B.weight": 1, "lora_raw.lora_A": 1}.items():
        assert (split.table[name].optimizer, split.table[name].matrices) == ("Muon", matrices)
    assert split.muon[0]["row_blocks"] == {"w13.weight": 16}


def test_every_parameter_is_in_one_group_in_the_models_order():
    model = Decoder()
    split = split_parameters(model)
    (muon,), (adamw,) = split.muon, split.adamw
    ours = dict(zip(muon["param_names"] + adamw["param_names"], muon["params"] + adamw["params"], strict=True))
    theirs = dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in theirs)
    assert [row.name for row in split.table] == list(theirs)


def test_frozen_parameters_go_to_neither_unless_asked_for():
    model = Decoder()
    model.layer[1].requires_grad_(False)
    split = split_parameters(model)
    assert split.table["layer.1.weight"].optimizer == "-"
    assert "layer.1.weight" not in split.muon[0]["param_names"]
    assert split.table.summary == "Muon: 1 parameter, 1 matrix; AdamW: 5 parameters, 2 frozen"
    assert routes(model, muon=["layer.1.weight"])["layer.1.weight"] == "Muon"


def test_patterns_send_parameters_either_way():
    split = split_parameters(Decoder(), muon=["head.*"], adamw=["layer.1.*", "layer.3.weight"])
    assert split.muon[0]["param_names"] == ["head.weight"]
    assert split.table["layer.1.weight"].reason == "asked for by 'layer.1.*'"
    assert split.table["layer.3.weight"].optimizer == "AdamW"


@pytest.mark.parametrize("option", ["muon", "adamw"])
def test_pattern_that_matches_nothing_is_refused(option):
    with pytest.raises(ValueError, match=f"{option} pattern 'embed' matches no parameter"):
        split_parameters(Decoder(), **{option: ["embed"]})


def test_one_string_for_patterns_is_refused():
    with pytest.raises(
        TypeError, match=r"muon is 'head.weight': give a sequence of name patterns, as \['head.weight'\]"
    ):
        split_parameters(Decoder(), muon="head.weight")


def test_parameter_matched_both_ways_is_refused():
    with pytest.raises(ValueError, match=r"'head.weight' is matched both ways, by muon pattern 'head\.\*' and adamw"):
        split_parameters(Decoder(), muon=["head.*"], adamw=["*.weight"])


@pytest.mark.parametrize(("pattern", "shape"), [("layer.1.bias", r"\(24,\)"), ("conv.weight", r"\(4, 8, 3, 3\)")])
def test_no_matrix_is_sent_to_muon_even_when_asked(pattern, shape):
    model = Decoder()
    model.conv = nn.Conv2d(8, 4, 3)
    with pytest.raises(ValueError, match=f"'{pattern}' has shape {shape}"):
        split_parameters(model, muon=[pattern])


def test_row_blocks_cut_matrices_and_each_slice_of_a_stack():
    model = Decoder()
    model.experts = Stack(4, 16, 8)
    table = split_parameters(model, row_blocks={"layer.1.weight": (12, 8, 4), "experts.*": 8}).table
    assert (table["layer.1.weight"].matrices, table["experts.weight"].matrices) == (3, 8)
    assert table["layer.1.weight"].reason == "linear layer, cut into 3 of 12, 8, 4 rows"
    assert table["experts.weight"].reason == "stack of 4 matrices of Stack, cut into 2 of 8 rows"


def test_row_blocks_that_match_nothing_or_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match=r"row_blocks pattern '\*\.wq\.weight' matches no parameter"):
        split_parameters(Decoder(), row_blocks={"*.wq.weight": 4})
    with pytest.raises(ValueError, match=r"'head\.weight', which Muon does not get"):
        split_parameters(Decoder(), row_blocks={"head.*": 5})
    with pytest.raises(ValueError, match=r"does not add up on parameter 'layer\.1\.weight'"):
        split_parameters(Decoder(), row_blocks={"layer.1.weight": 7})


def test_model_without_matrices_is_refused():
    with pytest.raises(ValueError, match=r"(?s)flattened.*no matrix"):
        split_parameters(nn.LayerNorm(8))
    flat = Decoder()
    flat.layer = nn.ParameterList([torch.randn(100)])
    with pytest.raises(ValueError, match="flattened"):
        split_parameters(flat)
    assert split_parameters(Decoder(), adamw=["layer.*"]).muon == []  # asked for


def test_names_are_those_of_the_bare_model_under_wrappers():
    plain = routes(Decoder(), muon=["layer.1.weight"])
    assert routes(torch.compile(Decoder(), backend="eager"), muon=["layer.1.weight"]) == plain
    wrapped = Decoder()
    wrapped.layer[1] = checkpoint_wrapper(wrapped.layer[1])
    wrapped.head = torch.compile(wrapped.head, backend="eager")
    assert [name for name, _ in wrapped.named_parameters()] != list(plain)
    assert routes(wrapped, muon=["layer.1.weight"]) == plain
    declares = Declares()
    declares.wte, declares.head = checkpoint_wrapper(declares.wte), checkpoint_wrapper(declares.head)
    assert routes(declares) == routes(Declares())


def test_model_on_meta_is_routed_alike():
    with torch.device("meta"):
        model = Decoder()
    assert routes(model) == routes(Decoder())


def test_table_prints_in_columns():
    lines = str(split_parameters(Decoder(), row_blocks={"layer.1.weight": 12}).table).splitlines()
    assert lines[0].split() == ["name", "shape", "matrices", "optimizer", "reason"]
    assert lines[-1] == "Muon: 2 parameters, 3 matrices; AdamW: 6 parameters"
    row = next(line for line in lines if line.startswith("layer.1.weight"))
    assert row.split(maxsplit=6) == [
        "layer.1.weight",
        "24",
        "x",
        "8",
        "2",
        "Muon",
        "linear layer, cut into 2 of 12 rows",
    ]
    for column in ("optimizer", "reason"):
        start = lines[0].index(column)
        assert all(line[start - 2 : start] == "  " and line[start] != " " for line in lines[:-1])


def test_table_is_html_in_a_notebook_and_escapes_names():
    model = Decoder()
    model.add_module("a<b", nn.Linear(8, 16, bias=False))
    page = split_parameters(model).table._repr_html_()
    cells = re.findall(r"<td ([^>]*)>([^<]*)</td>", page)
    assert [text for _, text in cells[-5:]] == ["a&lt;b.weight", "16 x 8", "1", "Muon", "linear layer"]
    assert [kind.split()[0] for kind, _ in cells[-5:]] == [
        f'class="{kind}"' for kind in ["text", "text", "number", "text", "text"]
    ]
    assert page.count("<tr>") == 1 + len(list(model.named_parameters()))


def test_a_split_shows_itself_without_its_tensors():
    split = split_parameters(Decoder())
    assert repr(split) == f"<Split: {split.table.summary}>"
    assert split._repr_html_() == split.table._repr_html_()
