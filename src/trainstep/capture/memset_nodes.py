"""Replaces a captured graph's memsets by kernels, because a memset may wait for copies to other GPUs.

The driver gives a memset of a graph to a copy engine, one of whose channels may also hold copies to other GPUs: by traces of four
H100s the first memset behind a message waits for them, 0.6 to 2.7 ms (docs/log.md, 2026-11-27). cuBLAS clears 4 bytes before each
matmul that it splits, three times a block of a model 1,600 wide.

The graph is edited through the CUDA driver's API (docs.nvidia.com/cuda/cuda-driver-api, Graph Management). The kernel is the one
that `Tensor.fill_` launches, taken from a graph of its own.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

_MEMSET_NODE = 2  # CU_GRAPH_NODE_TYPE_MEMSET
_TYPES = {1: "|u1", 2: "<i2", 4: "<i4"}
"""Bytes of an element -> its type in a CUDA array interface."""


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

    def is_memset(self, node: int) -> bool:
        kind = ctypes.c_int()
        self._call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        return kind.value == _MEMSET_NODE

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
        """The kernel of a memset, captured in a small graph: call it on a stream that may capture and does not."""
        key = (memset.address, memset.width, memset.value, memset.element_bytes)
        if key not in self._kernels:
            value, element_bytes = memset.value, memset.element_bytes
            if value == 0:  # by bytes, so that the kernel has one name, by which traces/attribution.py knows it
                element_bytes = 1
            elements = memset.width * memset.element_bytes // element_bytes
            tensor = torch.as_tensor(_Memory(memset.address, elements, _TYPES[element_bytes]), device="cuda")
            assert tensor.data_ptr() == memset.address, "torch copied what is to be written"
            if tensor.dtype != torch.uint8 and value >= 2 ** (8 * element_bytes - 1):
                value -= 2 ** (8 * element_bytes)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            graph.capture_begin(capture_error_mode="thread_local")
            tensor.fill_(value)
            graph.capture_end()
            self._graphs.append(graph)
            (node,) = self._driver.nodes(graph.raw_cuda_graph())
            self._kernels[key] = self._driver.kernel(node)
        return self._kernels[key]


class _Memory:
    """Memory of the device, as an array that torch takes."""

    def __init__(self, address: int, elements: int, kind: str) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (elements,), "typestr": kind, "version": 3}


def replace_memsets(graph: int, driver: Driver, fills: Fills) -> int:
    """Put kernels in the place of the memsets of a graph that is not instantiated yet; returns how many.

    `fills.kernel(memset)`: a kernel that writes the same. A memset of several rows stays, and one with ports or
    programmatic launches on its edges.
    """
    replaced = 0
    for node in driver.nodes(graph):
        if not driver.is_memset(node):
            continue
        memset, before, behind = driver.memset(node), driver.dependencies(node), driver.dependents(node)
        has_edge_data = any(data for _, data in (*before, *behind))
        if memset.height != 1 or memset.element_bytes not in _TYPES or has_edge_data:
            continue
        kernel = driver.add_kernel(graph, fills.kernel(memset), [other for other, _ in before])
        driver.add_dependents(graph, kernel, [other for other, _ in behind])
        driver.remove(node)
        replaced += 1
    return replaced
