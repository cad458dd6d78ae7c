"""A replayed step has the peaks that were measured on H200s, and the moments that its options promise."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from fake_step import count
from trainstep.config.model import ModelConfig, size
from trainstep.config.parallel import RankRunConfig, RanksConfig, SyncConfig
from trainstep.config.run import RunConfig
from trainstep.parallel.copies.messages import CopyEngines
from trainstep.plan.allocator import Allocator
from trainstep.plan.cell_config import ranks_config
from trainstep.plan.grade import Grade, grade_records
from trainstep.plan.memory_terms import transformer_parameters
from trainstep.plan.peak_memory import expected_memory
from trainstep.plan.rank_tensors import _LEAST_COPIED_BYTES
from trainstep.plan.step_memory import alone, replay
from trainstep.plan.step_replay import StepMemory
from trainstep.records.store import Store

RECORDS = Path(__file__).parents[2] / "results/h200"
OLD = ("ddp_xl_fp32", "ddp_xl_shards")
"""Of code before sharded_flat and buckets had the sizes they have now."""
REPEATED = ("same_against_same",)
"""A hundred records of one step."""
MIB = 2**20


@pytest.fixture(scope="module")
def grades() -> list[Grade]:
    files = [path for path in sorted(RECORDS.glob("*.jsonl")) if path.stem not in OLD + REPEATED]
    return [grade for path in files for grade in grade_records(Store(path).read())[0]]


def sizes(errors: list[float]) -> tuple[float, float]:
    """Median and largest error, without sign."""
    return statistics.median(map(abs, errors)), max(map(abs, errors))


@pytest.mark.slow
def test_peaks_are_those_of_h200s(grades):
    median, worst = sizes([grade.allocated_error for grade in grades])
    assert len(grades) >= 250
    assert median <= 0.001
    assert worst <= 0.03, "fused blocks that recompute some results are up to 2.5 % off"
    median, worst = sizes([grade.reserved_error for grade in grades])
    assert median <= 0.006
    assert worst <= 0.16, (
        "8 % is the aim: a model compiled whole is beyond, and 8B of plain ops with all blocks recomputed"
    )


@pytest.mark.parametrize("file", ["captured", "captured_ranks", "memory_sizes", "predicted_again", "sharded_optimizer"])
def test_peaks_of_a_file_are_those_of_h200s(file):
    grades, _ = grade_records(Store(RECORDS / f"{file}.jsonl").read())
    assert len(grades) >= 2
    assert max(abs(grade.allocated_error) for grade in grades) <= 0.013
    assert max(abs(grade.reserved_error) for grade in grades) <= 0.07


@pytest.mark.slow
def test_compiled_blocks_that_recompute_keep_no_rounded_weights():
    """Autocast's cache, which holds them until forward ends, is not in a compiled graph."""
    grades, _ = grade_records(Store(RECORDS.parent / "h100/plan_grids.jsonl").read())
    own = [g for g in grades if g.config.run.compile == "block" and g.config.run.recompute != "none"]
    assert len(own) == 4
    assert max(abs(grade.allocated_error) for grade in own) <= 0.01


def test_ledgers_have_the_terms_of_the_replay():
    grades, _ = grade_records(Store(RECORDS / "memory.jsonl").read())
    terms = [term for grade in grades for term in grade.terms if term.moment == "after forward"]
    assert {term.term for term in terms} >= {"parameters", "optimizer state", "activations", "autocast weight copies"}
    for term in terms:
        if term.term != "workspaces":
            assert term.predicted_bytes == pytest.approx(term.measured_bytes, rel=0.002, abs=64 * MIB), term


def test_a_graph_has_a_pool_of_its_own():
    run = RunConfig(model=size("medium"), attention="trainstep", adamw="trainstep", device="cuda")
    eager, captured = replay(alone(run)).peak, replay(alone(replace(run, capture="step"))).peak
    assert captured.allocated_bytes == pytest.approx(eager.allocated_bytes, rel=0.01)
    assert captured.reserved_bytes > eager.reserved_bytes


def test_what_the_cast_to_16_bits_leaves_is_reserved_while_a_capture_warms_up():
    """Its stream cannot use it, so weights are reserved at least twice, in fp32 and beside that what the warm-ups need."""
    run = RunConfig(
        model=size("medium"), precision="bf16", attention="trainstep", adamw="trainstep", device="cuda", capture="step"
    )
    weights_bytes = 2 * sum(parameter.numel for parameter in transformer_parameters(run.model, "bf16", "plain"))
    peak = replay(alone(run)).peak
    assert peak.reserved_bytes > 2 * weights_bytes + 3 * weights_bytes, "fp32; gradients and moments in 16 bits"
    assert peak.allocated_bytes < peak.reserved_bytes


@pytest.mark.slow
def test_a_captured_step_is_replayed_with_its_warm_ups_however_few_steps_are_asked_for():
    grades, _ = grade_records(Store(RECORDS.parent / "h100/predicted_ranks.jsonl").read())
    assert len(grades) == 13
    for grade in grades:
        assert replay(grade.config, steps=2) == replay(grade.config, steps=3)
        assert abs(grade.reserved_error) < 0.05


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "narrow", "block"])
def test_backward_peaks_where_fake_tensors_do(recompute, precision):
    model = ModelConfig(d_model=128, d_ff=384, layers=3, heads=4, vocab_size=1024)
    run = RunConfig(
        model=model, batch_size=2, context=256, precision=precision, attention="trainstep", recompute=recompute,
        mode="forward_backward",
    )  # fmt: skip
    [backward] = [phase for phase in replay(alone(replace(run, device="cuda"))).phases if phase.name == "backward"]
    beside = ("parameters", "batch and buffers", "workspaces", "rounding")
    predicted = sum(nbytes for name, nbytes in backward.categories.items() if name not in beside)
    # A CPU copies the output of attention too, which GPUs write as the next matmul takes it: 3 % here.
    assert predicted == pytest.approx(count(run).backward_peak, rel=0.035)


def test_update_in_backward_never_has_all_gradients():
    run = RunConfig(model=size("medium"), adamw="trainstep", precision="bf16_autocast", device="cuda")
    after, within = replay(alone(run)), replay(alone(replace(run, update="in_backward")))
    blocks = 12 * size("medium").d_model ** 2 * 4
    assert max(moment.categories["gradients"] for moment in after.moments) > 24 * blocks
    assert max(phase.categories["gradients"] for phase in within.phases) < 3 * blocks
    assert within.moments[-1].categories["optimizer state"] == after.moments[-1].categories["optimizer state"]


@pytest.mark.parametrize("sync", ["none", "naive", "flat", "overlapped", "bucketed", "sharded", "sharded_flat", "fsdp"])
@pytest.mark.parametrize("options", [{}, {"accumulation": 3}, {"precision": "bf16"}])
def test_replayed_strategies_hold_what_their_terms_say(sync, options):
    run = RunConfig(model=size("small"), batch_size=2, device="cuda", **options)
    agrees_with_its_terms(RanksConfig(ranks=2, sync=SyncConfig(name=sync), run=run))


@pytest.mark.parametrize("options", [{"in_place": True}, {"in_place": True, "keeps_gradient_dtype": True}, {}])
@pytest.mark.parametrize("update", ["after_backward", "by_bucket"])
def test_replayed_buckets_hold_what_their_terms_say(update, options):
    run = RankRunConfig(model=size("small"), batch_size=2, device="cuda", adamw="trainstep", update=update)
    agrees_with_its_terms(RanksConfig(ranks=2, sync=SyncConfig(name="bucketed", **options), run=run))


def test_buckets_in_place_have_no_second_copy_of_gradients():
    run = RunConfig(model=size("medium"), device="cuda")
    apart, in_place = [
        replay(RanksConfig(ranks=2, sync=SyncConfig(name="bucketed", in_place=choice), run=run))
        for choice in (False, True)
    ]
    assert in_place.peak.allocated_bytes < apart.peak.allocated_bytes


def test_the_peak_of_captured_buckets_in_place_is_the_measured_one():
    grades, _ = grade_records(Store(RECORDS / "captured_bucketed.jsonl").read())
    assert [grade.config.sync.in_place for grade in grades] == [False, True]
    assert max(abs(grade.allocated_error) for grade in grades) <= 0.001
    assert max(abs(grade.reserved_error) for grade in grades) <= 0.01


@pytest.mark.parametrize("file", ["h200/captured_sharded_flat", "h100/captured_messages", "h200/captured_fsdp"])
def test_copies_send_gradients_from_where_they_are(file):
    grades, _ = grade_records(Store(RECORDS.parent / f"{file}.jsonl").read())
    by_copies = [
        grade for grade in grades if grade.config.sync.transport == "copies" and grade.config.sync.name != "none"
    ]
    assert by_copies
    assert max(abs(grade.allocated_error) for grade in by_copies) <= 0.005


@pytest.mark.parametrize(("shard_ranks", "alike"), [(None, False), (1, True)])
def test_a_group_of_one_rank_has_no_copies(shard_ranks, alike):
    run = RunConfig(model=size("small"), batch_size=2, device="cuda")
    peaks = [
        replay(
            RanksConfig(
                ranks=2, sync=SyncConfig(name="sharded_flat", transport=transport, shard_ranks=shard_ranks), run=run
            )
        )
        for transport in ("library", "copies")
    ]
    assert (peaks[0].peak.allocated_bytes == peaks[1].peak.allocated_bytes) == alike


def test_messages_that_are_copied_are_as_large_as_plan_says():
    assert CopyEngines().least_bytes == _LEAST_COPIED_BYTES


@pytest.mark.parametrize("sync", ["bucketed", "sharded_flat", "fsdp"])
def test_replayed_groups_hold_what_their_terms_say(sync):
    run = RunConfig(model=size("small"), batch_size=2, device="cuda")
    agrees_with_its_terms(RanksConfig(ranks=16, sync=SyncConfig(name=sync, shard_ranks=8), run=run))


def agrees_with_its_terms(config):
    run = config.run
    expected = expected_memory(config, transformer_parameters(size("small"), run.precision))
    moments = {moment.name: moment.categories for moment in replay(config).moments}
    assert expected is not None
    for name, terms in {
        "after init": expected.after_init,
        "after grad_sync": expected.after_backward,
        "after step": expected.after_step,
    }.items():
        held = moments[name]
        small = 2 * MIB  # flags, which the terms have and the replay leaves out
        assert held["parameters"] == terms.parameters_bytes
        assert held["optimizer state"] == terms.optimizer_state_bytes
        assert held["gradients"] == pytest.approx(terms.gradients_bytes, abs=small)
        assert held["communication"] == pytest.approx(terms.communication_bytes, abs=small)


def test_more_micro_batches_need_no_more_than_the_third():
    def peak(accumulation: int) -> StepMemory:
        return replay(alone(RunConfig(model=size("mini"), accumulation=accumulation, device="cuda")))

    batch_bytes = 2 * 8 * 4 * 256
    difference = peak(9).peak.allocated_bytes - peak(3).peak.allocated_bytes
    assert difference == pytest.approx(6 * batch_bytes, abs=12 * 512)


def test_strategies_of_torch_are_refused():
    config = RanksConfig(ranks=2, sync=SyncConfig(name="torch_fsdp2"), run=RunConfig(model=size("tiny")))
    with pytest.raises(ValueError, match="sync: what torch_fsdp2 of torch holds is not known; take fsdp"):
        replay(config)


def test_a_record_without_a_training_step_is_refused():
    record = Store(RECORDS / "flash.jsonl").read()[0]
    with pytest.raises(ValueError, match="attention: has no training step"):
        ranks_config(record)


def test_allocator_rounds_as_torch_does():
    allocator = Allocator()
    assert allocator.take(1).nbytes == 512
    assert allocator.reserved_bytes == 2 * MIB
    assert allocator.take(25 * MIB).nbytes == 26 * MIB, "1 MiB is not split off"
    allocator.take(3 * MIB)
    assert allocator.reserved_bytes == (2 + 26 + 20) * MIB


def test_freed_neighbours_are_joined():
    allocator = Allocator()
    blocks = [allocator.take(5 * MIB) for _ in range(4)]
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.give_back(block)
    reserved = allocator.reserved_bytes
    assert allocator.take(15 * MIB).address == 0
    assert allocator.reserved_bytes == reserved == 20 * MIB


def test_an_emptied_cache_returns_whole_segments_alone():
    allocator = Allocator()
    kept, freed = allocator.take(30 * MIB), allocator.take(40 * MIB)
    half = [allocator.take(4 * MIB) for _ in range(2)]
    allocator.give_back(freed)
    allocator.give_back(half[0])
    allocator.empty_cache()
    assert allocator.reserved_bytes == (30 + 20) * MIB
    assert not kept.is_free


def test_pools_do_not_share_blocks():
    allocator = Allocator()
    allocator.give_back(allocator.take(30 * MIB))
    allocator.pool = "graph"
    allocator.take(30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_a_replay_frees_all_but_weights_and_state():
    memory = replay(alone(RunConfig(model=size("small"), precision="bf16_autocast", device="cuda")))
    after = memory.moments[-1].categories
    assert {name for name, nbytes in after.items() if nbytes} == {
        "parameters", "optimizer state", "workspaces", "batch and buffers", "rounding",
    }  # fmt: skip
    assert after["optimizer state"] == pytest.approx(2 * after["parameters"], rel=0.001)
