"""The time of a traced step: that of the formulas where both know the model, else each operator's kernel."""

from dataclasses import replace

import pytest

from trainstep.config.machine import machine_spec
from trainstep.config.model import UserModel, size
from trainstep.config.parallel import RanksConfig, SyncConfig
from trainstep.config.run import RunConfig
from trainstep.costs.attention import attention_flops
from trainstep.costs.traced_step import TracedStep, Work
from trainstep.plan.step_memory import alone
from trainstep.plan.time.calibration import Calibration, calibration_for
from trainstep.plan.time.kernels import Kind
from trainstep.plan.time.step_time import step_time
from trainstep.plan.time.traced_kernels import traced_kernels, traced_time
from trainstep.training.trace import trace_step


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    found = calibration_for(machine_spec("NVIDIA H200"))
    assert found is not None
    return found


def run_of(**options: object) -> RunConfig:
    fields = {"model": size("small"), "batch_size": 32, "context": 1024, "device": "cuda", "capture": "step"}
    return RunConfig(**{**fields, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16_autocast", "attention": "sdpa", "adamw": "fused"},
        {"precision": "fp32", "attention": "sdpa", "adamw": "foreach", "capture": "none"},
        {"precision": "bf16_master", "attention": "trainstep", "adamw": "trainstep"},
        {"precision": "bf16_autocast", "attention": "trainstep", "recompute": "block", "accumulation": 2},
        {"precision": "bf16_autocast", "attention": "trainstep", "ops": "fused", "adamw": "trainstep"},
    ],
)
def test_a_trace_of_the_built_in_model_takes_as_long_as_its_formulas_say(options, calibration: Calibration):
    run = run_of(**options)
    expected = step_time(alone(run), calibration)
    found = traced_time(alone(run), calibration, trace_step(run))
    assert found.step.time_s == pytest.approx(expected.step.time_s, rel=0.08)
    assert found.phases["optimizer"].time_s == pytest.approx(expected.phases["optimizer"].time_s, rel=0.02)
    assert found.classes["matmul"] == pytest.approx(expected.classes["matmul"], rel=0.15)
    assert found.model_flops == pytest.approx(expected.model_flops, rel=1e-6)


def work(**changes: object) -> Work:
    fields = {
        "phase": "forward", "module": "block", "op": "mul", "kind": "element-wise", "shape": (8, 16), "dtype": "bfloat16",
        "flops": 0, "read_bytes": 256, "written_bytes": 256,
    }  # fmt: skip
    return Work(**{**fields, **changes})  # type: ignore[arg-type]


def traced(*works: Work) -> TracedStep:
    return TracedStep(
        model="mine", parameters=(), buffers_bytes=0, batch_bytes=(), tensors=(), forward=(), backward=(), work=works
    )


@pytest.mark.parametrize(
    ("changes", "kind", "nbytes"),
    [
        ({}, Kind.CONTIGUOUS, 512),
        ({"access": "broadcast"}, Kind.BROADCAST, 8 * 128),
        ({"access": "strided", "read_bytes": 2000}, Kind.STRIDED, 2256),
        ({"op": "_to_copy", "written_bytes": 512}, Kind.WIDENED, 768),
        ({"op": "sum", "shape": (8, 1)}, Kind.ROWS, 512),
        ({"op": "sum", "shape": (16,)}, Kind.COLUMNS, 512),
        ({"op": "_log_softmax_backward_data", "read_bytes": 8, "written_bytes": 4}, Kind.LOSS_BACKWARD, 16),
        ({"op": "rms_norm_backward", "access": "strided"}, Kind.FUSED_COLUMNS, 512),
    ],
)
def test_an_operators_name_and_access_choose_its_kind(changes, kind: Kind, nbytes: int):
    kernels = traced_kernels(traced(work(**changes, times=3)), run_of())
    [kernel] = kernels.forward
    assert (kernel.kind, kernel.nbytes(kernels.symbols), kernel.count) == (kind, nbytes, 3)


def test_the_losses_other_kernels_are_in_log_softmax():
    assert traced_kernels(traced(work(op="nll_loss_forward")), run_of()).forward == ()


def test_attention_of_another_shape_counts_by_its_flops():
    unit = attention_flops(2 * 4, 64, 64, 16, causal=True)
    own = {"op": "_scaled_dot_product_flash_attention", "kind": "attention", "shape": (2, 4, 4, 64, 64, 16)}
    kernels = traced_kernels(
        traced(
            work(**own, flops=unit, causal=True, times=5),
            work(**own, flops=2 * unit, times=2),
            work(**{**own, "shape": (2, 4, 4, 128, 128, 16)}, flops=4 * unit, causal=True),
            # A frozen part has no backward, so the first shape is in forward alone.
            work(
                **{**own, "op": f"{own['op']}_backward", "shape": (2, 4, 4, 32, 32, 16)}, phase="backward", flops=unit
            ),
        ),
        run_of(),
    )
    assert [kernel.count for kernel in kernels.forward] == [5, 4, 4]
    assert [kernel.kind for kernel in kernels.backward] == [Kind.ATTENTION_BACKWARD]
    assert {kernel.kind for kernel in kernels.forward} == {Kind.ATTENTION_FORWARD}
    assert {name: kernels.symbols[name] for name in "BHSD"} == {"B": 2, "H": 4, "S": 64, "D": 16}


def test_products_keep_their_batch_and_dtype():
    kernels = traced_kernels(
        traced(work(op="bmm", kind="matmul", shape=(6, 2, 3, 4), dtype="float32")), run_of(precision="tf32")
    )
    [kernel] = kernels.forward
    assert (kernel.matrix(kernels.symbols), kernel.dtype) == ((2, 3, 4, 6), "tf32")


def test_what_has_no_time_is_refused_by_name(calibration: Calibration):
    run = run_of(model=UserModel(function="mine:build"))
    with pytest.raises(ValueError, match="compile: which ops of your own model are fused"):
        traced_time(alone(replace(run, compile="block")), calibration, traced())
    with pytest.raises(ValueError, match="ranks: the time of your own model is planned for one GPU"):
        traced_time(RanksConfig(ranks=2, sync=SyncConfig(name="fsdp"), run=run), calibration, traced())
