"""Totals over ranks are those of every rank's plan; owners balance over the step; planning stays quick at scale."""

from __future__ import annotations

import math

import pytest
from generated import jobs
from hypothesis import given, settings
from hypothesis import strategies as st

from distmuon import VARIANTS
from distmuon.planning.matrices import gemm_cost
from distmuon.planning.options import PlanOptions
from distmuon.planning.placement import ParameterSpec
from distmuon.planning.plan import plan_step
from distmuon.planning.totals import step_totals
from distmuon.workloads.config import get_workload
from distmuon.workloads.storage import get_buckets, muon_parameters


def check(parameters: list[ParameterSpec], options: PlanOptions) -> None:
    """Compare with the plan of each rank."""
    totals = step_totals(parameters, options)
    for position, rank in enumerate(totals.ranks):
        plan = plan_step(parameters, rank, options)
        rows = plan.report([rank])
        assert totals.sent_bytes()[position] == sum(row["sent_bytes"] for row in rows)
        received = sum(stage.out_received[position] + stage.back_received[position] for stage in totals.stages)
        assert received == sum(row["received_bytes"] for row in rows)
        batches = [batch for stage in plan.stages for batch in stage.batches]
        assert totals.cost()[position] == sum(batch.matrices * gemm_cost(batch.rows, batch.cols) for batch in batches)
        stored = sum(math.prod(spec.local_shape(rank)) for spec in parameters)
        assert sum(stage.local_numel[position] for stage in totals.stages) == stored
        exchanges = [stage.exchange for stage in plan.stages if stage.exchange]
        owned = [
            matrix.numel
            for exchange in exchanges
            for matrix, owner in zip(exchange.matrices, exchange.owners, strict=True)
            if exchange.ranks[owner] == rank
        ]
        assert sum(stage.owned_numel[position] for stage in totals.stages) == sum(owned)
        assert sum(stage.matrices[position] for stage in totals.stages) == len(owned)
        called = [batch for batch in batches if batch.in_work and not batch.ready]
        assert sum(stage.batches[position] for stage in totals.stages) <= len(called)  # some are cut in parts


@pytest.mark.parametrize("variant", VARIANTS)
@given(job=jobs(), share_replicas=st.sampled_from([None, True, False]))
@settings(max_examples=60, deadline=None)
def test_totals_are_those_of_the_plans_of_all_ranks(variant, job, share_replicas):
    check(job[0], PlanOptions(variant=VARIANTS[variant], share_replicas=share_replicas))


@pytest.mark.parametrize(("name", "ranks", "ep"), [("kimi-debug", 4, 2), ("moonlight-16b", 8, 4)])
@pytest.mark.parametrize("buckets", ["published", "auto"])
def test_totals_of_a_workload_are_those_of_its_plans(name, ranks, ep, buckets):
    workload = get_workload(name)
    check(muon_parameters(workload, ranks=ranks, ep=ep), PlanOptions(get_buckets(workload, buckets)))


@pytest.mark.parametrize(("ranks", "most"), [(8, 1.05), (64, 1.15)])
@pytest.mark.parametrize("buckets", ["published", "auto"])
def test_owners_of_moonlight_balance_over_the_step(ranks, most, buckets):
    workload = get_workload("moonlight-16b")
    parameters = muon_parameters(workload, ranks=ranks, ep=8)
    assert step_totals(parameters, PlanOptions(get_buckets(workload, buckets))).imbalance() <= most


@pytest.mark.parametrize(("ranks", "most"), [(8, 1.05), (64, 1.15)])
def test_owners_of_a_dense_model_balance_over_the_step(ranks, most):
    parameters = muon_parameters(get_workload("qwen3-8b"), ranks=ranks, ep=1)
    assert step_totals(parameters).imbalance() <= most


def test_own_buckets_leave_few_ranks_waiting_for_the_busiest():
    """If all ranks waited for one another after each bucket, the step would take no more than 15 % longer."""
    for ranks in (8, 64):
        parameters = muon_parameters(get_workload("moonlight-16b"), ranks=ranks, ep=8)
        totals = step_totals(parameters)
        waiting = sum(int(stage.owned_cost.max()) for stage in totals.stages)
        whole = sum(int(stage.whole_cost.max()) for stage in totals.stages)
        assert waiting + whole <= 1.15 * totals.cost().double().mean()
