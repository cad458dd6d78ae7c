"""Compiles for a trace: torch.compile makes a graph of forward and one of backward, divided as for Inductor, and no kernels.

    with partitioned() as partition: build; partition.tape = Tape(...); run

What forward keeps is then what Inductor's partition keeps: the recomputation in backward is the same. Of the tensors inside a graph
only results of matmuls and of attention are buffers of their own; the rest is taken to be fused into the kernels around them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from trainstep.training.tape import Tape


class Partition:
    """Runs compiled graphs, and has the tape that records them."""

    def __init__(self) -> None:
        self.tape: Tape | None = None

    def compile_graph(self, graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Run the graph node by node, and free each tensor at its last use."""

        def run(inputs: list[Any]) -> Any:
            if self.tape is None:
                return fx.Interpreter(graph).boxed_run(inputs)
            with self.tape.fused():
                return fx.Interpreter(graph).boxed_run(inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


@contextmanager
def partitioned() -> Iterator[Partition]:
    """Inside, torch.compile makes graphs only, whatever backend it is asked for."""
    # These import the compiler, which takes seconds.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    def divide(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)

    partition = Partition()
    backend = aot_autograd(
        fw_compiler=partition.compile_graph,
        bw_compiler=partition.compile_graph,
        partition_fn=divide,
        decompositions=select_decomp_table(),
    )
    before = torch.compile

    def compile_graphs(model: Any = None, *, fullgraph: bool = False, **_options: Any) -> Any:
        return before(model, fullgraph=fullgraph, backend=backend, dynamic=False)

    torch._dynamo.reset()  # graphs of another trace have other shapes
    torch.compile = compile_graphs
    try:
        yield partition
    finally:
        torch.compile = before
        torch._dynamo.reset()
