"""Every byte of a real step has a category, and the sizes of categories follow from the model's shape."""

import dataclasses
from pathlib import Path

import pytest

from trainstep.config.model import ModelConfig
from trainstep.traces.ledger import CATEGORIES, MARK, Known, Ledger, step_window
from trainstep.traces.memory_timeline import Allocation, MemoryTimeline
from trainstep.traces.snapshot import Snapshot, Span, read_snapshot, snapshot_of

TINY = ModelConfig(d_model=128, d_ff=512, layers=2, heads=4, vocab_size=256)
BATCH, CONTEXT = 2, 64
FIXTURE = Path(__file__).parent / "fixtures" / "snapshot_tiny.pickle.gz"


def frames(allocation: Allocation) -> str:
    return " ".join(f"{frame.function}@{frame.file}:{frame.line}" for frame in allocation.stack)


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    """The ledger of the fixture's second step. It was recorded without marks, which are added where the stacks show them."""
    snapshot = read_snapshot(FIXTURE)
    unmarked = MemoryTimeline(snapshot)
    timeline = MemoryTimeline(dataclasses.replace(snapshot, spans=marks(snapshot)))
    never_freed = [allocation for allocation in unmarked.allocations if allocation.died > unmarked.end]
    window = step_window(timeline)
    backward_end = window.moments["after backward"]
    known = Known(
        parameters=addresses(
            allocation
            for allocation in never_freed
            if "__init__" in frames(allocation) and "rotary" not in frames(allocation)
        ),
        optimizer_state=addresses(allocation for allocation in never_freed if "_init_group" in frames(allocation)),
        inputs=addresses(
            allocation
            for allocation in never_freed
            if "rotary" in frames(allocation) or "next_batch" in frames(allocation)
        ),
        gradients=addresses(
            allocation
            for allocation in unmarked.allocations
            if allocation.born > window.first
            and not allocation.stack
            and allocation.held_at(backward_end)
            and allocation.requested_bytes < 2**25
        ),
    )
    return Ledger(timeline, window, known)


def addresses(allocations) -> frozenset[int]:
    return frozenset(allocation.address for allocation in allocations)


def marks(snapshot: Snapshot) -> tuple[Span, ...]:
    """Marks of the second step's ranges, from the first and last allocation of each."""
    births = [event for event in snapshot.events if event.action == "alloc"]
    first_step_end = snapshot.spans[1].end_us
    in_forward = [event.time_us for event in births if any(frame.function == "_forward" for frame in event.stack)]
    in_second_step = [time for time in in_forward if time > first_step_end]
    begin, forward_end = in_second_step[0] - 1, in_second_step[-1]
    built = min(in_forward) - 1000
    optimizer = snapshot.spans[2]
    end = snapshot.events[-1].time_us
    heads = [  # when the fixture was recorded, head and loss were in loss.py
        event.time_us
        for event in births
        if event.time_us > begin and event.stack and any(f.file.endswith("loss.py") for f in event.stack)
    ]
    ranges = [
        ("forward", begin, forward_end),
        ("backward", forward_end + 1, optimizer.start_us - 1),
        ("optimizer", optimizer.start_us, snapshot.spans[3].end_us),
        ("loss", heads[0], heads[-1]),
        (f"{MARK}built", built, built),
        (f"{MARK}begin", begin, begin),
        (f"{MARK}forward", forward_end, forward_end),
        (f"{MARK}backward", optimizer.start_us - 1, optimizer.start_us - 1),
        (f"{MARK}end", end, end),
    ]
    return tuple(
        sorted(
            (Span(name=name, start_us=start, end_us=end) for name, start, end in ranges), key=lambda mark: mark.start_us
        )
    )


def test_every_byte_has_a_category(ledger: Ledger):
    series = ledger.series()
    assert set(series) == set(CATEGORIES)
    assert (sum(series.values()) == ledger.timeline.requested_bytes).all()
    for position in ledger.window.moments.values():
        assert sum(ledger.bytes_at(position).values()) == ledger.timeline.requested_bytes[position]


def test_memory_after_the_step_follows_from_the_shape(ledger: Ledger):
    end = ledger.bytes_at(ledger.window.moments["after step"])
    assert end["parameters"] == 4 * TINY.parameters
    tensors = 3 + 6 * TINY.layers + 3 * TINY.layers  # a step count of 4 bytes each
    assert 8 * TINY.parameters < end["optimizer state"] <= 8 * TINY.parameters + 4 * tensors
    assert end["workspaces"] == 2 * 32 * 2**20  # cuBLAS's: one of forward and one of backward
    assert end["activations"] == end["gradients"] == end["temporaries"] == 0


def test_gradients_are_as_large_as_the_weights(ledger: Ledger):
    assert ledger.bytes_at(ledger.window.moments["after backward"])["gradients"] == 4 * TINY.parameters
    assert ledger.bytes_at(ledger.window.moments["after forward"])["gradients"] == 0


def test_activations_have_at_least_the_tensors_that_backward_needs(ledger: Ledger):
    """Backward needs the inputs of a block's two norms, q, k, v, the scores and the MLP's three wide tensors."""
    stream = BATCH * CONTEXT * TINY.d_model * 4
    scores = BATCH * TINY.heads * CONTEXT * CONTEXT * 4
    wide = BATCH * CONTEXT * TINY.d_ff * 4
    after_forward = ledger.bytes_at(ledger.window.moments["after forward"])
    assert after_forward["activations"] > TINY.layers * (5 * stream + scores + 3 * wide)
    assert after_forward["logits and loss"] >= BATCH * CONTEXT * TINY.vocab_size * 4


def test_rounding_is_the_memory_beyond_what_was_requested(ledger: Ledger):
    for position in ledger.window.moments.values():
        assert 0 <= ledger.rounding_at(position) < 20_000
    assert ledger.rounding_at(ledger.window.moments["peak"]) > 1000


def test_a_history_without_marks_is_refused():
    with pytest.raises(ValueError, match="no marks of a step"):
        step_window(MemoryTimeline(read_snapshot(FIXTURE)))


KINDS = ("gathered", "gradient", "clone", "fresh", "copied")


@pytest.fixture
def rank_ledger() -> Ledger:
    """The ledger of five allocations of a rank's step, one of each kind, all freed before it ends except the last."""
    births = dict(zip(KINDS, (10.0, 20.0, 30.0, 40.0, 50.0), strict=True))
    allocations = [
        {"action": "alloc", "addr": 512 * number, "size": 512, "time_us": time, "frames": []}
        for number, time in enumerate(births.values(), 1)
    ]
    frees = [
        {"action": "free_completed", "addr": 512 * number, "size": 512, "time_us": 60.0, "frames": []}
        for number in (1, 2, 3, 4)
    ]
    ranges = [
        *(("forward", 5.0, 15.0), ("unshard blocks.0", 9.0, 11.0), ("backward", 16.0, 35.0), ("grad_sync", 36.0, 45.0)),
        *((f"{MARK}gradient 0", 21.0, 21.0), ("reduce_scatter blocks.0", 29.0, 31.0), ("optimizer", 46.0, 65.0)),
        *((f"{MARK}begin", 1.0, 1.0), (f"{MARK}forward", 15.0, 15.0), (f"{MARK}backward", 35.0, 35.0)),
        *((f"{MARK}grad_sync", 45.0, 45.0), (f"{MARK}end", 70.0, 70.0)),
    ]
    annotations = [
        {"stage": stage, "name": name, "device": 0, "time_us": time}
        for name, *times in ranges
        for stage, time in zip(("START", "END"), times, strict=True)
    ]
    block = {"size": 512, "requested_size": 512, "address": 512 * 5, "state": "active_allocated", "frames": []}
    document = {
        "segments": [{"address": 512 * 5, "total_size": 512, "segment_type": "host", "blocks": [block]}],
        "device_traces": [[*allocations, *frees]],
        "external_annotations": annotations,
    }
    timeline = MemoryTimeline(snapshot_of(document, where="here"))
    known = Known(whole_gradients={"gradient 0": {1024}}, communication={"end": {2560}, "backward": {4096}})
    return Ledger(timeline, step_window(timeline), known)


def test_tensors_of_communication_have_a_category(rank_ledger: Ledger):
    category_of = {
        KINDS[allocation.address // 512 - 1]: category
        for allocation, category in zip(rank_ledger.timeline.allocations, rank_ledger.category_of, strict=True)
    }
    assert category_of == {
        "gathered": "communication",  # allocated in the span that gathers
        "gradient": "gradients",  # whole, and freed when gradients are shards
        "clone": "workspaces",  # allocated inside a message, by the library that sends
        "fresh": "communication",  # allocated while gradients are synchronised
        "copied": "communication",  # kept by the strategy at the end
    }


def test_backward_is_over_when_gradients_are_synchronised(rank_ledger: Ledger):
    timeline = rank_ledger.timeline
    assert rank_ledger.window.moments["after backward"] == timeline.position_at(45.0) != timeline.position_at(35.0)
