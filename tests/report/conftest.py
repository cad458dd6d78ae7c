"""Records made by hand, of which a test can compute every number on paper."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainstep.config.parsing import build_run, config_hash, to_plain
from trainstep.records.record import Environment, Fact, Failure, Holder, Record, Samples
from trainstep.records.store import Store
from trainstep.report.kit.rows import Row, rows_of

GIB = 2**30
H200 = Environment(
    hostname="node7",
    os="Linux 6.8",
    cpu="Xeon 8480",
    cores=16,
    memory_bytes=128 * GIB,
    python="3.11.9",
    trainstep="0.1.0",
    source="00ff00ff00ff00ff",
    commit="abc1234",
    dirty=True,
    torch="2.13.0",
    triton="3.9.0",
    cuda="13.0",
    gpu="NVIDIA H200",
    gpu_count=1,
    gpu_memory_bytes=140 * GIB,
    driver="580.65",
)
LAPTOP = Environment(
    hostname="laptop",
    os="Linux 6.8",
    cpu="Ryzen 7840U",
    cores=8,
    memory_bytes=32 * GIB,
    python="3.12.1",
    trainstep="0.1.0",
    source="00ff00ff00ff00ff",
    torch="2.13.0+cpu",
)
FLOPS = 19.8e12
"""FLOPs of a step: 10 % of an H200's 990 TFLOP/s in bf16 when it takes 0.2 s."""
OOM = Failure(
    kind="out_of_memory",
    phase="backward",
    message="ran out of memory in backward asking for 2,147,483,648 bytes",
    asked_bytes=2 * GIB,
    allocated_bytes=138 * GIB,
    capacity_bytes=140 * GIB,
    holders=(Holder(name="parameters", bytes=60 * GIB), Holder(name="gradients", bytes=50 * GIB)),
    last_lines=("CUDA out of memory. Tried to allocate 2.00 GiB.",),
)
TIMEOUT = Failure(kind="timeout", phase="warmup", message="not done after 300 s", last_lines=("compiling...",))


def train_step(
    *,
    step: Sequence[float] = (0.198, 0.2, 0.202),
    warmups: Sequence[float] = (),
    facts: Mapping[str, Any] | None = None,
    failure: Failure | None = None,
    environment: Environment = H200,
    **values: Any,
) -> Record:
    """A record whose forward, backward and optimizer take 30, 60 and 10 % of each step."""
    device = "cuda" if environment.gpu else "cpu"
    warmups_count = values.pop("warmups_count", len(warmups))
    config = to_plain(build_run({"device": device, "steps": len(step), "warmups": warmups_count, **values}))
    units = {"tokens": "count", "model_flops": "flops", "compile_s": "s", "context_s": "s", "reallocated_step_s": "s"}
    values_of_facts = {"tokens": 1024, "model_flops": FLOPS, "flops_convention": "matmuls only", "flops_dtype": "bf16"}
    values_of_facts["peak_allocated_bytes" if environment.gpu else "peak_rss_bytes"] = 3 * GIB
    values_of_facts["timing"] = "cuda_events" if environment.gpu else "host_clock"
    values_of_facts |= facts or {}
    return Record(
        workload="train_step",
        key=config_hash("train_step", config),
        config=config,
        environment=environment,
        started_at="2026-11-21T08:00:00Z",
        duration_s=10.0,
        samples={} if failure else phases(step, warmups),
        facts={}
        if failure
        else {name: Fact(value=value, unit=units.get(name, "")) for name, value in values_of_facts.items()},
        failure=failure,
    )


def phases(step: Sequence[float], warmups: Sequence[float]) -> dict[str, Samples]:
    shares = {"forward": 0.3, "backward": 0.6, "optimizer": 0.1, "step": 1.0}
    return {
        name: Samples(unit="s", values=tuple(share * s for s in step), warmups=tuple(share * s for s in warmups))
        for name, share in shares.items()
    }


def with_samples(record: Record, **samples: Samples) -> Record:
    """The record with more series."""
    return Record(**{**vars(record), "samples": {**record.samples, **samples}})


def as_rows(records: Sequence[Record]) -> list[Row]:
    return rows_of([("runs/made.jsonl", record) for record in records])


@pytest.fixture
def make() -> Callable[..., Record]:
    return train_step


@pytest.fixture
def rows() -> Callable[[Sequence[Record]], list[Row]]:
    return as_rows


@pytest.fixture
def end_to_end() -> list[Record]:
    """Two model sizes at two contexts; the largest cell ran out of memory."""
    return [
        train_step(model="small", context=256, precision="bf16", step=(0.198, 0.2, 0.202)),
        train_step(model="small", context=512, precision="bf16", step=(0.4, 0.4, 0.4)),
        train_step(model="2.7B", context=256, precision="bf16", step=(1.0, 1.1, 1.2)),
        train_step(model="2.7B", context=512, precision="bf16", failure=OOM),
    ]


@pytest.fixture
def warmup_sweep() -> list[Record]:
    """The same steps with 0, 1, 2 and 5 warm-ups: 2.0, 0.5, 0.25, then 0.2 s; the clock rises from 1 to 2 GHz."""
    every_step = (2.0, 0.5, 0.25, *[0.2] * 12)
    clocks = (1e9, 1.5e9, *[2e9] * 13)
    mallocs = (40.0, 8.0, *[0.0] * 13)
    facts = {"context_s": 0.3, "reallocated_step_s": 0.5, "compile_s": 0.7}
    records = []
    for w in (0, 1, 2, 5):
        record = train_step(model="small", step=every_step[w : w + 10], warmups=every_step[:w], facts=facts)
        series = {"sm_clock": ("Hz", clocks), "device_allocations": ("count", mallocs)}
        more = {name: Samples(unit=u, values=v[w : w + 10], warmups=v[:w]) for name, (u, v) in series.items()}
        records.append(with_samples(record, **more))
    return records


@pytest.fixture
def precision_pair() -> list[Record]:
    """bf16 takes exactly half of fp32's time, over 20 interleaved steps."""
    steps = [0.2 + 0.001 * (i % 5) for i in range(20)]
    interleaved = {"interleaving": "live", "interleaving_group": "g1", "turn_steps": 1}
    return [
        train_step(
            model="small",
            precision="fp32",
            step=steps,
            facts={**interleaved, "flops_dtype": "fp32", "model_flops": 1e12},
        ),
        train_step(
            model="small",
            precision="bf16_autocast",
            step=[s / 2 for s in steps],
            facts={**interleaved, "model_flops": 1e12},
        ),
    ]


@pytest.fixture
def compile_sweep() -> list[Record]:
    """No compilation, compiled blocks, and a compilation of the whole model that timed out."""
    return [
        train_step(model="large", compile="none", step=[0.1] * 10),
        train_step(model="large", compile="block", step=[0.08] * 10),
        train_step(model="large", compile="model", step=[0.1] * 10, failure=TIMEOUT),
    ]


@pytest.fixture
def cpu_record() -> Record:
    return train_step(model="tiny", context=64, environment=LAPTOP, step=(0.01, 0.011, 0.012), warmups=(0.05, 0.012))


@pytest.fixture
def store(tmp_path: Path) -> Callable[[Sequence[Record]], Path]:
    def write(records: Sequence[Record]) -> Path:
        path = tmp_path / "runs" / "made.jsonl"
        for record in records:
            Store(path).append(record)
        return path

    return write
