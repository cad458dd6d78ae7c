"""Every byte of a real step has a category, and the categories are what the model's shape says."""

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


def frames(one: Allocation) -> str:
    return " ".join(f"{frame.function}@{frame.file}:{frame.line}" for frame in one.stack)


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    """Of the fixture's second step. It was recorded without our marks: they are put where the stacks say they belong."""
    snapshot = read_snapshot(FIXTURE)
    plain = MemoryTimeline(snapshot)
    timeline = MemoryTimeline(dataclasses.replace(snapshot, spans=marks(snapshot)))
    held = [one for one in plain.allocations if one.died > plain.end]
    window = step_window(timeline)
    backward_end = window.moments["after backward"]
    known = Known(
        parameters=addresses(one for one in held if "__init__" in frames(one) and "rotary" not in frames(one)),
        optimizer_state=addresses(one for one in held if "_init_group" in frames(one)),
        inputs=addresses(one for one in held if "rotary" in frames(one) or "next_batch" in frames(one)),
        gradients=addresses(
            one
            for one in plain.allocations
            if one.born > window.first and not one.stack and one.held_at(backward_end) and one.requested_bytes < 2**25
        ),
    )
    return Ledger(timeline, window, known)


def addresses(allocations) -> frozenset[int]:
    return frozenset(one.address for one in allocations)


def marks(snapshot: Snapshot) -> tuple[Span, ...]:
    """The second step's ranges, from the first and last allocation of each."""
    births = [event for event in snapshot.events if event.action == "alloc"]
    first_step_end = snapshot.spans[1].end_us
    in_forward = [event.time_us for event in births if any(frame.function == "_forward" for frame in event.stack)]
    second = [time for time in in_forward if time > first_step_end]
    begin, forward_end = second[0] - 1, second[-1]
    built = min(in_forward) - 1000
    optimizer = snapshot.spans[2]
    end = snapshot.events[-1].time_us
    heads = [
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
            (Span(name=name, start_us=start, end_us=end) for name, start, end in ranges), key=lambda one: one.start_us
        )
    )


def test_every_byte_has_a_category(ledger: Ledger):
    series = ledger.series()
    assert set(series) == set(CATEGORIES)
    assert (sum(series.values()) == ledger.timeline.requested_bytes).all()
    for position in ledger.window.moments.values():
        assert sum(ledger.bytes_at(position).values()) == ledger.timeline.requested_bytes[position]


def test_what_stays_is_what_the_shape_says(ledger: Ledger):
    end = ledger.bytes_at(ledger.window.moments["after step"])
    assert end["parameters"] == 4 * TINY.parameters
    tensors = 3 + 6 * TINY.layers + 3 * TINY.layers  # a step count of 4 bytes each
    assert 8 * TINY.parameters < end["optimizer state"] <= 8 * TINY.parameters + 4 * tensors
    assert end["workspaces"] == 2 * 32 * 2**20  # cuBLAS's, one of them backward's
    assert end["activations"] == end["gradients"] == end["temporaries"] == 0


def test_gradients_are_as_large_as_the_weights(ledger: Ledger):
    assert ledger.bytes_at(ledger.window.moments["after backward"])["gradients"] == 4 * TINY.parameters
    assert ledger.bytes_at(ledger.window.moments["after forward"])["gradients"] == 0


def test_activations_come_in_residual_stream_tensors(ledger: Ledger):
    """A block keeps at least its two norms' inputs, q, k, v, scores and the MLP's three wide tensors."""
    stream = BATCH * CONTEXT * TINY.d_model * 4
    scores = BATCH * TINY.heads * CONTEXT * CONTEXT * 4
    wide = BATCH * CONTEXT * TINY.d_ff * 4
    kept = ledger.bytes_at(ledger.window.moments["after forward"])
    assert kept["activations"] > TINY.layers * (5 * stream + scores + 3 * wide)
    assert kept["logits and loss"] >= BATCH * CONTEXT * TINY.vocab_size * 4


def test_rounding_is_what_the_allocator_gave_on_top(ledger: Ledger):
    for position in ledger.window.moments.values():
        assert 0 <= ledger.rounding_at(position) < 20_000
    assert ledger.rounding_at(ledger.window.moments["peak"]) > 1000


def test_a_history_without_marks_is_refused():
    with pytest.raises(ValueError, match="no marks of a step"):
        step_window(MemoryTimeline(read_snapshot(FIXTURE)))


KINDS = ("gathered", "gradient", "clone", "fresh", "copied")


@pytest.fixture
def of_a_rank() -> Ledger:
    """Five allocations of a rank's step, a kind each, all let go before it ends but the last."""
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


def test_what_ranks_communicate_with_has_a_category(of_a_rank: Ledger):
    category_of = {
        KINDS[one.address // 512 - 1]: category
        for one, category in zip(of_a_rank.timeline.allocations, of_a_rank.category_of, strict=True)
    }
    assert category_of == {
        "gathered": "communication",  # under the span that gathers
        "gradient": "gradients",  # whole, and gone when gradients are shards
        "clone": "workspaces",  # made inside a message, by the library that sends
        "fresh": "communication",  # born while gradients are synchronised
        "copied": "communication",  # kept by the way at the end
    }


def test_backward_is_over_when_gradients_are_synchronised(of_a_rank: Ledger):
    timeline = of_a_rank.timeline
    assert of_a_rank.window.moments["after backward"] == timeline.position_at(45.0) != timeline.position_at(35.0)
