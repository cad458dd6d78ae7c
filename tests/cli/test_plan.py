"""`trainstep plan`: its answer, tables, JSON, exit codes and sentences about bad input."""

import json
from pathlib import Path

import pytest

from pseudo_terminal import on_terminal
from sources import ROOT
from trainstep.cli import app
from trainstep.cli.running import grades

RECORDS = Path(__file__).parents[2] / "results/h200"
FITTING = ["plan", "--model", "large", "--gpu", "h200"]


def test_a_step_that_fits_says_so_and_ends_with_0(capsys: pytest.CaptureFixture[str]):
    assert app.run(FITTING) == 0
    out = capsys.readouterr().out
    assert out.startswith("Fits: the step needs 1")
    assert "of h200 (140 GiB)" in out
    assert "Cut optimizer state first: `--ranks 2 --sync fsdp` saves" in out
    for title in ("Memory at each moment of a step", "Beside the allocator"):
        assert title in out


def test_a_step_that_does_not_fit_ends_with_1_and_says_what_would(capsys: pytest.CaptureFixture[str]):
    assert app.run(["plan", "--model", "8B", "--context", "32768", "--ranks", "2", "--gpu", "h200", "--json"]) == 1
    out = json.loads(capsys.readouterr().out)
    [row] = out["rows"]
    assert out["answer"][0]["verdict"].startswith("Does not fit: the step needs 59")
    assert row["fits"] is False
    assert row["spare_bytes"] < 0
    assert row["cuts"][0]["term"] == "activations"
    assert row["cuts"][-1]["fits"] is True
    options = [word for cut in row["cuts"] for word in cut["options"].split()]
    command = ["plan", "--model", "8B", "--context", "32768", "--ranks", "2", "--gpu", "h200", *options, "--json"]
    assert app.run(command) == 0, "the changes that it suggests make it fit"
    planned = json.loads(capsys.readouterr().out)["rows"][0]
    assert planned["needed_bytes"] == pytest.approx(row["cuts"][-1]["needed_bytes"], rel=0.02)


def test_as_few_narrow_blocks_are_advised_as_fit(capsys: pytest.CaptureFixture[str]):
    command = ["plan", "--model", "8B", "--context", "32768", "--batch-size", "1", "--ranks", "2", "--gpu", "h200"]
    command += ["--precision", "bf16", "--ops", "fused", "--attention", "trainstep", "--adamw", "trainstep", "--json"]
    command += ["--sync", "fsdp", "--recompute", "selective"]
    assert app.run(command) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    [cut] = row["cuts"]
    option, blocks = cut["options"].split()
    assert (option, cut["fits"]) == ("--narrow-blocks", True)
    assert row["tight"] is True
    for fewer, fits in ((0, True), (1, False)):
        assert app.run([*command, option, str(int(blocks) - fewer)]) == 0
        [row] = json.loads(capsys.readouterr().out)["rows"]
        assert (not row["tight"]) is fits


def test_categories_add_up_at_every_moment(capsys: pytest.CaptureFixture[str]):
    app.run([*FITTING, "--precision", "bf16_autocast", "--attention", "plain", "--json"])
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert [moment["moment"] for moment in row["moments"]] == [
        *("after init", "after forward", "after backward", "after grad_sync", "after optimizer", "after step", "backward"),
    ]  # fmt: skip
    for moment in row["moments"]:
        assert sum(moment["categories_bytes"].values()) == moment["allocated_bytes"]
        assert sum(moment["activations_by_op_bytes"].values()) == moment["categories_bytes"]["activations"]
        assert moment["allocated_bytes"] <= moment["reserved_bytes"]
    assert row["needed_bytes"] == row["peak_reserved_bytes"] + sum(row["outside_bytes"].values())
    low, high = row["interval_bytes"]
    assert low < row["needed_bytes"] < high


def test_lists_compare_steps(capsys: pytest.CaptureFixture[str]):
    assert app.run(["plan", "--model", "xl", "--ranks", "2", "--sync", "none,fsdp", "--gpu-memory-gib", "24"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 of 2 fits the GPU (24.0 GiB); least memory: sync fsdp, ")
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("none", "fsdp"))}
    assert "no" in rows["none"]
    assert "yes" in rows["fsdp"]
    assert app.run(["plan", "--model", "xl", "--context", "256,512", "--gpu-memory-gib", "8"]) == 1
    assert capsys.readouterr().out.startswith("None of 2 fits the GPU (8.00 GiB); least memory: context 256, ")
    assert app.run(["plan", "--model", "tiny", "--context", "32,64"]) == 0
    assert capsys.readouterr().out.startswith("2 steps; least memory: context 32, ")
    assert (
        app.run(["plan", "--model", "xl", "--context", "64,512", "--batch-size", "1,64", "--gpu", "h200", "--json"])
        == 0
    )
    [answer] = json.loads(capsys.readouterr().out)["answer"]
    assert answer["verdict"].startswith("3 of 4 fit h200; fastest that fits: batch size 64, context 64, ")
    assert answer["verdict"].endswith(" tokens/s.")


def test_terms_are_formulas_with_sources(capsys: pytest.CaptureFixture[str]):
    assert app.run(["plan", "--model", "tiny", "--terms", "--json"]) == 0
    terms = json.loads(capsys.readouterr().out)["terms"]
    [gate] = [term for term in terms if term["tensor"] == "gate"]
    assert gate == {
        "op": "mlp", "tensor": "gate", "formula": "2 x 4 B x N f", "bytes": 2 * 4 * 256 * 512,
        "source": "ops/reference.py swiglu",
    }  # fmt: skip
    assert all(term["source"] for term in terms)


def test_options_without_records_widen_the_interval(capsys: pytest.CaptureFixture[str]):
    def width(*options: str) -> float:
        app.run([*FITTING, *options, "--json"])
        [row] = json.loads(capsys.readouterr().out)["rows"]
        low, high = row["interval_bytes"]
        return float(high - low) / float(row["peak_reserved_bytes"])

    assert width() == pytest.approx(0.08)
    assert width("--accumulation", "2") == pytest.approx(0.08)
    assert width("--adamw", "loop") == pytest.approx(0.2)
    assert width("--recompute", "selective") == pytest.approx(0.08)
    assert width("--recompute", "selective", "--compile", "block") == pytest.approx(0.2)


def test_a_model_of_the_users_is_traced(capsys: pytest.CaptureFixture[str]):
    command = [
        "plan",
        "--model",
        "traced_models:gpt",
        "--batch-size",
        "2",
        "--context",
        "64",
        "--precision",
        "bf16_autocast",
    ]
    assert app.run([*command, "--gpu-memory-gib", "0.75", "--terms", "--json"]) == 1
    out = json.loads(capsys.readouterr().out)
    [row] = out["rows"]
    assert out["answer"][0]["verdict"].startswith("Does not fit: the step needs 0.796 GiB a GPU")
    after_forward = row["moments"][1]
    kept = ("activations", "autocast weight copies", "logits and loss")
    assert sum(term["bytes"] for term in out["terms"]) == sum(after_forward["categories_bytes"][name] for name in kept)
    [inputs] = [term for term in out["terms"] if term["op"] == "blocks.*.narrow" and term["tensor"] == "gelu"]
    assert (inputs["formula"], inputs["bytes"]) == ("3 x bfloat16 2 x 64 x 128", 3 * 2 * 2 * 64 * 128)
    products = {row["shape"]: row for row in out["work"] if (row["phase"], row["op"]) == ("forward", "mm")}
    head = products[f"1 x {2 * 64} x 96 x 32"]
    assert (head["calls"], head["flops"], head["dtype"]) == (1, 2 * 2 * 64 * 96 * 32, "bfloat16")
    assert any("trainstep's AdamW" in sentence for sentence in row["unseen"])
    assert app.run([*command, "--ranks", "2", "--sync", "none,sharded_flat,fsdp", "--recompute", "none,block"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("none", "sharded_flat", "fsdp")) for line in lines) == 6


def test_what_a_model_of_the_users_prints_is_no_part_of_the_answer(capsys: pytest.CaptureFixture[str]):
    assert app.run(["plan", "--model", "traced_models:misfed", "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "words that are no part of an answer" in printed.err
    assert "raises TypeError" in printed.err


def test_a_grade_is_markdown_with_its_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("captured", "ddp_medium_torch"):
        (tmp_path / f"{name}.jsonl").write_bytes((RECORDS / f"{name}.jsonl").read_bytes())
    assert app.run(["plan", "--grade", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("**Predicted peaks of 9 steps: allocated 0.0")
    assert "### The steps that are furthest off" in out
    assert "Not graded, 1 cell: sync: what torch_ddp of torch holds is not known" in out
    assert app.run(["plan", "--grade", str(tmp_path / "captured.jsonl"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 8
    for row in rows:
        assert row["predicted_allocated_bytes"] == pytest.approx(row["measured_allocated_bytes"], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "h20"], "gpu: 'h20' is not known (did you mean h200?); known: b200, gh200, h200"),
        (["--gpu-memory-gib", "0"], "gpu_memory_gib: must be a positive number of GiB, not 0"),
        (["--heads", "7"], "heads: 7 does not divide d_model 768; 6 would"),
        (
            ["--model", "package.module:build"],
            "model: package.module:build cannot be imported: No module named 'package'",
        ),
        (
            ["--model", "traced_models:branching"],
            "model: traced_models:branching needs data to be traced: traced_models.py",
        ),
        (["--model", "traced_models:gpt", "--ops", "fused"], "ops: a model of your own brings its own ops"),
        (["--sync", "fsdp"], "sync: has no effect on one rank; add --ranks 2 or more"),
        (["--ranks", "2", "--sync", "torch_ddp"], "sync: what torch_ddp of torch holds is not known; take bucketed"),
        (["--ranks", "2", "--sync", "none", "--bucket-mib", "4"], "bucket_mib: has no effect with sync none"),
        (["--attention", "sdpa_math"], "attention: sdpa_math has no formulas"),
        (["--context", "1,2", "--terms"], "terms: are those of one step"),
        (["--grade", "nowhere"], "grade: nowhere does not exist; give a file of records"),
        (["--grade", "nowhere", "--model", "xl"], "model: has no effect on --grade"),
        (["--context", ",".join(map(str, range(1, 300)))], "plan: 299 steps are too many to compare"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert app.run(["plan", *arguments]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert sentence in err[0]


def test_a_long_grade_says_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A third of the bytes took ten seconds: twenty are left."""
    clock, told = iter((0.0, 0.0, 2.0, 10.0)), list[str]()
    monkeypatch.setattr(grades.time, "monotonic", lambda: next(clock))
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_text("x" * 4_000_000)
    on_file = grades._progress(files, told.append)
    for done in range(3):
        on_file(done)
    assert told == [
        "predicting the steps of 3 files of records again: about 30 s",
        "2 of 3 files of records: about 5 s left",
    ]


def test_a_grade_on_a_terminal_fits_it(tmp_path: Path):
    (tmp_path / "captured.jsonl").symlink_to(RECORDS / "captured.jsonl")
    code, text = on_terminal(["-m", "trainstep", "plan", "--grade", "captured.jsonl"], 80, folder=tmp_path)
    assert code == 0
    assert text.startswith("Predicted peaks of ")
    assert "| " not in text
    assert max(map(len, text.splitlines())) <= 80


def test_records_without_a_step_cannot_be_graded(capsys: pytest.CaptureFixture[str]):
    assert app.run(["plan", "--grade", str(RECORDS / "flash.jsonl")]) == 2
    assert "flash.jsonl holds no step that can be graded" in capsys.readouterr().err


def test_a_known_gpu_has_a_time_with_an_interval_and_its_calibration(capsys: pytest.CaptureFixture[str]):
    options = ["--precision", "bf16_autocast", "--compile", "block", "--tokens", "1e9"]
    assert app.run([*FITTING, *options]) == 0
    out = capsys.readouterr().out
    assert "A step takes" in out
    assert "GPU-hours" in out
    assert "Calibration: shipped, NVIDIA H200" in out
    widths = {}
    for gpu in ("h200", "h100"):
        app.run(["plan", "--model", "large", "--gpu", gpu, "--capture", "step", *options, "--json"])
        [row] = json.loads(capsys.readouterr().out)["rows"]
        low, high = row["time"]["interval_s"]
        assert low < row["time"]["step_s"] < high
        assert row["time"]["tokens_per_s"] == pytest.approx(256 / row["time"]["step_s"])
        widths[gpu] = (high - low) / row["time"]["step_s"]
    assert widths["h100"] > 1.3 * widths["h200"], "another GPU's efficiency at its data sheet's rates"


def test_every_kernel_has_its_formula(capsys: pytest.CaptureFixture[str]):
    assert app.run(["plan", "--model", "tiny", "--gpu", "h200", "--terms", "--json"]) == 0
    terms = json.loads(capsys.readouterr().out)["time_terms"]
    [head] = [term for term in terms if (term["op"], term["phase"]) == ("head", "forward")]
    assert head["formula"] == "2 x N x V x d FLOPs, fp32"
    assert all(term["formula"] and term["count"] > 0 and term["time_s"] > 0 for term in terms)


def test_a_step_without_a_time_still_has_its_memory(capsys: pytest.CaptureFixture[str]):
    assert app.run(["plan", "--model", "tiny", "--gpu", "h200", "--ranks", "16"]) == 0
    assert "No time: ranks: 16 need several machines; say how many" in capsys.readouterr().out
    app.run(["plan", "--model", "tiny", "--gpu-memory-gib", "80"])
    assert "A step takes" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--peak-tflops", "900"], "bandwidth: a data sheet's time needs both"),
        (["--peak-tflops", "900", "--bandwidth", "0"], "bandwidth: must be a positive number"),
        (["--tokens", "-5"], "tokens: must be a positive number"),
        (["--tokens", "5"], "tokens: GPU-hours need a time; name --gpu"),
        (["--peak-tflops", "1e-300", "--bandwidth", "1"], "peak_tflops: must be from 0.001"),
        (["--calibration", "nowhere.jsonl"], "nowhere.jsonl is not there; write it with trainstep doctor"),
        (["--grade", "results", "--tokens", "5"], "tokens: has no effect on --grade"),
    ],
)
def test_bad_machines_are_sentences(options: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert app.run(["plan", *options]) == 2
    assert words in capsys.readouterr().err


def test_another_gpus_calibration_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    calibration = json.loads((ROOT / "src/trainstep/plan/time/calibrations/h200.json").read_text())
    path = tmp_path / "h200.jsonl"
    path.write_text(json.dumps(calibration) + "\n")
    assert app.run([*FITTING, "--calibration", str(path)]) == 0
    assert "measured on NVIDIA H200" in capsys.readouterr().out
    others = [word if word != "h200" else "rtx-4090" for word in FITTING]
    assert app.run([*others, "--calibration", str(path)]) == 2
    assert "was measured on NVIDIA H200, not on rtx-4090" in capsys.readouterr().err


def test_a_fleet_is_answered_first_and_compared_by_nodes(capsys: pytest.CaptureFixture[str]):
    fleet = [
        "plan",
        "--model",
        "8B",
        "--sync",
        "fsdp",
        "--gpu",
        "h100",
        "--precision",
        "bf16_autocast",
        "--tokens",
        "1e12",
    ]
    assert app.run([*fleet, "--nodes", "16"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("tokens/s, MFU", "GPU-hours", "On 16 nodes of 8 GPUs a GPU is", "Assumed: NVLink 450 GB/s one way"):
        assert words in text
    assert app.run([*fleet, "--nodes", "1,4,128", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["answer"][0]["verdict"].startswith("All 3 fit h100; fastest: nodes 128, ")
    rows = out["rows"]
    assert [row["options"]["ranks"] for row in rows] == [8, 32, 1024]
    assert [row["fleet"]["nodes"] for row in rows] == [1, 4, 128]
    assert rows[0]["fleet"]["efficiency"] == 1 > rows[1]["fleet"]["efficiency"] > rows[2]["fleet"]["efficiency"]
    assert app.run([*fleet, "--nodes", "1,4"]) == 0
    assert "of one node's (%)" in capsys.readouterr().out
    assert app.run(["plan", "--model", "tiny", "--nodes", "2"]) == 0
    assert "No time: name a GPU" in " ".join(capsys.readouterr().out.split())
    assert app.run([*fleet, "--nodes", "3", "--ranks", "16"]) == 2
    assert "16 ranks cannot be spread evenly over 3 nodes" in capsys.readouterr().err


def test_shards_of_groups_have_a_time(capsys: pytest.CaptureFixture[str]):
    assert app.run([*FITTING, "--ranks", "4", "--sync", "sharded_flat", "--shard-ranks", "2"]) == 0
    assert "all_reduce across groups" in capsys.readouterr().out


def test_your_own_model_has_a_time_on_one_gpu_uncompiled(capsys: pytest.CaptureFixture[str]):
    own = ["plan", "--model", "traced_models:gpt", "--context", "32", "--gpu", "h200"]
    assert app.run([*own, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["time"]["step_s"] > 0
    assert app.run([*own, "--compile", "block"]) == 0
    assert "No time: compile: which ops of your own model are fused" in " ".join(capsys.readouterr().out.split())
    assert app.run([*own, "--ranks", "2"]) == 0
    assert "No time: ranks: the time of your own model" in " ".join(capsys.readouterr().out.split())
