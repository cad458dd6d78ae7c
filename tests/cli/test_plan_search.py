"""`trainstep plan --minimize`: its answer, JSON, page, the file of options, exit codes and sentences about bad input."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sources import ROOT
from trainstep.cli import app
from trainstep.cli.running.search import _told_by
from trainstep.config.grid import grid_from_text
from trainstep.config.machine import gpu_named
from trainstep.config.parallel import ParallelConfig
from trainstep.config.parsing import build, fields_of
from trainstep.config.run import RunConfig
from trainstep.config.sweep import options_of_file
from trainstep.plan.prediction import predict
from trainstep.plan.search.search import search
from trainstep.plan.search.space import space_of
from trainstep.plan.time.calibration import calibration_for
from trainstep.report.plan.search import search_tables

STEP = [
    "plan",
    "--model",
    "small",
    "--layers",
    "3",
    "--context",
    "512",
    "--precision",
    "bf16_autocast",
    "--gpu",
    "h200",
]
SEARCH = [*STEP, "--minimize", "time"]
NARROW = ["--recompute", "none", "--compile", "none", "--ops", "plain", "--update", "after_backward"]


def searched(capsys: pytest.CaptureFixture[str], *options: str) -> dict:
    assert app.run([*SEARCH, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_answer_comes_first_and_says_why_the_runner_up_lost(capsys: pytest.CaptureFixture[str]):
    assert app.run([*SEARCH, *NARROW, "--global-batch", "8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "Fastest that fits h200: capture step, attention trainstep, adamw trainstep, batch size 8, accumulation 1; "
    )
    assert "The runner-up, " in out
    assert " slower because of " in out
    for title in ("Single changes of the best", "What less memory costs in time", "What was searched"):
        assert title in out
    assert "combinations are allowed" in out


def test_a_long_search_says_at_once_what_it_does_and_how_long_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert app.run([*SEARCH, *NARROW]) == 0
    assert capsys.readouterr().err.splitlines()[0].startswith("searching by prediction, nothing runs: seconds")
    told: list[str] = []
    on_bounds = _told_by(told.append)
    on_bounds(8, 40_000, 0.4)
    on_bounds(8, 40_000, 3.0)
    on_bounds(1, 9, 0.5)
    assert told == [
        "40,000 combinations on 8 ranks have a bound; predicting the best takes at most about 12 s",
        "9 combinations on 1 rank have a bound; predicting the best takes at most about 2 s",
    ]
    assert app.run([*SEARCH, *NARROW, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_a_value_is_fixed_a_list_is_a_choice_and_the_rest_is_free(capsys: pytest.CaptureFixture[str]):
    out = searched(capsys, *NARROW, "--attention", "plain,sdpa")
    assert out["choices"]["attention"] == ["plain", "sdpa"]
    assert out["fixed"]["compile"] == "none"
    assert set(out["free"]) == {"capture", "adamw"}
    assert out["best"]["options"] == {"capture": "step", "attention": "sdpa", "adamw": "trainstep"}
    assert out["global_batch"] == 1


def test_combinations_without_a_time_are_left_out_and_said(capsys: pytest.CaptureFixture[str]):
    out = searched(capsys, *NARROW, "--ranks", "2", "--sync", "bucketed,torch_ddp", "--bucket-mib", "none")
    assert out["best"]["options"]["sync"] == "bucketed"
    [(reason, count)] = out["effort"]["without_prediction"].items()
    assert "what torch_ddp of torch holds is not known" in reason
    assert count == out["effort"]["combinations"] / 2


def test_steps_that_cannot_be_told_apart_come_with_the_command_that_measures_both(capsys: pytest.CaptureFixture[str]):
    fixed = ["--attention", "sdpa", "--adamw", "fused"]
    assert app.run([*SEARCH, *NARROW, *fixed, "--capture", "none", "--ranks", "2", "--sync", "bucketed,flat"]) == 0
    out = capsys.readouterr().out
    assert "cannot be told apart from the best by prediction: +" in out
    assert " ms). Measure both: `trainstep parallel " in out
    assert "slower because of" not in out.splitlines()[0]
    assert "A slow host may make it longer" in out
    assert "--sync bucketed,flat" in out.replace("--sync flat,bucketed", "--sync bucketed,flat")


def test_the_fewest_ranks_are_said_once_and_just_is_explained(capsys: pytest.CaptureFixture[str]):
    assert app.run([*STEP, *NARROW, "--minimize", "ranks", "--ranks", "2"]) == 0
    answer = capsys.readouterr().out.splitlines()[0]
    assert answer.startswith("Fewest ranks: 1, with the fastest that fits h200: ")
    assert "ranks 1" not in answer


def test_what_the_column_fits_means_is_said_below():
    h200 = calibration_for(gpu_named("h200"))
    assert h200 is not None
    named = {"model": ["small"], "layers": [2], "capture": ["none"], "compile": ["none"], "adamw": ["fused"]}
    found = search(space_of(named, global_batch=1, ranks=[1]), h200, gpu_memory_bytes=2**34, minimize="time")
    first, second = found.alternatives[:2]
    bound = predict(found.best.config, gpu_memory_bytes=2**34)
    just = predict(found.best.config, gpu_memory_bytes=bound.needed_bytes - 1)
    shown = replace(found, alternatives=(replace(first, prediction=just), replace(second, prediction=None)))
    table = search_tables(shown)[0]
    assert "just: it would take more memory than the GPU has, so the allocator returns cached memory" in table.note
    assert "\N{EN DASH}: its memory was not predicted, because it would be no better in any case." in table.note
    assert "just:" not in search_tables(found)[0].note


def test_nothing_that_fits_ends_with_1_and_the_least_memory(capsys: pytest.CaptureFixture[str]):
    command = ["plan", "--model", "2.7B", "--gpu-memory-gib", "8", "--peak-tflops", "300", "--bandwidth", "1"]
    assert app.run([*command, "--minimize", "time", *NARROW]) == 1
    out = capsys.readouterr().out
    assert out.startswith("Nothing fits the GPU (8.00 GiB): the least that was found is ")
    assert "more ranks (--ranks 2)" in out


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_verbs_read_the_file_of_options(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "best.toml"
    sync = ["--ranks", "2", "--sync", "fsdp,sharded_flat"] if ranks == 2 else []
    out = searched(
        capsys, "--capture", "none", "--compile", "none", "--global-batch", "4", *sync, "--out-config", str(path)
    )
    kind, verb = (ParallelConfig, "parallel") if ranks == 2 else (RunConfig, "bench")
    [values] = [
        {name: value for name, [value] in grid_from_text(options_of_file(path, fields_of(kind).keys())).items()}
    ]
    config = build(kind, values, where=verb)
    run = config.run if ranks == 2 else config
    best = out["best"]["options"]
    assert (run.model.layers, run.context, run.precision, run.device) == (3, 512, "bf16_autocast", "cuda")
    assert (run.batch_size, run.accumulation, run.ops) == (best["batch_size"], best["accumulation"], best["ops"])
    if ranks == 2:
        assert (config.ranks, config.sync.name) == (2, best["sync"])
    assert app.run([verb, "--config", str(path), "--device", "cpu", "--dry-run", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 1
    searched(capsys, "--capture", "none", "--compile", "none", "--out-config", str(path))
    assert app.run(["plan", "--config", str(path), "--gpu", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answer"]
    path.write_text(path.read_text().replace('"cuda"', '"cpu"'))
    assert app.run(["plan", "--config", str(path), "--gpu", "h200"]) == 2
    assert "device: this command takes cuda alone, not cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--minimize", "ranks", "--ranks", "2", "--reduce-dtype", "own,fp32"],
        ["--minimize", "ranks", "--ranks", "2", "--attention", "plain"],
        ["--minimize", "time", "--ranks", "1,2", "--sync", "flat,fsdp", "--global-batch", "2"],
        ["--minimize", "memory", "--ranks", "2", "--sync", "fsdp", "--reshard-after-forward", "true,false"],
    ],
)
def test_every_command_and_file_is_taken_by_its_verb(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "best.toml"
    assert app.run([*STEP, *NARROW, "--capture", "none", *options, "--json", "--out-config", str(path)]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["measure"]
    said = path.read_text().splitlines()[3].removeprefix("# For: ")
    for command in (*out["measure"], said):
        words = shlex.split(command)
        assert words[0] == "trainstep"
        words = [word for word in words[1:] if word not in ("--device", "cuda")]
        assert app.run([*words, "--device", "cpu", "--dry-run", "--json"]) == 0, capsys.readouterr().err
        capsys.readouterr()


def test_the_page_has_the_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "search.html"
    searched(capsys, *NARROW, "--global-batch", "8", "--page", str(page))
    text = page.read_text()
    assert "What less memory costs in time" in text
    assert "Fastest that fits h200" in text
    assert 'id="chart-0"' in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--minimize", "speed"], "minimize: 'speed' is not known; known: time, memory, ranks"),
        (["--minimize", "time", "--heads", "6,12"], "heads: its values are different work, not a choice"),
        (["--minimize", "time", "--batch-size", "1,2"], "batch_size: its values make steps of different sizes"),
        (["--minimize", "time", "--global-batch", "0"], "global_batch: must be a whole number from 1 to 16,777,216"),
        (["--minimize", "time", "--global-batch", "100000000000000000000"], "global_batch: must be a whole number from 1 to"),
        (["--minimize", "time", "--global-batch", "6", "--batch-size", "4"], "global_batch: 6 sequences are not ranks x"),
        (["--minimize", "time", "--sync", "fsdp"], "sync: has no effect on one rank"),
        (["--minimize", "time", "--ranks", "2", "--sync", "none,fsdp"], "sync: with none each rank trains by itself"),
        (["--minimize", "time", "--compile", "none,blok"], "compile: 'blok' is not known"),
        (["--minimize", "time", "--tokens", "1e9"], "tokens: has no effect on --minimize"),
        (["--minimize", "time", "--mode", "forward"], "mode: a search is of whole steps"),
        (["--minimize", "ranks", "--ranks", "2,4"], "ranks: --minimize ranks tries 1, 2, 4... up to one number"),
        (["--minimize", "time", "--page", "both", "--out-config", "both"], "out_config: both is the page's file too"),
        (["--minimize", "time", "--out-config", __file__], "does not look like a file of options that this version"),
        (["--minimize", "time", "--nodes", "2", "--sync", "fsdp"], "nodes: --minimize searches one node; plan its result with --n"),
        (["--minimize", "time", "--ranks", "16", "--nodes", "2"], "nodes: --minimize searches one node; plan its result with --n"),
        (["--minimize", "time", "--rails", "2", "--ranks", "4"], "rails: --minimize searches one node; plan its result with --r"),
        (["--minimize", "time", "--bucket-mib", "25"], "bucket_mib: has no effect with sync none"),
        (["--minimize", "time", "--ranks", "4", "--sync", "fsdp", "--shard-ranks", "2"],
            "shard_ranks: --minimize does not compare groups of ranks; leave it out, or plan them as a list"),
        (["--global-batch", "8"], "global_batch: has no effect without --minimize"),
        (["--page", "x.html"], "page: has no effect without --minimize"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert app.run([*STEP, *options]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert "Traceback" not in err


def test_a_search_needs_a_known_gpu_and_model_and_something_to_choose(capsys: pytest.CaptureFixture[str]):
    assert app.run(["plan", "--minimize", "time", "--gpu", "h9000"]) == 2
    assert "h9000" in capsys.readouterr().err
    assert app.run(["plan", "--minimize", "time", "--gpu", "h200", "--model", "a.b:c"]) == 2
    assert "minimize: the time of a model of your own has no formulas" in capsys.readouterr().err
    assert app.run(["plan", "--minimize", "time"]) == 2
    assert "minimize: needs a GPU's memory and speed; name --gpu" in capsys.readouterr().err
    assert app.run(["plan", "--minimize", "time", "--gpu-memory-gib", "8"]) == 2
    assert "minimize: needs a GPU's memory and speed" in capsys.readouterr().err
    fixed = ["--attention", "sdpa", "--adamw", "fused", "--capture", "none"]
    assert app.run([*SEARCH, *NARROW, *fixed]) == 2
    assert "minimize: every option has one value, so nothing is left to choose" in capsys.readouterr().err


def test_a_search_imports_no_torch():
    code = f"import sys; from trainstep.cli import app; app.run({[*SEARCH, *NARROW]!r}); print('torch' in sys.modules)"
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.slow
def test_the_guides_example_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]):
    """An earlier guide had the answer of an older calibration."""
    guide = (ROOT / "docs/guide/plan.md").read_text()
    command = next(line for line in guide.splitlines() if line.endswith("--minimize time"))
    answer = guide.split(f"{command}\n```\n\n```text\n")[1].split("```")[0]
    assert app.run(command.split()[1:]) == 0
    assert " ".join(answer.split()) in " ".join(capsys.readouterr().out.split())
