"""Messages in a trace are matched with their spans, and split into hidden and exposed time, on GPUs and on gloo."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from ranks import run_ranks
from trace_maker import AUTOGRAD, EAGER, FIXTURES, MAIN, call, kernel, launched, op, span, trace
from trainstep.config.model import ModelConfig
from trainstep.config.parallel import OURS, ParallelConfig
from trainstep.config.parsing import from_plain
from trainstep.costs.gradient_sync import step_messages
from trainstep.parallel.ranks import Ranks
from trainstep.plan.memory_terms import transformer_parameters
from trainstep.plan.peak_memory import exchange_of
from trainstep.spans import span as real_span
from trainstep.traces.communication import Communication, read_communication, waiting_s
from trainstep.traces.kineto import Activity, Call, Range, Trace, parse_trace, read_trace
from trainstep.traces.verdict import Unprofiled, verdict
from trainstep.traces.work import read_work
from trainstep.training.attention import attention_named
from trainstep.training.optimizer import adamw_options
from trainstep.training.parallelism import parallel
from trainstep.training.step import TrainStep
from trainstep.training.transformer import Transformer

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_tst_128x64_NNT"
US = 1e-6


def read(*events: Activity | Call | Range) -> Communication:
    return read_communication(read_work(trace(*events)))


def in_microseconds(communication: Communication) -> list[tuple[Any, ...]]:
    times = ("launched_s", "started_s", "finished_s", "hidden_s", "exposed_s")
    return [
        (sent_message.label, *(round(getattr(sent_message, name) / US) for name in times))
        for sent_message in communication.messages
    ]


def message(
    label: str, at: int, start: int, end: int, number: int, thread: tuple[int, int] = MAIN
) -> list[Activity | Call | Range]:
    """A span on the host, the call inside it, and NCCL's kernel on a stream of its own."""
    return [
        span(label, at, at + 10, thread),
        call("cudaLaunchKernelExC", at + 2, at + 6, number, thread),
        kernel(NCCL, start, end, number, stream=20),
    ]


def a_step(*events: Activity | Call | Range) -> Communication:
    """A step whose backward computes on the device from 20 to 100 us, and is over on the host at 60 us."""
    return read(
        span("step 0", 0, 200),
        span("backward", 5, 60),
        span("grad_sync", 61, 90),
        *launched(GEMM, 10, 20, 100, 1),
        *events,
    )


def test_messages_have_hidden_and_exposed_time_and_a_tail():
    communication = a_step(
        *message("all_reduce bucket 0", 30, 50, 80, 2, AUTOGRAD),
        *message("all_reduce bucket 1", 40, 90, 130, 3),
        *message("all_reduce usage", 65, 140, 145, 4),
    )
    assert in_microseconds(communication) == [
        ("all_reduce bucket 0", 32, 50, 80, 30, 0),
        ("all_reduce bucket 1", 42, 90, 130, 10, 30),
        ("all_reduce usage", 67, 140, 145, 0, 5),
    ]
    assert [sent.phase for sent in communication.messages] == ["backward", "backward", "grad_sync"]
    (step,) = communication.steps
    assert step.communication_s == pytest.approx(75 * US)
    assert step.exposed_s == pytest.approx(35 * US)
    assert step.tail_s == pytest.approx(45 * US)


def test_a_message_by_copies_is_all_work_that_was_issued_in_its_span():
    communication = a_step(
        span("all_reduce bucket 0", 30, 50),
        *launched("Memcpy PtoP (Device -> Device)", 32, 50, 70, 2),
        *launched("c10d::symmetric_memory::barrier_kernel(unsigned int**, int)", 33, 70, 95, 5),
        *launched("add_up_kernel", 35, 95, 110, 3),
        *launched("Memcpy DtoD (Device -> Device)", 36, 110, 118, 6),
        *launched("fill", 52, 118, 123, 4),
    )
    assert in_microseconds(communication) == [("all_reduce bucket 0", 32, 50, 118, 50, 18)]
    assert communication.steps[0].tail_s == 0, "the last work of backward is a fill that no message issued"


def test_without_spans_only_a_librarys_kernels_are_messages():
    communication = a_step(
        *launched("Memcpy PtoP (Device -> Device)", 32, 100, 120, 2),
        *launched("add_up_kernel", 35, 120, 130, 3),
        *launched(NCCL, 36, 105, 130, 4),
    )
    assert [message.label for message in communication.messages] == ["ncclDevKernel_AllReduce_Sum_f32_RING_LL"]
    assert communication.messages[0].hidden_s == 0, "copies between GPUs and sums of messages compute nothing"
    assert communication.steps[0].communication_s == pytest.approx(30 * US), "from 100 on, which a total shows"
    assert communication.steps[0].exposed_s == pytest.approx(30 * US)


def test_a_compilers_kernel_for_a_gather_is_no_message():
    communication = a_step(*launched("triton_poi_fused_all_gather_into_tensor_wait_tensor_0", 36, 105, 130, 4))
    assert communication.messages == ()
    assert communication.steps[0].communication_s == 0


def test_the_wait_for_gloo_is_no_time_of_python():
    """A CPU's step is held to all of its time, of which a message that gloo's thread sends is a part."""
    step = [span("step 0", 0, 100), op("aten::mm", 0, 40), op("c10d::allreduce_", 40, 41)]
    work = read_work(trace(*step, op("gloo:all_reduce", 41, 100, AUTOGRAD)))
    assert verdict(work, Unprofiled()).overhead_share == pytest.approx(59 / 159)


def test_what_a_message_copies_is_communication_and_nothing_that_computes():
    work = read_work(
        trace(
            span("step 0", 0, 200),
            span("forward", 5, 190),
            *launched(GEMM, 10, 20, 60, 1),
            span("all_gather blocks.0", 30, 50),
            *launched("Memcpy DtoD (Device -> Device)", 36, 60, 80, 6),
            *launched("Memcpy DtoD (Device -> Device)", 52, 80, 90, 4),
        )
    )
    assert [piece.kind for piece in work.pieces] == ["matmul", "communication", "copies"]
    found = verdict(work, Unprofiled())
    assert found.matmul_share == pytest.approx(40 / 50)
    assert found.exposed_share == pytest.approx(20 / 200)


def test_a_message_by_copies_on_a_cpu_is_its_span_and_hides_nothing():
    communication = read(
        span("step 0", 0, 200),
        span("backward", 5, 60),
        op("aten::mm", 10, 30),
        span("all_reduce bucket 0", 30, 50),
        op("aten::copy_", 32, 48),
        op("aten::mm", 50, 60),
    )
    assert in_microseconds(communication) == [("all_reduce bucket 0", 30, 30, 50, 0, 20)]
    assert communication.steps[0].exposed_s == pytest.approx(20 * US)


def test_messages_that_overlap_count_once_in_the_step():
    communication = a_step(
        *message("reduce_scatter blocks.1", 30, 90, 120, 2), *message("all_gather blocks.0", 41, 110, 140, 3)
    )
    assert [sent.exposed_s for sent in communication.messages] == pytest.approx([20 * US, 30 * US])
    assert communication.steps[0].communication_s == pytest.approx(50 * US)
    assert communication.steps[0].exposed_s == pytest.approx(40 * US)


def test_parameters_gathered_in_the_optimizer_are_no_tail():
    communication = read(
        span("step 0", 0, 300),
        span("backward", 5, 60),
        span("optimizer", 70, 200),
        *launched(GEMM, 10, 20, 100, 1),
        *message("all_gather root", 100, 150, 180, 2),
    )
    assert communication.messages[0].phase == "optimizer"
    assert communication.steps[0].tail_s == 0


def test_without_a_span_a_message_has_its_kernels_name():
    communication = a_step(span("nccl:all_reduce", 28, 40), *launched(NCCL, 30, 50, 80, 2))
    assert communication.messages[0].label.startswith("ncclDevKernel_AllReduce_Sum_f32_RING_LL")


def test_messages_have_bytes_where_they_are_known():
    work = read_work(trace(span("step 0", 0, 200), *message("all_reduce bucket 0", 30, 50, 80, 2)))
    assert read_communication(work).messages[0].payload_bytes is None
    assert read_communication(work, {"all_reduce bucket 0": 7}).messages[0].payload_bytes == 7
    columns = read_communication(work, {"all_reduce bucket 0": 7}).columns()
    assert columns["label"] == ["all_reduce bucket 0"]
    assert columns["payload_bytes"] == [7]


def test_a_step_without_messages_has_no_communication():
    communication = a_step()
    assert communication.messages == ()
    assert (
        communication.steps[0].communication_s,
        communication.steps[0].exposed_s,
        communication.steps[0].tail_s,
    ) == (0, 0, 0)


INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=6)


@settings(deadline=None)
@given(messages=INTERVALS, kernels=INTERVALS)
def test_times_are_those_of_counting_each_microsecond(messages: list[tuple[int, int]], kernels: list[tuple[int, int]]):
    events: list[Activity | Call | Range] = [span("step 0", 0, 200), *launched(GEMM, 0, 150, 151, 1)]
    for number, (start, length) in enumerate(messages):
        events += [call("cudaLaunchKernelExC", number, number + 1, 10 + number)]
        events += [kernel(NCCL, start, start + length, 10 + number, stream=20)]
    for number, (start, length) in enumerate(kernels):
        events += [call("cudaLaunchKernel", number, number + 1, 50 + number)]
        events += [kernel(GEMM, start, start + length, 50 + number)]
    communication = read(*events)
    computing = {150} | {moment for start, length in kernels for moment in range(start, start + length)}
    sent = [set(range(start, start + length)) for start, length in messages]
    assert [round(sent_message.exposed_s / US) for sent_message in communication.messages] == [
        len(during - computing) for during in sent
    ]
    assert [round(sent_message.hidden_s / US) for sent_message in communication.messages] == [
        len(during & computing) for during in sent
    ]
    sending = set().union(*sent)
    assert round(communication.steps[0].communication_s / US) == len(sending)
    assert round(communication.steps[0].exposed_s / US) == len(sending - computing)


def with_nccl(path: Path) -> tuple[Trace, list[tuple[str, int, int]]]:
    """A real trace of a GPU with three more all-reduces in each step, launched from autograd's thread, the last one after
    backward's last kernel; and (label, start, end) of each in nanoseconds."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    main = next(event["tid"] for event in events if event["name"] == "step 0")
    autograd = Counter(event["tid"] for event in events if event.get("cat") == "cpu_op" and event["tid"] != main)
    thread, process = autograd.most_common(1)[0][0], next(event["pid"] for event in events if event["tid"] == main)
    added = []
    backwards = [event for event in events if event["name"] == "backward" and event.get("cat") == "user_annotation"]
    for step, backward in enumerate(backwards):
        for bucket, (share, length) in enumerate([(0.5, 400.0), (0.7, 900.0), (0.98, 2000.0)]):
            at, number = backward["ts"] + share * backward["dur"], 10_000_000 + 10 * step + bucket
            on_host = {"ph": "X", "pid": process, "tid": thread}
            start = at + 50
            document["traceEvents"] += [
                {**on_host, "cat": "user_annotation", "name": f"all_reduce bucket {bucket}", "ts": at, "dur": 20.0},
                {**on_host, "cat": "user_annotation", "name": "nccl:all_reduce", "ts": at + 1, "dur": 15.0},
                {
                    **on_host,
                    "cat": "cuda_runtime",
                    "name": "cudaLaunchKernelExC",
                    "ts": at + 2,
                    "dur": 8.0,
                    "args": {"correlation": number},
                },
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": NCCL,
                    "pid": 0,
                    "tid": 20,
                    "ts": start,
                    "dur": length,
                    "args": {"device": 0, "stream": 20, "correlation": number},
                },
            ]
            added.append((f"all_reduce bucket {bucket}", round(start * 1000), round((start + length) * 1000)))
    return parse_trace(json.dumps(document), "with NCCL"), added


def test_a_real_steps_kernels_hide_the_messages_that_they_cover():
    recorded, added = with_nccl(EAGER)
    communication = read_communication(read_work(recorded))
    assert [(sent.label, sent.phase, sent.step) for sent in communication.messages] == [
        (label, "backward", index // 3) for index, (label, _, _) in enumerate(added)
    ]
    kernels = [(activity.start_ns, activity.end_ns) for activity in recorded.activities if "nccl" not in activity.name]
    for sent, (_, start, end) in zip(communication.messages, added, strict=True):
        hidden = sum(max(0, min(end, kernel_end) - max(start, kernel_start)) for kernel_start, kernel_end in kernels)
        assert sent.hidden_s == pytest.approx(hidden / 1e9, abs=1e-12)
        assert sent.duration_s == pytest.approx((end - start) / 1e9, abs=1e-12)
    for step, last in zip(communication.steps, added[2::3], strict=True):
        assert 0 < step.tail_s < (last[2] - last[1]) / 1e9 + 1e-3
        assert 0 < step.exposed_s < step.communication_s == pytest.approx(3.3e-3)


GLOO = (MAIN[0], 9)


def gloo(label: str, at: int, start: int, end: int, thread: tuple[int, int] = GLOO) -> list[Range]:
    return [
        span(label, at, at + 10),
        op("c10d::allreduce_", at + 2, at + 8),
        span("gloo:all_reduce", start, end, thread),
    ]


def test_on_a_cpu_ops_of_the_main_thread_hide_messages():
    communication = read(
        span("step 0", 0, 200),
        span("backward", 5, 100),
        op("autograd::engine::evaluate_function: AddmmBackward0", 10, 90),
        op("aten::mm", 35, 50),
        *gloo("all_reduce bucket 0", 20, 31, 45),
        *gloo("all_reduce bucket 1", 51, 62, 110, (MAIN[0], 8)),
        op("aten::mul_", 70, 95),
        op("aten::mm", 60, 120, (MAIN[0], 8)),  # gloo's thread, in its message
        span("grad_sync", 101, 150),
        op("aten::div_", 105, 108),
    )
    assert in_microseconds(communication) == [
        ("all_reduce bucket 0", 22, 31, 45, 10, 4),
        ("all_reduce bucket 1", 53, 62, 110, 28, 20),
    ]
    assert communication.steps[0].tail_s == pytest.approx(10 * US)


def test_a_message_that_began_before_the_recording_is_left_out():
    communication = read(
        span("step 0", 0, 200),
        span("backward", 5, 100),
        op("aten::mm", 35, 50),
        span("gloo:all_reduce", 6, 12, GLOO),
        *gloo("all_reduce bucket 0", 20, 31, 45),
        span("all_reduce bucket 1", 52, 60),
        op("c10d::allreduce_", 53, 58),
    )
    assert [sent.label for sent in communication.messages] == ["all_reduce bucket 0"]


def gloo_fixture(rank: int) -> Trace:
    return read_trace(FIXTURES / f"gloo_rank{rank}.json.gz")


@pytest.mark.parametrize("rank", [0, 1])
def test_recorded_messages_on_gloo_are_complete(rank: int):
    """The fixtures are two steps of one block in four buckets, recorded on two ranks at once."""
    communication = read_communication(read_work(gloo_fixture(rank)))
    assert [(sent.label, sent.step) for sent in communication.messages] == [
        (f"all_reduce bucket {bucket}", step) for step in range(2) for bucket in range(4)
    ]
    for sent in communication.messages:
        assert sent.launched_s < sent.started_s < sent.finished_s
        assert sent.duration_s == pytest.approx(sent.finished_s - sent.started_s, abs=1e-8)
    for step in communication.steps:
        assert 0 < step.exposed_s < step.communication_s
        assert step.tail_s > 0
    assert sum(sent.hidden_s for sent in communication.messages) > 0


def test_ranks_of_one_machine_share_a_clock():
    """A message cannot end on one rank before it has begun on the other."""
    traces = [gloo_fixture(rank) for rank in range(2)]
    assert traces[0].zero_ns > 0
    by_rank = [read_communication(read_work(recorded)).messages for recorded in traces]
    zeros = [(recorded.zero_ns - traces[0].zero_ns) / 1e9 for recorded in traces]
    for pair in zip(*by_rank, strict=True):
        starts = [sent.started_s + zero for sent, zero in zip(pair, zeros, strict=True)]
        ends = [sent.finished_s + zero for sent, zero in zip(pair, zeros, strict=True)]
        assert max(starts) < min(ends)
    waited = waiting_s(
        [
            [(sent.label, sent.started_s + zero) for sent in messages]
            for messages, zero in zip(by_rank, zeros, strict=True)
        ]
    )
    for first, second in zip(*waited, strict=True):
        assert min(first, second) == 0 < max(first, second)
    for waits, messages in zip(waited, by_rank, strict=True):
        assert all(wait <= sent.duration_s for wait, sent in zip(waits, messages, strict=True))


def test_ranks_wait_for_the_last_one():
    starts = [[("a", 1.0), ("b", 5.0)], [("a", 3.0), ("b", 4.0)], [("a", 2.5), ("b", 5.5)]]
    assert waiting_s(starts) == [[2.0, 0.5], [0.0, 1.5], [0.5, 0.0]]
    assert waiting_s([]) == []


def test_a_rank_waits_for_the_ranks_of_its_group():
    """Four ranks in groups of two: 0 and 1, 2 and 3 in a group; 0 and 2, 1 and 3 across."""
    labels = ("all_gather in groups a", "all_reduce across groups a", "all_reduce usage")
    began_s = ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [2.0, 5.0, 2.0], [4.0, 3.0, 9.0])
    starts = [list(zip(labels, times_s, strict=True)) for times_s in began_s]
    assert waiting_s(starts, 2) == [[1.0, 5.0, 9.0], [0.0, 2.0, 8.0], [2.0, 0.0, 7.0], [0.0, 0.0, 0.0]]
    assert waiting_s(starts)[0] == [4.0, 5.0, 9.0]


def test_ranks_with_other_messages_cannot_be_compared():
    with pytest.raises(ValueError, match="starts: rank 1 does not have the messages of rank 0"):
        waiting_s([[("a", 1.0)], [("b", 1.0)]])
    with pytest.raises(ValueError, match="rank 1"):
        waiting_s([[("a", 1.0)], []])


MODEL = ModelConfig(d_model=8, d_ff=16, layers=3, heads=2, vocab_size=20)


def recorded(ranks: Ranks, config: ParallelConfig, path: str) -> list[tuple[str, int | None]]:
    """(label, step) of every message in a trace of two steps, taken after a first step."""
    model = Transformer(MODEL, attention=attention_named("sdpa", 8, torch.device("cpu")), context=8)
    options = adamw_options("foreach", learning_rate=1e-3)
    wrapped = parallel(ranks, config.sync).wrap(model, torch.optim.AdamW, options)
    step = TrainStep(wrapped.module, wrapped.optimizer, gradient_sync=wrapped.gradient_sync)
    batch = {name: torch.randint(MODEL.vocab_size, (1, 8)) for name in ("tokens", "targets")}
    step([batch])
    ranks_barrier = torch.zeros(1)
    torch.distributed.all_reduce(ranks_barrier)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for number in range(2):
            with real_span(f"step {number}"):
                step([batch])
        if config.sync.name == "sharded_flat":
            wrapped.gradient_sync.wait_for_parameters()
    file = f"{path}/{ranks.rank}.json"
    profiler.export_chrome_trace(file)
    return [(sent.label, sent.step) for sent in read_communication(read_work(read_trace(Path(file)))).messages]


@pytest.mark.parametrize("sync", OURS)
def test_a_trace_has_the_messages_of_the_formula(sync: str, tmp_path: Path):
    config = from_plain(ParallelConfig, {"model": MODEL, "sync": sync, "bucket_mib": 0.002, "context": 8})
    exchange = exchange_of(config)
    assert exchange is not None
    expected = Counter(
        expected_message.span for expected_message in step_messages(exchange, transformer_parameters(MODEL, "fp32"))
    )
    for messages in run_ranks(2, recorded, config, str(tmp_path)):
        for step in range(2):
            assert Counter(label for label, message_step in messages if message_step == step) == expected
