"""`trainstep plan --fit`: the largest value that fits, its margin, the trial, and sentences about bad input."""

import json

import pytest

from trainstep.cli import app
from trainstep.config.parallel import RanksConfig, SyncConfig
from trainstep.config.parsing import build
from trainstep.config.plan import PlanConfig
from trainstep.costs.strategies import BASELINE
from trainstep.plan.prediction import predict
from trainstep.plan.search import fit as fit_module
from trainstep.plan.search.fit import largest_fit, with_value

STEP = ["plan", "--model", "small", "--layers", "2", "--precision", "bf16_autocast", "--gpu-memory-gib", "4"]
FREE_LAYERS = ["plan", "--model", "small", "--precision", "bf16_autocast", "--gpu-memory-gib", "4"]
GIB = 2**30


def config() -> RanksConfig:
    options = {"model": "small", "layers": 2, "precision": "bf16_autocast", "sync": BASELINE}
    found: RanksConfig = build(PlanConfig, options, where="plan")
    return found


@pytest.mark.parametrize("field", ["batch_size", "context", "layers"])
def test_the_next_value_does_not_fit(field: str):
    found = largest_fit(config(), field, gpu_memory_bytes=2 * GIB)
    assert found.surely is not None
    assert found.probably is not None
    assert found.above is not None
    assert 1 <= found.surely.value <= found.probably.value == found.above.value - 1

    def at(value: int):
        return predict(with_value(config(), field, value), gpu_memory_bytes=2 * GIB)

    assert at(found.surely.value).high_bytes <= 2 * GIB < at(found.surely.value + 1).high_bytes
    assert at(found.probably.value).needed_bytes <= 2 * GIB < at(found.above.value).needed_bytes


def test_the_search_ends_at_its_bound_and_says_at_least(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(fit_module.BOUNDS, "batch_size", 5)
    found = largest_fit(config(), "batch_size", gpu_memory_bytes=60 * GIB)
    assert found.surely is not None
    assert found.surely.value == 5
    assert found.above is None
    assert app.run([*STEP, "--fit", "batch_size"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("The largest batch size that fits the GPU (4.00 GiB) is at least 5: it needs ")
    assert "The search ends at 5." in out
    assert "By formula only: on a machine with this GPU, --verify runs one trial" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith(("surely", "probably"))] == [
        ["surely", "5"]
    ]


def test_the_largest_of_several_ranks(capsys: pytest.CaptureFixture[str]):
    assert app.run([*FREE_LAYERS, "--ranks", "2", "--sync", "fsdp", "--fit", "layers", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["fit"] == "layers"
    assert out["value"] == out["surely"]["value"] > 12
    assert out["spare_bytes"] > 0
    assert out["at_least"] is False
    assert out["verified"] is None


def test_the_largest_on_several_nodes_is_that_of_all_their_ranks(capsys: pytest.CaptureFixture[str]):
    values = []
    for ranks in (["--nodes", "2"], ["--ranks", "16"]):
        assert app.run([*STEP, *ranks, "--sync", "fsdp", "--fit", "batch_size", "--json"]) == 0
        values.append(json.loads(capsys.readouterr().out)["value"])
    assert values[0] == values[1] > 1


def test_nothing_that_fits_ends_with_1(capsys: pytest.CaptureFixture[str]):
    assert app.run(["plan", "--model", "2.7B", "--gpu-memory-gib", "8", "--fit", "batch_size"]) == 1
    assert capsys.readouterr().out.startswith("No batch size fits the GPU (8.00 GiB): even 1 needs ")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--fit", "heads"], "fit: 'heads' is not known; known: batch_size, context, layers"),
        (
            ["--fit", "batch_size", "--minimize", "time"],
            "fit: is another search than --minimize; leave one of them out",
        ),
        (["--fit", "batch_size", "--network-gbs", "50"], "network_gbs: has no effect on --fit"),
        (["--fit", "batch_size", "--batch-size", "4"], "batch_size: is what --fit searches; leave it out"),
        (["--fit", "batch_size", "--context", "64,128"], "context: --fit searches for one step; give one value"),
        (["--fit", "batch_size", "--page", "x.html"], "page: has no effect on --fit"),
        (["--fit", "batch_size", "--terms"], "terms: has no effect on --fit"),
        (["--fit", "batch_size", "--sync", "fsdp"], "sync: has no effect on one rank"),
        (
            ["--fit", "batch_size", "--nodes", "2", "--verify"],
            "verify: a trial runs on the GPUs here, whatever nodes says",
        ),
        (["--verify"], "verify: has no effect without --fit"),
    ],
)
def test_bad_input_is_one_sentence(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert app.run([*STEP, *options]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert "Traceback" not in err


def test_a_fit_needs_a_gpus_memory_and_our_model(capsys: pytest.CaptureFixture[str]):
    assert app.run(["plan", "--fit", "batch_size"]) == 2
    assert "fit: needs a GPU's memory; name --gpu or --gpu-memory-gib" in capsys.readouterr().err
    assert app.run(["plan", "--fit", "batch_size", "--gpu", "h200", "--model", "a.b:c"]) == 2
    assert "fit: a model of your own would be traced again for each value" in capsys.readouterr().err


def test_a_strategy_keeps_its_options():
    ranks = RanksConfig(ranks=2, sync=SyncConfig(name="fsdp", ahead=2), run=config().run)
    assert with_value(ranks, "context", 64).sync == ranks.sync
    assert with_value(ranks, "layers", 3).run.model.layers == 3  # type: ignore[union-attr]
