"""Bad input that a rank sees by itself: a clear error that names what, where and what instead, before any exchange."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distmuon import DistMuon, matrix_rows, muon_with_adamw, plan_for, split_parameters
from distmuon.modelling import Assumptions
from distmuon.studies.scale import Job


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


@pytest.mark.parametrize("shape", [(4,), (64, 32, 3, 3)])
def test_parameters_that_are_no_matrices_are_refused(shape):
    with pytest.raises(ValueError, match=r"parameter 'conv' has shape .*Give it to AdamW"):
        DistMuon([("conv", weight(*shape))])


def test_integer_parameters_are_refused():
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(TypeError, match=r"parameter 'ids' is torch.int64"):
        DistMuon([("ids", parameter)])


def test_a_row_blocks_pattern_that_matches_nothing_is_refused():
    with pytest.raises(
        ValueError, match=r"row_blocks pattern '\*\.wk\.weight' matches no parameter; there are 1: a.wq.weight"
    ):
        DistMuon([("a.wq.weight", weight(8, 4))], row_blocks={"*.wk.weight": 4})


@pytest.mark.parametrize("blocks", [5, 16, (4, 3), (8, 8)])
def test_row_blocks_that_do_not_add_up_are_refused(blocks):
    with pytest.raises(ValueError, match=r"does not add up on parameter 'wq' of shape \(8, 4\): it has 8 rows"):
        DistMuon([("wq", weight(8, 4))], row_blocks={"wq": blocks})


@pytest.mark.parametrize("blocks", [0, -4, "4", (4, 0, 4), (), True, (True, 7), 4.0])
def test_row_blocks_that_are_no_rows_are_refused(blocks):
    with pytest.raises((ValueError, TypeError), match=r"row_blocks\['wq'\] is .*: give positive rows"):
        DistMuon([("wq", weight(8, 4))], row_blocks={"wq": blocks})


def test_row_blocks_given_twice_and_differently_are_refused():
    group = {"params": [("wq", weight(8, 4))], "row_blocks": {"wq": 4}}
    with pytest.raises(ValueError, match="give it once"):
        DistMuon([group], row_blocks={"wq": 2})


def test_a_parameter_in_no_bucket_is_named():
    with pytest.raises(ValueError, match="parameter 'b' is in no bucket"):
        DistMuon([("a", weight(4, 4)), ("b", weight(4, 4))], buckets=[("a",)])


def test_a_bucket_pattern_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="buckets pattern 'c' matches no parameter"):
        DistMuon([("a", weight(4, 4))], buckets=[("a", "c")])


def test_an_unknown_variant_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="unknown variant 'batch'; did you mean 'batched'"):
        DistMuon([weight(4, 4)], variant="batch")


@pytest.mark.parametrize("blocks", ["wq", 4, {3: 4}, [("wq", 4)]])
def test_row_blocks_that_are_no_dict_of_patterns_are_refused(blocks):
    for options in ({"params": [("wq", weight(8, 4))], "row_blocks": blocks}, {"params": [("wq", weight(8, 4))]}):
        with pytest.raises(TypeError, match=r"row_blocks is .*: give a dict, name pattern -> rows"):
            DistMuon([options], row_blocks=None if "row_blocks" in options else blocks)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("learning_rate", "lr"), ("wd", "weight_decay"), ("row_block", "row_blocks"), ("ns_step", "ns_steps")],
)
def test_a_setting_of_a_group_that_is_misspelt_is_refused_with_the_nearest(key, meant):
    with pytest.raises(ValueError, match=f"unknown setting of a parameter group '{key}'; did you mean '{meant}'"):
        DistMuon([{"params": [weight(4, 4)], key: 1}])


def test_groups_may_carry_a_name_and_what_schedulers_keep_there():
    optimizer = DistMuon([{"params": [weight(4, 4)], "name": "experts", "initial_lr": 0.1}])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([], "empty parameter list"),
        ([{"params": []}], "there are no parameters"),
        ([{"weights": [1]}], "a parameter group needs 'params'; this one has 'weights'"),
    ],
)
def test_no_parameters_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        DistMuon(params)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": "x"}, "lr is 'x': give a number that is not negative, or a tensor of one"),
        ({"lr": None}, "lr is None: give a number"),
        ({"momentum": "x"}, "momentum is 'x': give a number"),
        ({"weight_decay": torch.ones(1)}, "weight_decay is tensor"),
        ({"lr": True}, "lr is True: give a number that is not negative, or a tensor of one"),
        ({"momentum": False}, "momentum is False: give a number"),
        ({"ns_steps": "5"}, "ns_steps is '5': give a whole number, 1 to 99"),
        ({"ns_steps": True}, "ns_steps is True: give a whole number"),
        ({"ns_steps": 5.0}, "ns_steps is 5.0: give a whole number"),
        ({"max_batch_bytes": "1 GiB"}, "max_batch_bytes is '1 GiB': give a whole number"),
        ({"max_batch_bytes": True}, "max_batch_bytes is True: give a whole number"),
        ({"buckets": 3}, "buckets is 3: give a list of tuples"),
        ({"buckets": "ab"}, "buckets is 'ab': give a list of tuples"),
        ({"buckets": ["a"]}, r"buckets\[0\] is 'a': give a sequence of name patterns"),
        ({"buckets": [("a",), 3]}, r"buckets\[1\] is 3: give a sequence of name patterns"),
        ({"buckets": [("a", 3)]}, r"buckets\[0\] is \('a', 3\): give a sequence of name patterns"),
    ],
)
def test_settings_of_another_type_are_named(setting, message):
    with pytest.raises(TypeError, match=message):
        DistMuon([weight(4, 4)], **setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0: give a finite number that is not negative"),
        ({"lr": float("nan")}, "lr is nan: give a finite number"),
        ({"lr": torch.tensor(float("inf"))}, "lr is inf: give a finite number"),
        ({"ns_coefficients": None}, "ns_coefficients is None: give a, b, c"),
        ({"max_batch_bytes": 0}, "max_batch_bytes is 0: give a whole number of at least 1"),
        ({"share_replicas": 0}, "share_replicas is 0: choose None, True or False"),
        ({"share_replicas": "yes"}, "share_replicas is 'yes': choose None, True or False"),
        ({"nesterov": 1}, "nesterov is 1: choose True or False"),
        ({"nesterov": None}, "nesterov is None: choose True or False"),
        ({"capturable": 1}, "capturable is 1: choose True or False"),
        ({"scale_free": "no"}, "scale_free is 'no': choose True or False"),
        ({"missing_gradients": None}, "unknown missing_gradients None; did you mean"),
        ({"ns_algorithm": 3}, "unknown ns_algorithm 3; did you mean"),
        ({"variant": 3}, "unknown variant 3; did you mean"),
        ({"ns_coefficients": (True, 1.0, 1.0)}, "ns_coefficients is"),
        ({"momentum_dtype": "bf16"}, "momentum_dtype is 'bf16': choose None, torch.bfloat16"),
        ({"eps": float("inf")}, "eps is inf: give a finite number that is not negative"),
        ({"lr": torch.ones(2)}, "lr is a tensor of 2 elements"),
        ({"momentum": -0.1}, "momentum is -0.1"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"adjust_lr_fn": "none"}, "adjust_lr_fn is 'none': choose None, 'original' or 'match_rms_adamw'"),
        ({"ns_steps": 100}, "ns_steps is 100: give a whole number, 1 to 99"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients is"),
        ({"ns_dtype": torch.float16}, "ns_dtype is torch.float16"),
    ],
)
def test_settings_out_of_range_are_named(setting, message):
    with pytest.raises(ValueError, match=message):
        DistMuon([weight(4, 4)], **setting)


@pytest.mark.parametrize("blocks", ["a", 4, {3: 4}, {"0.weight": "8"}])
def test_row_blocks_are_refused_where_a_model_is_split_too(blocks):
    for build in (split_parameters, muon_with_adamw):
        with pytest.raises(TypeError, match="row_blocks"):
            build(nn.Sequential(nn.Linear(4, 8)), row_blocks=blocks)
    with pytest.raises(TypeError, match="row_blocks"):
        matrix_rows("0.weight", (8, 4), blocks)


@pytest.mark.parametrize("patterns", ["0.*", 3, [3]])
def test_patterns_that_are_none_are_refused_where_a_model_is_split(patterns):
    with pytest.raises(TypeError, match=r"adamw is .*: give a sequence of name patterns"):
        split_parameters(nn.Sequential(nn.Linear(4, 8)), adamw=patterns)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"workload": 3}, ValueError, "unknown workload 3; did you mean"),
        ({"ranks": "4"}, TypeError, "ranks is '4': give a whole number of at least 1"),
        ({"ranks": True}, TypeError, "ranks is True: give a whole number"),
        ({"ranks": 0}, ValueError, "ranks is 0: give a whole number of at least 1"),
        ({"ranks": 4.0}, TypeError, "ranks is 4.0: give a whole number"),
        ({"ep": "2"}, TypeError, "ep is '2': give a whole number"),
        ({"ep": -1}, ValueError, "ep is -1: give a whole number of at least 1"),
        ({"replicas": None}, TypeError, "replicas is None: give a whole number"),
        ({"replicas": 0}, ValueError, "replicas is 0: give a whole number"),
        ({"rank": "0"}, TypeError, "rank is '0': give a whole number, 0 to 3"),
        ({"rank": True}, TypeError, "rank is True: give a whole number, 0 to 3"),
        ({"rank": -1}, ValueError, "rank is -1: give a whole number, 0 to 3"),
        ({"share_replicas": 1}, ValueError, "share_replicas is 1: choose None, True or False"),
        ({"buckets": 3}, TypeError, "buckets is 3: give a list of tuples"),
        ({"variant": None}, ValueError, "unknown variant None; did you mean"),
    ],
)
def test_what_a_plan_is_asked_for_is_checked_by_name(asked, error, message):
    for ask in (plan_for, Job):
        with pytest.raises(error, match=message):
            ask(**{"workload": "tiny", "ranks": 4, "ep": 2} | asked)


@pytest.mark.parametrize(
    ("assumed", "error", "message"),
    [
        ({"gemm_flops": 0.0}, ValueError, "assumption gemm_flops is 0.0: give a finite number above 0"),
        ({"gemm_flops": float("nan")}, ValueError, "assumption gemm_flops is nan: give a finite number above 0"),
        ({"far_bandwidth": float("inf")}, ValueError, "assumption far_bandwidth is inf: give a finite number above 0"),
        ({"near_bandwidth": "1e9"}, TypeError, "assumption near_bandwidth is '1e9': give a number above 0"),
        ({"message_us": -1.0}, ValueError, "assumption message_us is -1.0: give a finite number that is not negative"),
        ({"launch_us": True}, TypeError, "assumption launch_us is True: give a number"),
        ({"ranks_a_host": 8.0}, TypeError, "assumption ranks_a_host is 8.0: give a whole number of at least 1"),
        ({"ranks_a_host": 0}, ValueError, "assumption ranks_a_host is 0: give a whole number of at least 1"),
    ],
)
def test_assumptions_of_the_model_are_checked_by_name(assumed, error, message):
    with pytest.raises(error, match=message):
        Assumptions(**assumed)
    assert Assumptions(message_us=0.0, launch_us=0).launch_us == 0


def test_mixed_devices_are_refused():
    other = nn.Parameter(torch.empty(4, 4, device="meta"))
    with pytest.raises(ValueError, match=r"on several devices \('a' on cpu, 'b' on meta\)"):
        DistMuon([("a", weight(4, 4)), ("b", other)])


def test_two_parameters_of_one_name_are_refused():
    groups = [{"params": [("a", weight(4, 4))]}, {"params": [("a", weight(4, 4))]}]
    with pytest.raises(ValueError, match="two parameters are named 'a'"):
        DistMuon(groups)


def test_half_precision_with_few_exponents_is_refused():
    with pytest.raises(TypeError, match=r"parameter 'a' is torch.float16: give bfloat16"):
        DistMuon([("a", nn.Parameter(torch.zeros(4, 4, dtype=torch.float16)))])


def test_groups_without_names_may_be_several():
    optimizer = DistMuon([{"params": [weight(4, 4)]}, {"params": [weight(4, 4)], "lr": 0.1}])
    optimizer.add_param_group({"params": [weight(8, 4)]})
    assert sum(row["matrices"] for row in optimizer.plan.report()) == 3


def test_a_missing_gradient_is_named():
    optimizer = DistMuon([("a", weight(4, 4))])
    with pytest.raises(ValueError, match="parameter 'a' has no gradient on this rank"):
        optimizer.step()


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 4, 4)])
def test_a_parameter_without_elements_is_refused_by_name(shape):
    with pytest.raises(ValueError, match=r"parameter 'a' of shape \(.*\) has no elements: leave it out"):
        DistMuon([("a", nn.Parameter(torch.zeros(shape)))])


def test_a_process_group_of_another_type_is_refused():
    with pytest.raises(TypeError, match="process_group is 'x': give a process group, or None"):
        DistMuon([("a", nn.Parameter(torch.zeros(4, 4)))], process_group="x")


def test_what_is_given_whole_says_what_to_give():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"params is a module: give its matrices, as split_parameters\(model\)\.muon"):
        DistMuon(model)
    with pytest.raises(TypeError, match=r"params is a Split: give its \.muon"):
        DistMuon(split_parameters(model))
    with pytest.raises(TypeError, match="model is a generator: give the module whose parameters to split"):
        split_parameters(model.parameters())
