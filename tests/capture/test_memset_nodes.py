"""Kernels in the place of a graph's memsets: the edges by a driver of lists, and what a graph computes on a GPU."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from trainstep.capture.memset_nodes import Fills, Kernel, Memset, driver, replace_memsets

Edge = tuple[int, int, int]
"""From, to, and the edge's conditions as a number."""


@dataclass
class Lists:
    """The driver's functions on lists. `memsets`: node -> what it writes."""

    kernels: list[int]
    memsets: dict[int, Memset]
    edges: set[Edge]
    added: list[Kernel] = field(default_factory=list)
    kinds: dict[int, int] = field(default_factory=dict)
    """Of nodes that are neither kernels nor memsets."""

    def nodes(self, graph: int) -> list[int]:
        return [*self.kernels, *self.memsets]

    def kind(self, node: int) -> int:
        return 2 if node in self.memsets else self.kinds.get(node, 0)

    def memset(self, node: int) -> Memset:
        return self.memsets[node]

    def dependencies(self, node: int) -> list[tuple[int, int]]:
        return [(first, kind) for first, second, kind in self.edges if second == node]

    def dependents(self, node: int) -> list[tuple[int, int]]:
        return [(second, kind) for first, second, kind in self.edges if first == node]

    def add_kernel(self, graph: int, kernel: Kernel, before: Sequence[int]) -> int:
        node = 100 + len(self.added)
        self.added.append(kernel)
        self.kernels.append(node)
        self.edges |= {(other, node, 0) for other in before}
        return node

    def add_dependents(self, graph: int, node: int, others: Sequence[int]) -> None:
        self.edges |= {(node, other, 0) for other in others}

    def remove(self, node: int) -> None:
        del self.memsets[node]
        self.edges = {edge for edge in self.edges if node not in edge[:2]}


class Noted:
    """A kernel for each memset, which notes the memset's address."""

    def kernel(self, memset: Memset) -> Kernel:
        return Kernel(shared_bytes=memset.address)


def memset(address: int, *, height: int = 1, width: int = 1, value: int = 0) -> Memset:
    return Memset(address=address, value=value, element_bytes=4, width=width, height=height)


def test_a_kernel_has_the_edges_of_the_memset():
    # 1 and 2 -> memset 3 -> 4 and 5; 4 -> memset 6 -> nothing
    lists = Lists([1, 2, 4, 5], {3: memset(30), 6: memset(60)}, {(1, 3, 0), (2, 3, 0), (3, 4, 0), (3, 5, 0), (4, 6, 0)})
    assert replace_memsets(0, lists, Noted()) == 2  # type: ignore[arg-type]
    assert lists.memsets == {}
    assert [kernel.shared_bytes for kernel in lists.added] == [30, 60]
    assert lists.edges == {(1, 100, 0), (2, 100, 0), (100, 4, 0), (100, 5, 0), (4, 101, 0)}


def test_memsets_behind_each_other():
    lists = Lists([1, 4], {2: memset(20), 3: memset(30)}, {(1, 2, 0), (2, 3, 0), (3, 4, 0)})
    assert replace_memsets(0, lists, Noted()) == 2  # type: ignore[arg-type]
    assert lists.edges == {(1, 100, 0), (100, 101, 0), (101, 4, 0)}


@pytest.mark.parametrize(
    ("kept", "kind"),
    [
        *((memset(20, height=2), 0), (memset(20, width=0), 0), (memset(20, width=2**29), 0)),
        *((memset(20, value=1), 0), (memset(20), 1)),
    ],
)
def test_what_has_no_kernel_stays(kept: Memset, kind: int):
    edges = {(1, 2, 0), (2, 4, kind)}
    lists = Lists([1, 4], {2: kept}, set(edges))
    assert replace_memsets(0, lists, Noted()) == 0  # type: ignore[arg-type]
    assert (lists.edges, lists.added) == (edges, [])


def test_a_graph_with_memory_nodes_stays_as_it_is():
    lists = Lists([1, 4], {2: memset(20)}, {(1, 2, 0), (2, 4, 0)}, kinds={4: 10})
    assert replace_memsets(0, lists, Noted()) == 0  # type: ignore[arg-type]


def test_a_memset_without_a_kernel_stays_and_the_others_go():
    class Fails(Noted):
        def kernel(self, memset: Memset) -> Kernel:
            if memset.address == 20:
                raise RuntimeError("memory of another device")
            return super().kernel(memset)

    lists = Lists([1, 4], {2: memset(20), 3: memset(30)}, {(1, 2, 0), (2, 3, 0), (3, 4, 0)})
    assert replace_memsets(0, lists, Fails()) == 1  # type: ignore[arg-type]
    assert lists.edges == {(1, 2, 0), (2, 100, 0), (100, 4, 0)}


def test_the_driver_is_asked_by_its_own_structures():
    # Sizes of CUDA_MEMSET_NODE_PARAMS and CUDA_KERNEL_NODE_PARAMS_v2 (cuda.h, CUDA 12 and 13)
    assert (ctypes.sizeof(Memset), ctypes.sizeof(Kernel)) == (40, 72)


def sums_of_long_rows(x: torch.Tensor) -> torch.Tensor:
    return x.sum()  # many blocks, which count how many are done


def split_matmul(x: torch.Tensor) -> torch.Tensor:
    weight = x.view(-1)[: 65_536 * 64].view(65_536, 64).bfloat16()
    return weight.T @ weight


def filled(x: torch.Tensor) -> torch.Tensor:
    """500 bytes of 200, 400 of 0 by fours, and 100 by twos that no kernel takes over."""
    cleared = torch.empty(1000, dtype=torch.uint8, device=x.device)
    library = ctypes.CDLL("libcuda.so.1")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    address = cleared.data_ptr()
    assert library.cuMemsetD8Async(ctypes.c_uint64(address), ctypes.c_ubyte(200), ctypes.c_size_t(500), stream) == 0
    assert library.cuMemsetD32Async(ctypes.c_uint64(address + 500), ctypes.c_uint(0), ctypes.c_size_t(100), stream) == 0
    assert (
        library.cuMemsetD16Async(ctypes.c_uint64(address + 900), ctypes.c_ushort(40_000), ctypes.c_size_t(50), stream)
        == 0
    )
    return cleared.float() + x[0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "kept"), [(sums_of_long_rows, 0), (split_matmul, 0), (filled, 1)])
def test_a_graph_without_memsets_computes_the_same(function: Callable[[torch.Tensor], torch.Tensor], kept: int):
    known = driver()
    assert known is not None
    stream = torch.cuda.Stream()
    torch.manual_seed(0)
    x = torch.randn(4096, 4096, device="cuda")
    with torch.cuda.stream(stream):
        function(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(capture_error_mode="thread_local")
        result = function(x)
        graph.capture_end()
        pointer = graph.raw_cuda_graph()
        memsets = [node for node in known.nodes(pointer) if known.kind(node) == 2]
        if function is not split_matmul:  # which matmuls cuBLAS splits is its choice
            assert len(memsets) > kept
        assert replace_memsets(pointer, known, Fills(known)) == len(memsets) - kept
        assert [known.kind(node) for node in known.nodes(pointer)].count(2) == kept
        graph.instantiate()
        for _ in range(3):
            x.normal_()
            graph.replay()
            torch.cuda.synchronize()
            torch.testing.assert_close(result.clone(), function(x))
