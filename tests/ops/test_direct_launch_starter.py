"""A direct start passes to the C function behind Triton's launcher exactly what that launcher would."""

import weakref
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
hopper_boxes = pytest.importorskip("trainstep.ops.flash_attention.hopper.schedules")
nvidia_driver = pytest.importorskip("triton.backends.nvidia.driver")

from trainstep.ops.direct_launch import described_starter, starter  # noqa: E402  needs triton

GRID, STREAM, DEVICE = (7, 1, 1), 77, torch.device("cpu")
META = {"swizzle": 3, "elem_size": 2, "elem_type": 8, "block_size": [1, 1, 8, 64], "fp4_padded": False}


class Compiled:
    """A compiled kernel with triton's own launcher, above a C function that keeps its arguments."""

    function, packed_metadata = 123, (4, 1, 100)

    def __init__(self, signature: dict[str, str], scratch_bytes: int = 0) -> None:
        described = sum(x.startswith("tensordesc") for x in signature.values())
        self.handed: list[tuple[Any, ...]] = []
        self.hooked: list[tuple[Any, ...]] = []
        self.src = SimpleNamespace(signature=signature)
        self.metadata = SimpleNamespace(tensordesc_meta=[META] * described)
        self.run = object.__new__(nvidia_driver.CudaLauncher)
        c_function = self._c_function
        vars(self.run).update(
            launch=nvidia_driver.wrap_handle_tensordesc(
                lambda *x: c_function(*x), dict(enumerate(signature.values())), self.metadata.tensordesc_meta
            ),
            num_ctas=1, launch_cooperative_grid=False, launch_pdl=False,
            global_scratch_size=scratch_bytes, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
            arg_annotations=["annotation"], kernel_signature=b"signature", gsan_enabled=False,
        )  # fmt: skip

    def _c_function(self, *everything: Any) -> None:
        self.handed.append(tuple(tuple(x) if isinstance(x, list) else x for x in everything))

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.hooked.append(arguments)

    def by_triton(self, *arguments: Any) -> tuple[Any, ...]:
        """The arguments that the C function gets from triton's launcher."""
        self.run(*GRID, STREAM, self.function, self.packed_metadata, None, None, None, *arguments)
        return self.handed.pop()


@pytest.fixture(autouse=True)
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the descriptors that were encoded, on a pretend machine with a stream and a TMA."""
    addresses: list[int] = []

    def fill(address: int, *numbers: Any) -> tuple[Any, ...]:
        addresses.append(address)
        return "map", address, *map(str, numbers)

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: STREAM, raising=False)
    return addresses


def forms(q: Tensor, k: Tensor) -> list[Any]:
    """The descriptors of tensors: two of q and one of k."""
    return [hopper_boxes.boxes(x.shape, x.stride(), 8, width, x.dtype) for x, width in ((q, 80), (k, 64))]


def boxed(q: Tensor, k: Tensor) -> list[list[Any]]:
    return [[form and form.of(x) for form in of_tensor] for x, of_tensor in zip((q, k), forms(q, k), strict=True)]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    q = torch.empty(2, 3, 16, 64, dtype=torch.bfloat16)
    return q, torch.empty_like(q), torch.empty(6)


SIGNATURE = {"q": "tensordesc<bf16[1, 1, 8, 64],layout>", "q_rest": "tensordesc<bf16[1, 1, 8, 16],layout>"}
SIGNATURE |= {"k": "tensordesc<bf16[1, 1, 8, 64],layout>", "k_rest": "constexpr"}
SIGNATURE |= {"lse_ptr": "*fp32", "tiles": "i32", "BLOCK": "constexpr"}


def test_a_start_passes_addresses_and_constants():
    compiled = Compiled({"x_ptr": "*fp32", "rows": "i32", "BLOCK": "constexpr"})
    start = starter(compiled, GRID, DEVICE, (3, 64))
    start(4096)
    start(8192)
    assert compiled.handed == [compiled.by_triton(4096, 3, 64), compiled.by_triton(8192, 3, 64)]
    assert not compiled.hooked


def test_a_start_passes_descriptors():
    compiled = Compiled(SIGNATURE)
    q, k, lse = inputs()
    start = described_starter(compiled, GRID, DEVICE, boxed(q, k), (5, 64))
    assert start is not None
    for tensors in (inputs(), (k, q, lse), (q, k, lse)):
        start(*tensors)
        arguments = compiled.handed.pop()
        assert arguments == compiled.by_triton(*chain(*boxed(*tensors[:2])), tensors[2].data_ptr(), 5, 64)


def test_descriptors_are_encoded_once_per_address(encoded: list[int]):
    q, k, lse = inputs()
    start = described_starter(Compiled(SIGNATURE), GRID, DEVICE, boxed(q, k), (5, 64))
    assert start is not None
    encoded.clear()  # each was encoded once, to try it out
    for _ in range(3):
        start(q, k, lse)
    assert encoded == [q.data_ptr(), q.data_ptr(), k.data_ptr()], "two boxes of q, and one of k"
    start(q, k, torch.empty(6))
    assert len(encoded) == 3
    start(k, k, lse)
    assert encoded[3:] == [k.data_ptr()] * 2


def test_other_shapes_at_an_address_are_other_descriptors():
    q, k, lse = inputs()
    compiled = Compiled(SIGNATURE)
    for shape in ((2, 3, 16, 64), (3, 2, 16, 64)):
        start = described_starter(compiled, GRID, DEVICE, boxed(q.view(shape), k.view(shape)), (5, 64))
        assert start is not None
        start(q, k, lse)
        arguments = compiled.handed.pop()
        assert arguments == compiled.by_triton(*chain(*boxed(q.view(shape), k.view(shape))), lse.data_ptr(), 5, 64)


def test_no_tensor_is_kept():
    q, k, lse = inputs()
    start = described_starter(Compiled(SIGNATURE), GRID, DEVICE, boxed(q, k), (5, 64))
    assert start is not None
    start(q, k, lse)
    alive = weakref.ref(q)
    del q
    assert alive() is None


def test_unknown_launchers_go_through_triton():
    """A launcher with scratch memory, one without its inner function, and one with other arguments."""

    def changed(**fields: Any) -> Compiled:
        compiled = Compiled({"x_ptr": "*fp32"})
        vars(compiled.run).update(fields)
        return compiled

    no_launch = changed()
    del no_launch.run.launch
    of_other_arguments = changed()
    of_other_arguments.run = lambda grid, stream, arguments: None
    for compiled in (changed(global_scratch_size=8), no_launch, of_other_arguments):
        start = starter(compiled, GRID, DEVICE, (3,))
        start(4096)
        assert compiled.hooked == [(4096, 3)]
        assert not compiled.handed
        q, k, _ = inputs()
        assert described_starter(compiled, GRID, DEVICE, boxed(q, k), (5, 64)) is None


def test_unknown_wrapping_of_descriptors_goes_through_triton():
    q, k, _ = inputs()
    unwrapped = Compiled(SIGNATURE)
    unwrapped.run.launch = unwrapped._c_function
    without_meta = Compiled(SIGNATURE)
    del without_meta.metadata.tensordesc_meta
    for compiled in (unwrapped, without_meta):
        assert described_starter(compiled, GRID, DEVICE, boxed(q, k), (5, 64)) is None


class FakeBoxed:
    """A kernel of triton's jit that counts its launches and returns a compiled kernel."""

    arg_names = ("q", "q_rest", "k", "k_rest", "lse_ptr", "tiles", "BLOCK")

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.launches = compiled, 0

    def __getitem__(self, _grid: tuple[int, int, int]) -> Callable[..., Any]:
        def launch(*_arguments: Any, **_options: Any) -> Any:
            self.launches += 1
            return self.compiled

        return launch


def boxed_kernel(compiled: Any) -> tuple[Any, FakeBoxed]:
    q, k, _ = inputs()
    kernel = FakeBoxed(compiled)
    return hopper_boxes.BoxedKernel(kernel, 7, forms(q, k), {"tiles": 5, "BLOCK": 64}), kernel


def test_a_kernel_of_boxes_is_started_directly_after_the_first_call():
    compiled = Compiled(SIGNATURE)
    run, kernel = boxed_kernel(compiled)
    q, k, lse = inputs()
    for _ in range(3):
        run(q, k, lse)
    assert kernel.launches == 1
    assert compiled.handed == [compiled.by_triton(*chain(*boxed(q, k)), lse.data_ptr(), 5, 64)] * 2


def test_a_kernel_of_boxes_calls_hooks():
    compiled = Compiled(SIGNATURE)
    run, kernel = boxed_kernel(compiled)
    hook = triton.knobs.runtime.launch_enter_hook
    run(*inputs())
    hook.add(print)
    try:
        run(*inputs())
    finally:
        hook.remove(print)
    assert kernel.launches == 2
    assert not compiled.handed


def test_a_missing_starter_is_searched_for_once(monkeypatch: pytest.MonkeyPatch):
    searches: list[Any] = []
    monkeypatch.setattr(hopper_boxes, "described_starter", lambda *what: searches.append(what))
    run, kernel = boxed_kernel(Compiled(SIGNATURE))
    for _ in range(3):
        run(*inputs())
    assert (kernel.launches, len(searches)) == (3, 1)


def test_a_start_calls_hooks():
    compiled = Compiled({"x_ptr": "*fp32", "rows": "i32"})
    start = starter(compiled, GRID, DEVICE, (3,))
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        start(4096)
    finally:
        hook.remove(print)
    assert compiled.hooked == [(4096, 3)]
    assert not compiled.handed
