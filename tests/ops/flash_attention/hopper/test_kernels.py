"""The Hopper kernels are as accurate as the reference: on a CPU in the emulator, on a GPU through the public function, where
the portable kernels' test_kernels.py runs too."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import Case, check, covering, random_case

pytest.importorskip("triton.experimental.gluon")
from hopper_emulated import Emulated
from trainstep.ops import flash_attention, reference
from trainstep.ops.flash_attention.choice import describe_choice
from trainstep.ops.flash_attention.hopper import host as hopper
from trainstep.ops.flash_attention.hopper.schedules import (
    BACKWARD,
    FORWARD,
    REGISTERS,
    SHARED_MEMORY_BYTES,
    WIDTHS,
    BackwardSchedule,
    ForwardSchedule,
    ForwardWork,
    fastest,
    heads_together,
    in_order,
    key_heads_together,
    work_order,
)

CASES = {
    "whole tiles": Case(heads=2, queries=384, keys=384, head_dim=64),
    "whole tiles, no mask": Case(heads=2, queries=256, keys=384, head_dim=64, causal=False),
    "ragged": Case(heads=3, queries=333, keys=333, head_dim=64),
    "ragged, no mask": Case(queries=333, keys=461, head_dim=64, causal=False),
    "one of each": Case(batch=40, queries=1, keys=1, head_dim=64),
    "shared key heads": Case(heads=8, key_heads=2, queries=200, keys=200, head_dim=64, strided="BSHD"),
    "one key head": Case(batch=2, heads=3, queries=140, keys=150, head_dim=64, causal=False, strided="fused"),
    "more keys": Case(queries=150, keys=500, head_dim=64),
    "more keys, aligned at the end": Case(queries=150, keys=500, head_dim=64, alignment="bottom_right"),
    "more queries": Case(queries=500, keys=150, head_dim=64),
    "queries that see nothing": Case(queries=500, keys=150, head_dim=64, alignment="bottom_right"),
    "far apart": Case(heads=2, key_heads=1, queries=70, keys=1000, head_dim=64, alignment="bottom_right"),
    "large scores": Case(queries=200, keys=200, head_dim=64, magnitude=40.0),
}
FORWARD_ROWS = [(width, schedule) for width in WIDTHS for schedule in FORWARD[width]]
FORWARD_SCHEDULES = [
    *FORWARD[64],
    ForwardSchedule(warpgroups=1, block_k=64, stages=2, programs_per_multiprocessor=2),
    ForwardSchedule(warpgroups=2, block_k=64, stages=3),
    ForwardSchedule(warpgroups=3, block_k=64, stages=2),
]
BACKWARD_SCHEDULES = [BackwardSchedule(block_q=64, stages=2), BackwardSchedule(block_q=64, stages=3)]


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str):
    """One width early and the other late; the slow tests have the other pairs."""
    check(Emulated(late=False), dataclasses.replace(CASES[name], head_dim=128, dtype=torch.bfloat16))
    check(Emulated(late=True), dataclasses.replace(CASES[name], head_dim=64, dtype=torch.float16))


@pytest.mark.parametrize("name", CASES)
def test_cases_of_two_parts(name: str):
    check(Emulated(late=True), dataclasses.replace(CASES[name], head_dim=80, dtype=torch.bfloat16))
    check(Emulated(late=False), dataclasses.replace(CASES[name], head_dim=96, dtype=torch.float16))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_cases_the_other_way_round(name: str):
    for late, head_dim in ((True, 128), (False, 64), (False, 80), (True, 96)):
        dtype = torch.float16 if late else torch.bfloat16
        check(Emulated(late=late, seed=1), dataclasses.replace(CASES[name], head_dim=head_dim, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("schedule", FORWARD_SCHEDULES, ids=str)
def test_forward_schedules(schedule: ForwardSchedule, head_dim: int):
    for late, name in enumerate(("ragged", "queries that see nothing")):
        case = dataclasses.replace(CASES[name], head_dim=head_dim, dtype=torch.bfloat16)
        check(Emulated(forward=schedule, late=bool(late)), case)


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("schedule", BACKWARD_SCHEDULES, ids=str)
def test_backward_schedules(schedule: BackwardSchedule, head_dim: int):
    for late, name in enumerate(("ragged", "queries that see nothing")):
        case = dataclasses.replace(CASES[name], head_dim=head_dim, dtype=torch.bfloat16)
        check(Emulated(backward=schedule, late=bool(late)), case)


@pytest.mark.parametrize("head_dim", [40, 72, 88, 104])
def test_heads_narrower_than_their_tile(head_dim: int):
    check(Emulated(), dataclasses.replace(CASES["shared key heads"], head_dim=head_dim, dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_cases():
    """Every pair of properties that a supported case among 600 has, in as few cases as it takes."""
    supported = []
    for seed in range(600):
        case = random_case(seed, longest=700, dtypes=[torch.bfloat16, torch.float16], most_pairs=2e6)
        tensors = case.tensors()[:3]
        refused = hopper.why_not_shape(case.dtype, tuple(x.shape for x in tensors), tuple(x.stride() for x in tensors))
        if not refused and not any(x.data_ptr() % 16 for x in tensors):
            supported.append(case)
    cases = covering(supported)
    assert len(cases) >= 40
    for case in cases:
        check(Emulated(late=case.seed % 3 == 0, seed=case.seed), case)


@pytest.mark.parametrize("head_dim", WIDTHS)
def test_hidden_keys_are_not_read(head_dim: int):
    q, k, v, do = Case(queries=128, keys=512, head_dim=head_dim, dtype=torch.bfloat16).tensors()
    k[:, :, 128:], v[:, :, 128:] = float("nan"), float("nan")
    o, lse = Emulated()(q.requires_grad_(), k, v, causal=True)
    assert o.isfinite().all()
    assert lse.isfinite().all()
    assert torch.autograd.grad(o, q, do)[0].isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("visible", [False, True])
def test_a_difference_beyond_fp16s_range_keeps_gradients_accurate(visible: bool, dtype: torch.dtype, head_dim: int):
    """dp - delta is about 1.5e5 for one key of 128, which has no weight, or as much weight as the others."""
    q, k, v, do = Case(queries=64, keys=128, head_dim=head_dim, dtype=dtype, causal=False).tensors()
    q /= 10
    if not visible:
        q[..., 0], k[..., 0], k[:, :, 0, 0] = 20, 0, -200
    v[:, :, 0], do = 50, torch.full_like(do, 50)

    def gradients(attend: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        return torch.autograd.grad(attend(*leaves, causal=False), leaves, tensors[3])

    computed = gradients(lambda *x, causal: Emulated()(*x, causal=causal)[0], q, k, v, do)
    exact = gradients(reference.attention, *(x.double() for x in (q, k, v, do)))
    for gradient, exact_gradient in zip(computed, exact, strict=True):
        assert (gradient - exact_gradient).abs().max() <= 4 * torch.finfo(dtype).eps * exact_gradient.abs().max()


def test_every_bit_of_forward_repeats():
    q, k, v, _ = Case(heads=2, queries=300, keys=300, head_dim=64, dtype=torch.bfloat16).tensors()
    first, lse = Emulated(seed=1)(q, k, v, causal=True)
    second, second_lse = Emulated(seed=2, late=True)(q, k, v, causal=True)
    assert torch.equal(first, second)
    assert torch.equal(lse, second_lse)


@pytest.mark.parametrize(("width", "schedule"), FORWARD_ROWS, ids=str)
def test_forward_rows_fit_into_shared_memory_and_registers(width: int, schedule: ForwardSchedule):
    assert schedule.shared_bytes(width) * schedule.programs_per_multiprocessor <= SHARED_MEMORY_BYTES
    threads = 128 * (schedule.warpgroups + 1)
    assert threads * (schedule.most_registers or REGISTERS // threads) <= REGISTERS


def test_heads_run_together_as_they_fit_the_cache():
    assert (
        heads_together(heads_per_key_head=4, keys=1 << 20, head_dim=128, batch_heads=64) == 4
    )  # too long for any cache
    assert heads_together(heads_per_key_head=4, keys=128, head_dim=64, batch_heads=64) == 64


def test_key_heads_run_together_as_they_fit_the_cache():
    """Few key heads of many long heads: two fit the cache, but 256 programs would then end with two long ones, and 2,048 do not."""
    assert key_heads_together(32 * 8, 132, queries=8 * 4096, head_dim=64, batch_key_heads=8) == 8
    assert key_heads_together(32 * 64, 132, queries=4096, head_dim=128, batch_key_heads=64) == 8


def test_work_order_has_every_piece_once_and_balanced_loads():
    """The pieces here are the causal tiles of 64 heads in groups of 16."""
    costs = [1 + blocks for _ in range(4) for blocks in range(32, 0, -1) for _ in range(16)]
    table = work_order(costs, 132)
    begins, pieces = table[:133], table[133:]
    assert sorted(pieces) == list(range(len(costs)))
    loads = [sum(costs[i] for i in pieces[begins[n] : begins[n + 1]]) for n in range(132)]
    assert max(loads) <= 1.02 * sum(costs) / 132


def test_the_fastest_schedule_is_chosen_for_a_call():
    """The choices were measured on an H200 (docs/log.md): 192 queries for many tiles, 64 for few, else by the last wave's fill."""

    def chosen(batch_heads: int, positions: int) -> tuple[int, int]:
        together = heads_together(1, positions, 64, batch_heads)
        work = ForwardWork(
            heads=batch_heads, together=together, queries=positions, keys=positions, causal=True, offset=0
        )
        schedule = fastest(FORWARD[64], work, 132)
        return schedule.block_q, schedule.block_k

    assert chosen(16, 16384) == (192, 128)
    assert chosen(1, 16384) == (64, 128)
    assert chosen(512, 1024) == (64, 128)
    assert chosen(8192, 8192) == (192, 128), "too many to simulate"


def test_costs_are_in_the_kernels_order():
    """Two heads together, then the third; a tile of 64 queries sees 1, 2, 3 blocks of 64, and offset 64 one more of at most 3."""
    schedule = ForwardSchedule(warpgroups=1, block_k=64, stages=2)
    work = ForwardWork(heads=3, together=2, queries=190, keys=190, causal=True, offset=0)

    def costs(work: ForwardWork) -> list[int]:
        return in_order(work.costs_of_head(schedule), work.heads, work.together)

    assert costs(work) == [4, 4, 3, 3, 2, 2, 4, 3, 2]
    assert costs(dataclasses.replace(work, offset=64)) == [4, 4, 4, 4, 3, 3, 4, 4, 3]
    assert costs(dataclasses.replace(work, causal=False)) == [4] * 9
    assert costs(dataclasses.replace(work, offset=-500)) == [2] * 9, "one block is always visited"


def test_unsupported_tensors_are_refused_with_a_reason():
    def why(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, **changes: object) -> str | None:
        case = Case(heads=2, queries=100, keys=100, head_dim=head_dim, dtype=dtype, **changes)  # type: ignore[arg-type]
        tensors = case.tensors()[:3]
        return hopper.why_not_shape(dtype, tuple(x.shape for x in tensors), tuple(x.stride() for x in tensors))

    assert why() is None
    assert why(strided="BSHD") is None
    assert why(strided="fused") is None
    assert "16-bit" in (why(torch.float32) or "")
    assert "44 wide" in (why(head_dim=44) or "")
    assert "136 wide" in (why(head_dim=136) or "")
    assert "stride" in (why(strided="padded") or "")
    q = torch.empty(1, 1, 100, 64, dtype=torch.bfloat16).expand(1, 2, 100, 64)
    assert "expanded" in (hopper.why_not_shape(q.dtype, (q.shape,) * 3, (q.stride(),) * 3) or "")
    assert "not sm_90" in (hopper.why_not(q, q, q) or "")


def test_every_head_width_has_rows():
    assert set(FORWARD) == set(BACKWARD) == set(WIDTHS)


def test_rows_and_columns_of_dq_are_not_both_shared_out():
    with pytest.raises(ValueError, match=r"block_q: 128 .* take 64"):
        BackwardSchedule(block_q=128, stages=2).dq_columns(80)
    assert BackwardSchedule(block_q=128, stages=2).dq_columns(64) == (64,)


# On a GPU ------------------------------------------------------------------------------------------------------------------------


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, causal_alignment: str = "top_left"
) -> tuple[Tensor, Tensor]:
    if describe_choice(q, k, v, backward=True) != "Hopper kernels":
        pytest.skip(f"portable kernels here: {describe_choice(q, k, v, backward=True)}")
    return flash_attention(  # type: ignore[return-value]
        q, k, v, is_causal=causal, causal_alignment=causal_alignment, enable_gqa=True, return_lse=True
    )


def fill_free_memory_with_nan() -> None:
    """Fill free memory, so that what torch.empty returns next is NaN wherever a kernel does not write."""
    blocks = [
        torch.full((1 << power,), float("nan"), device="cuda") for power in (12, 15, 18, 20, 22, 24) for _ in range(3)
    ]
    del blocks


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head_dim", WIDTHS)
def test_cases_on_a_gpu(name: str, head_dim: int):
    fill_free_memory_with_nan()
    check(attend, dataclasses.replace(CASES[name], head_dim=head_dim, dtype=torch.bfloat16), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(300), ids=lambda seed: f"part{seed % 8}-{seed}")
def test_random_cases_on_a_gpu(seed: int):
    """Split over processes by `-k part0-` to `part7-`."""
    draw = random.Random(seed)
    key_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 1, 2, 4, 8])
    queries = draw.choice([64, draw.randint(64, 300), draw.randint(64, 3000)])
    case = Case(
        batch=max(draw.choice([1, 2, 3]), -(-32 // (key_heads * group * queries))),
        heads=key_heads * group,
        key_heads=key_heads,
        queries=queries,
        keys=draw.choice([queries, queries, draw.randint(1, 3000)]),
        head_dim=draw.choice([64, 64, 128, 128, 80, 96, 8 * draw.randint(5, 16)]),
        dtype=draw.choice([torch.bfloat16, torch.float16]),
        causal=draw.random() < 0.6,
        alignment=draw.choice(["top_left", "bottom_right"]),
        strided=draw.choice(["BHSD", "BSHD", "fused"]),
        seed=seed,
    )
    fill_free_memory_with_nan()
    check(attend, case, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", WIDTHS)
def test_a_thousand_runs_give_the_same_bits(head_dim: int):
    """A race shows as a changed bit, except in dq, whose sum has no fixed order."""
    case = Case(batch=2, heads=4, key_heads=2, queries=1111, keys=1111, head_dim=head_dim, dtype=torch.bfloat16)
    q, k, v, do = case.tensors("cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def outputs() -> tuple[Tensor, ...]:
        o, lse = attend(*leaves, causal=True)
        return (o, lse, *torch.autograd.grad(o, leaves, do))

    first = outputs()
    size = first[2].abs().max()
    for _ in range(1000):
        o, lse, dq, dk, dv = outputs()
        assert all(torch.equal(a, b) for a, b in zip((o, lse, dk, dv), (*first[:2], *first[3:]), strict=True))
        assert (dq - first[2]).abs().max() <= torch.finfo(torch.bfloat16).eps * size


@pytest.mark.gpu
def test_deterministic_algorithms_repeat_every_bit():
    q, k, v, do = Case(heads=4, queries=2000, keys=2000, head_dim=64, dtype=torch.bfloat16).tensors("cuda")
    k, v = (x.expand(1, 4, -1, -1).contiguous() for x in (k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in describe_choice(q, k, v, backward=True)
        runs = [torch.autograd.grad(flash_attention(*leaves, is_causal=True), leaves, do) for _ in range(10)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))
