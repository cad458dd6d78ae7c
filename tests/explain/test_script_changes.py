"""Which changes a proof tries of a script, in which order, and which it refuses."""

from dataclasses import replace

from run_records import a_run
from trainstep.config.script import CHANGES, Part
from trainstep.explain.budget import step_budget
from trainstep.explain.proof import Candidate
from trainstep.explain.script_changes import ScriptPlace, script_candidates, script_change
from trainstep.explain.script_evidence import script_evidence


def candidates(
    *, data_ms: float = 0.0, on_gpu: bool = True, ranks: int = 1, precision: str | None = "fp32", **options: object
) -> dict[str, Candidate]:
    allowed, batch_sizes = options.pop("allowed", []), options.pop("batch_sizes", [])
    budget = step_budget(script_evidence([a_run(parts_ms={**dict.fromkeys(Part, 1.0), Part.DATA: data_ms})]), None)
    place = ScriptPlace(on_gpu=on_gpu, ranks=ranks, cores=16, precision=precision, **options)
    return {candidate.name: candidate for candidate in script_candidates(budget, place, allowed, batch_sizes)}


def test_what_a_finding_predicts_comes_first_and_what_is_refused_last():
    found = candidates(data_ms=30.0)
    assert next(iter(found)) == "workers=8"
    assert found["workers=8"].gain is not None
    assert {"compile=reduce_overhead", "attention=trainstep", "adamw=fused", "pin_memory=on"} <= found.keys()
    refused = [name for name, candidate in found.items() if candidate.refusal]
    assert refused == ["precision=bf16_autocast", "precision=tf32"]
    assert list(found)[-2:] == refused


def test_what_would_do_nothing_is_not_tried():
    found = candidates(on_gpu=False)
    assert set(found) == {"adamw=fused", "compile=module", "precision=bf16_autocast"}
    assert candidates(ranks=2).keys() >= {"bucket_cap_mb=25", "bucket_cap_mb=100"}
    assert "precision=tf32" not in candidates(precision="tf32")
    assert not [name for name in candidates(precision="bf16_autocast") if name.startswith("precision")]
    assert candidates(compiles=True)["compile=module"].refusal == "the script compiles already"


def test_fused_ops_are_tried_where_a_module_computes_what_they_do():
    assert "ops=trainstep" in candidates(fusable_parts=3)
    assert "ops=trainstep" in candidates(), "before the first process nobody knows"
    assert "ops=trainstep" not in candidates(fusable_parts=0)
    assert "ops=trainstep" not in candidates(fusable_parts=3, on_gpu=False)


def test_a_precision_that_is_allowed_is_tried():
    found = candidates(allowed=["tf32"])
    assert not found["precision=tf32"].refusal
    assert found["precision=bf16_autocast"].refusal


def test_a_batch_that_is_allowed_is_tried_where_the_scripts_own_is_known():
    found = candidates(batch_sizes=[8, 16], batch_size=8)
    assert [name for name in found if name.startswith("batch")] == ["batch_size=16"]
    assert not found["batch_size=16"].refusal
    assert not candidates(batch_sizes=[16])["batch_size=16"].refusal, "before the first process nobody knows"
    assert candidates(batch_sizes=[16], batch_size=0)["batch_size=16"].refusal == (
        "no data loader of the script says how many sequences it reads"
    )
    assert "batch_size=16" not in candidates()


def test_an_allowed_batch_comes_behind_what_was_found_and_before_what_was_not():
    found = list(candidates(data_ms=30.0, batch_sizes=[16], batch_size=8, allowed=["bf16_autocast"]))
    assert found.index("workers=8") < found.index("batch_size=16") < found.index("attention=trainstep")
    assert found.index("batch_size=16") < found.index("adamw=fused"), "nothing was found for the optimizer"


def test_ranks_share_the_cores():
    assert "workers=4" in candidates(data_ms=30.0, ranks=4)
    assert "workers=2" in candidates(data_ms=30.0, ranks=16)


def test_every_change_is_one_that_run_applies():
    for candidate in candidates(data_ms=30.0, ranks=2).values():
        for name, value in candidate.fields.items():
            assert value in CHANGES[name] or (not CHANGES[name] and value.isdecimal())


def test_a_causes_change_is_the_first_that_has_an_effect():
    here = ScriptPlace(on_gpu=False, ranks=1, cores=4, precision="fp32")
    assert script_change("data", here) == {"workers": "4"}
    assert script_change("attention_kernel", here) == {"compile": "module"}, "our attention is for GPUs"
    assert script_change("attention_kernel", replace(here, compiles=True)) == {}
    assert script_change("attention_kernel", replace(here, on_gpu=True)) == {"attention": "trainstep"}
    assert script_change("precision", here) == {"precision": "bf16_autocast"}
    assert script_change("precision", replace(here, precision="bf16_autocast")) == {}
    assert script_change("another_process", here) == {}
