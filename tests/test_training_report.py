"""The training report: two optimizers side by side, a resume that is checked, tables, figures, sentences, notebook."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import torch
from executed import Executed
from matplotlib.colors import to_hex

from distmuon import checkpoint
from distmuon.profiling.orthogonality import departure
from distmuon.profiling.training import ResumeError, Training, train
from distmuon.profiling.training_ranks import Settings
from distmuon.studies import training_plots as plots
from distmuon.studies import training_tables as tables

WEIGHTS = ("layers.0.attention.wq.weight", "layers.1.moe.experts.w1")
SMALL = Settings(ranks=2, ep=2, steps=6, tokens=8, weights=WEIGHTS, every=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("training") / "out"
    progress = StringIO()
    train(SMALL, out, progress=progress)
    assert "step 6 of 6: DistMuon" in progress.getvalue()
    assert "step 6 of 6: resumed" in progress.getvalue()
    return out


@pytest.fixture
def found(folder: Path) -> Training:
    return Training.read(folder)


def tampered(folder: Path, tmp_path: Path, change: object) -> Path:
    """A copy of the results in which ``change(the resumed run of rank 1)`` was done."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    file = copy / "resumed/results.json"
    content = json.loads(file.read_text())
    change(content["ranks"][1]["resumed"])
    file.write_text(json.dumps(content))
    return copy


def test_both_start_alike_and_the_resumed_run_is_the_one_that_never_stopped(found: Training, folder: Path) -> None:
    steps = found.steps().set_index(["run", "step"])
    assert steps.loc[("DistMuon", 0), "loss"] == steps.loc[("AdamW", 0), "loss"]
    assert steps.loc[("DistMuon", 1), "loss"] != steps.loc[("AdamW", 1), "loss"]
    resumed = steps.loc["resumed"]
    assert list(resumed.index) == [3, 4, 5]
    assert resumed["loss"].tolist() == steps.loc["DistMuon", "loss"].loc[3:].tolist()
    assert (steps[["forward_ms", "step_ms"]] > 0).all(axis=None)
    elapsed = steps.loc["AdamW", "elapsed_s"]
    assert elapsed[0] == 0
    assert elapsed.is_monotonic_increasing
    assert checkpoint.latest(folder / "trained") == folder / "trained/checkpoint"
    assert found.ranks["DistMuon"][0]["digest"] != found.ranks["DistMuon"][1]["digest"]


def test_a_resume_that_differs_is_an_error(folder: Path, tmp_path: Path) -> None:
    def lose_a_bit(run: dict) -> None:
        run["steps"][1]["loss"] += 1e-7

    with pytest.raises(ResumeError, match=r"rank 1 trained .*'step': 4.* without a stop and"):
        Training.read(tampered(folder, tmp_path / "a", lose_a_bit))
    with pytest.raises(ResumeError, match="rank 1 ended with other parameters"):
        Training.read(tampered(folder, tmp_path / "b", lambda run: run.update(digest="0")))
    with pytest.raises(ValueError, match="shorter"):
        Training.read(tampered(folder, tmp_path / "c", lambda run: run["steps"].pop()))


def test_what_is_watched_is_the_first_matrix_of_a_parameter(found: Training) -> None:
    spectra = found.spectra()
    numbers = spectra[(spectra["run"] == "AdamW") & (spectra["time"] == "end")].groupby("weight").size()
    assert numbers.to_dict() == {WEIGHTS[0]: 24, WEIGHTS[1]: 32}  # a head of 24 rows, an expert of 32
    start = spectra[spectra["time"] == "start"].set_index(["run", "weight", "index"])["value"]
    assert start["DistMuon"].equals(start["AdamW"])
    looks = found.looks()
    assert looks.groupby(["run", "weight"])["step"].apply(list).map(tuple).unique().tolist() == [(0, 2, 4)]
    departures = looks.groupby("run")["departure"].median()
    assert departures["DistMuon"] < departures["AdamW"]
    first = looks[(looks["run"] == "AdamW") & (looks["step"] == 0)]
    assert first["update_rms"].tolist() == pytest.approx([SMALL.adamw_lr] * 2, rel=0.01)  # sign of the gradient


def test_a_training_shows_itself_as_a_table(found: Training) -> None:
    assert repr(found) == "<Training: tiny on 2 ranks, 6 steps each, resumed at 3>"
    assert '>resumed</td><td class="number">3</td>' in found._repr_html_()


def test_memory_adds_up(found: Training) -> None:
    memory = found.memory().set_index(["run", "rank"])
    adamw = memory.loc["AdamW"]
    assert (adamw["optimizer state"] > 2 * adamw["parameters"]).all()  # two moments, and a step count each
    assert (memory.loc["DistMuon", "optimizer state"] < adamw["optimizer state"]).all()
    assert (adamw["exchange buffers"] == 0).all()
    table = tables.memory_table(found)
    kinds = ["parameters", "gradients", "optimizer state", "exchange buffers"]
    assert table["total (KiB)"].tolist() == pytest.approx(memory[kinds].sum(axis=1).div(1024).tolist())


def test_tables_and_sentences_say_what_was_found(found: Training) -> None:
    losses = tables.losses(found)
    ends = losses[losses["step"] == 5].set_index("run")["smooth"]
    overview = tables.overview(found)
    assert overview["loss at the end"].tolist() == ends[["DistMuon", "AdamW"]].tolist()
    assert tables.weights_table(found)["weight"].tolist() == [WEIGHTS[0]] * 2 + [WEIGHTS[1]] * 2
    gaps = losses.pivot(index="step", columns="run", values="loss").eval("DistMuon - AdamW").loc[3:]
    assert tables.key_figures(found)["loss at the end (nats a token) with AdamW"] == ends["AdamW"]
    told = tables.conclusion(found)
    assert f"DistMuon's loss is lower than AdamW's in {(gaps < 0).sum()} of the last 3 steps" in told
    assert f"the last of 6 steps comes to {ends['DistMuon']:.2f} and {ends['AdamW']:.2f}" in told
    assert "checkpoint at step 3, DistMuon's run goes on exactly: loss and gradient norm of 3 steps" in told
    assert f"holds {overview['optimizer state (KiB a rank)'][0]:,.0f} KiB of state" in told


def test_figures_have_units_and_each_optimizer_its_colour(found: Training) -> None:
    by_step, by_time = plots.loss_curves(tables.losses(found)).axes
    assert [by_step.get_xlabel(), by_time.get_xlabel()] == ["step", "own time after the first step (s)"]
    labels = [text.get_text() for text in by_step.get_legend().get_texts()]
    assert labels == ["DistMuon", "AdamW", "DistMuon, resumed at 3"]
    assert len(plots.updates_and_norms(found.looks()).axes) == 2 * len(WEIGHTS)
    left, _ = plots.singular_values(found.spectra()).axes
    colours = {line.get_label(): to_hex(line.get_color()) for line in left.lines}
    assert colours == {"start, both": "#999999", "DistMuon": "#0072b2", "AdamW": "#e69f00"}


def test_departure_is_free_of_scale_and_0_for_what_is_orthogonal() -> None:
    matrix = torch.linalg.qr(torch.randn(9, 9, dtype=torch.float64))[0][:4]
    assert departure(1e-6 * matrix) == pytest.approx(0, abs=1e-9)
    one = torch.outer(torch.arange(1.0, 5.0), torch.ones(7))
    assert [departure(one), departure(torch.zeros(4, 7))] == pytest.approx([3**0.5] * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workload": "tinny"}, "unknown workload 'tinny'; did you mean 'tiny'"),
        ({"weights": ["layers.0.attention.wp.weight"]}, "unknown weight 'layers.0.attention.wp.weight'; did you mean"),
        ({"steps": 3}, "steps must be 4 or more, not 3"),
        ({"ep": 3}, "ranks=4 is not divisible by ep=3"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
    ],
)
def test_what_cannot_be_trained_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**change)


def test_a_folder_that_holds_a_run_is_refused(folder: Path) -> None:
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(SMALL, folder)


@pytest.mark.slow
def test_the_notebook_runs_with_small_parameters(executed: Callable[[str], Executed]) -> None:
    found = executed("05_training")
    assert "the parameters of all 2 ranks are equal to the last bit." in found.run.mark["conclusion"]
    assert (found.files / "trained/checkpoint/.metadata").exists()
    assert found.html.count("<figure>") == 3
