"""Replaces a captured graph's memsets by kernels, because a memset may wait for copies to other GPUs.

The driver gives a memset of a graph to a copy engine, and one of its channels may also hold copies to other GPUs. In traces of
four H100s the first memset behind a message waits for these copies, 0.6 to 2.7 ms (docs/log.md, 2026-11-27). cuBLAS clears 4 bytes
before each matmul that it splits: three times per block in a model 1,600 wide.

The graph is edited through the CUDA driver's API (docs.nvidia.com/cuda/cuda-driver-api, Graph Management). The kernel is the one
that `Tensor.fill_` launches, taken from a graph of its own.
"""

import ctypes
import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

_MEMSET = 2
"""CU_GRAPH_NODE_TYPE_MEMSET."""
_MEMORY = (10, 11)
"""CU_GRAPH_NODE_TYPE_MEM_ALLOC and _FREE: in a graph that has one, the driver removes no node."""
_MOST_BYTES = 2**31 - 1
"""For more bytes than this, `fill_` launches two kernels."""


class Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: `height` rows of `width` elements of `element_bytes` become `value`."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("pitch_bytes", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2. The arguments belong to the node from which this was read."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class Driver:
    """The driver's functions for graphs; nodes and graphs are addresses. RuntimeError where one fails."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} returned {code}")

    def nodes(self, graph: int) -> list[int]:
        count = ctypes.c_size_t()
        self._call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
        if count.value == 0:
            return []
        nodes = (ctypes.c_void_p * count.value)()
        self._call("cuGraphGetNodes", ctypes.c_void_p(graph), nodes, ctypes.byref(count))
        return [node or 0 for node in nodes]

    def kind(self, node: int) -> int:
        """CUgraphNodeType."""
        kind = ctypes.c_int()
        self._call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        return kind.value

    def memset(self, node: int) -> Memset:
        memset = Memset()
        self._call("cuGraphMemsetNodeGetParams", ctypes.c_void_p(node), ctypes.byref(memset))
        return memset

    def kernel(self, node: int) -> Kernel:
        kernel = Kernel()
        self._call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(kernel))
        return kernel

    def dependencies(self, node: int) -> list[tuple[int, int]]:
        """What the node waits for: (node, CUgraphEdgeData as a number, 0 for an ordinary edge)."""
        return self._edges("cuGraphNodeGetDependencies_v2", node)

    def dependents(self, node: int) -> list[tuple[int, int]]:
        """What waits for the node, as `dependencies`."""
        return self._edges("cuGraphNodeGetDependentNodes_v2", node)

    def _edges(self, name: str, node: int) -> list[tuple[int, int]]:
        count = ctypes.c_size_t()
        self._call(name, ctypes.c_void_p(node), None, None, ctypes.byref(count))
        if count.value == 0:  # the driver refuses arrays without room
            return []
        nodes, data = (ctypes.c_void_p * count.value)(), (ctypes.c_uint64 * count.value)()
        self._call(name, ctypes.c_void_p(node), nodes, data, ctypes.byref(count))
        return [(node or 0, kind) for node, kind in zip(nodes, data, strict=True)]

    def add_kernel(self, graph: int, kernel: Kernel, before: Sequence[int]) -> int:
        """A new node, which waits for those `before`."""
        node, nodes = ctypes.c_void_p(), (ctypes.c_void_p * len(before))(*before) if before else None
        self._call(
            "cuGraphAddKernelNode_v2",
            ctypes.byref(node),
            ctypes.c_void_p(graph),
            nodes,
            ctypes.c_size_t(len(before)),
            ctypes.byref(kernel),
        )
        return node.value or 0

    def add_dependents(self, graph: int, node: int, others: Sequence[int]) -> None:
        """Let the others wait for the node."""
        count = len(others)
        if count == 0:
            return
        self._call(
            "cuGraphAddDependencies_v2",
            ctypes.c_void_p(graph),
            (ctypes.c_void_p * count)(*[node] * count),
            (ctypes.c_void_p * count)(*others),
            (ctypes.c_uint64 * count)(),
            ctypes.c_size_t(count),
        )

    def remove(self, node: int) -> None:
        """Remove the node and all its edges."""
        self._call("cuGraphDestroyNode", ctypes.c_void_p(node))


@functools.cache
def driver() -> Driver | None:
    """The driver's library; None where there is none, or one without these functions (before CUDA 12.3)."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name in ("cuGraphNodeGetDependencies_v2", "cuGraphAddDependencies_v2", "cuGraphAddKernelNode_v2"):
            getattr(library, name)
    except (OSError, AttributeError):
        return None
    return Driver(library)


class Fills:
    """Kernels that write what a memset writes, one for each memory and value; keep this until they are added, which copies them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._kernels: dict[tuple[int, ...], Kernel] = {}

    def kernel(self, memset: Memset) -> Kernel:
        """The kernel of a memset, captured in a small graph: call it on a stream that can capture and does not capture now.

        The kernel writes bytes, whatever the memset's elements are, so that it has one name (traces/kernel_classes.py).
        RuntimeError if torch does not take the memory.
        """
        bytes_ = memset.width * memset.element_bytes
        key = (memset.address, bytes_, memset.value)
        if key not in self._kernels:
            tensor = torch.as_tensor(_Bytes(memset.address, bytes_), device="cuda")
            if tensor.data_ptr() != memset.address:
                raise RuntimeError("torch has copied what is to be written")
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            graph.capture_begin(capture_error_mode="thread_local")
            tensor.fill_(memset.value)
            graph.capture_end()
            self._graphs.append(graph)
            [node] = self._driver.nodes(graph.raw_cuda_graph())
            self._kernels[key] = self._driver.kernel(node)
        return self._kernels[key]


class _Bytes:
    """Memory of the device, as an array that torch takes."""

    def __init__(self, address: int, bytes_: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (bytes_,), "typestr": "|u1", "version": 3}


def replace_memsets(graph: int, driver: Driver, fills: Fills) -> int:
    """Put kernels in the place of the memsets of a graph that is not instantiated yet; returns how many.

    A memset stays if it has several rows, other values than bytes, or ports or programmatic launches on its edges. Nothing is
    edited before all kernels are there, so whatever fails until then leaves the graph as it was captured.
    """
    kinds = {node: driver.kind(node) for node in driver.nodes(graph)}
    if not set(_MEMORY).isdisjoint(kinds.values()):
        return 0
    kernels = {}
    for node in (node for node, kind in kinds.items() if kind == _MEMSET):
        memset = driver.memset(node)
        has_edge_data = any(data for _, data in (*driver.dependencies(node), *driver.dependents(node)))
        if _is_by_bytes(memset) and not has_edge_data:
            with suppress(RuntimeError):  # memory that torch does not take, such as another device's
                kernels[node] = fills.kernel(memset)
    for node, kernel in kernels.items():  # edges are read now: those of memsets behind each other have changed
        before, behind = driver.dependencies(node), driver.dependents(node)
        added = driver.add_kernel(graph, kernel, [other for other, _ in before])
        driver.add_dependents(graph, added, [other for other, _ in behind])
        driver.remove(node)
    return len(kernels)


def _is_by_bytes(memset: Memset) -> bool:
    bytes_ = memset.width * memset.element_bytes
    is_byte = memset.element_bytes == 1 or memset.value == 0
    return bool(memset.height == 1 and 0 < bytes_ <= _MOST_BYTES and is_byte)
