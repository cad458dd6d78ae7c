"""Gives a compiled script trainstep's loss, from outside: the head's matmul and the cross-entropy behind it become one op.

    with_our_loss(applied)                   # each graph that Inductor compiles from now on has our op, if it has such a loss
    counted = count_losses()                 # only counts them: counted() gives their number so far

Between head and loss a script casts, slices and flattens the logits (to drop the last token, to merge batch and positions). Each
of these keeps rows of logits whole, so the same is done with rows of hidden states, and the logits never exist whole. Where a
forward also returns its logits, as nanoGPT's does, it returns what computes them when they are first used (late_logits.py).

Only in a graph of torch.compile can it be seen what else uses the logits, and only if head and loss are in one graph: in GPT-2 of
Transformers (5.23) a graph break is between them, in Llama, Mistral and Qwen none. The graph is changed as Dynamo gives it to
Inductor, before autograd is traced.
"""

import copy
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import functional as F

from trainstep.measure.run.changed.attention import Notes
from trainstep.measure.run.changed.late_logits import late_logits
from trainstep.ops.linear_cross_entropy import linear_cross_entropy
from trainstep.ops.operators import has_kernel

_SIGNATURE = inspect.signature(F.cross_entropy)
_OWN_SIZES = ("view", "reshape")
"""Methods whose arguments name the size of each dimension, the vocabulary last."""
_CASTS = ("float", "to")
_ALIKE = ("flatten", "contiguous")
"""Methods that do with hidden states what they do with logits, as long as they leave the last dimension."""
_MODES = ("_set_grad_enabled", "set_grad_enabled", "inference_mode", "_enter_inference_mode", "_exit_inference_mode")
_WRITES = (
    operator.setitem,
    *(getattr(operator, name) for name in ("iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior")),
)
_MOST_LOGITS_BYTES = 2**30
_USED_ELSEWHERE = "the compiled model uses its logits for more than its loss, or returns them changed"


class _Loss(NamedTuple):
    """A cross-entropy of a graph, its head, and what is between them, from the head on."""

    node: Node
    head: Node
    between: Sequence[Node]

    @property
    def returned(self) -> Node | None:
        """The logits that the graph returns, as the head made them or cast; None if it returns none."""
        casts = (node for node in self.between[:1] if node.target in _CASTS)
        return next((node for node in (self.head, *casts) if _outputs(node.graph) in node.users), None)

    @property
    def has_other_uses(self) -> bool:
        """Whether the graph itself uses logits for something else, or returns them in a form that cannot be made late."""
        returned = self.returned
        uses = [use for node in (self.head, *self.between) for use in node.users if use not in self.between]
        if returned is not None:
            uses = [use for use in uses if use.op != "output"]
            others = [node for node in (self.head, *self.between) if node is not returned]
            is_input = _operands(self.head)[1].op == "placeholder"
            if not is_input or any(_outputs(node.graph) in node.users for node in others):
                return True
        return uses != [self.node]

    @property
    def changes_between(self) -> bool:
        """Whether something between the head and the last use of its logits may change what the head reads, or how it computes.

        Our op runs where the loss was, and late logits even later: a write in place there, or another mode, would be another loss.
        """
        nodes = [*self.head.graph.nodes]
        end = len(nodes) if self.returned else nodes.index(self.node)
        return any(map(_changes, nodes[nodes.index(self.head) + 1 : end]))


class _Late(NamedTuple):
    """Logits that are computed when they are used: their place among the graph's results, and the weight's among its inputs."""

    place: int
    weight: int
    matmul_dtype: torch.dtype
    dtype: torch.dtype


def with_our_loss(applied: Notes) -> None:
    """Fuse the losses of each graph that is compiled from now on."""

    def fuse(graph_module: GraphModule) -> Sequence[_Late]:
        if next(_losses(graph_module.graph), None) is None:
            return ()
        changed = _copied(graph_module.graph)  # taken once all went well
        losses = [*_losses(changed)]
        ours = [loss for loss in losses if not loss.has_other_uses]
        late = [each for loss in ours for each in _fuse(changed, loss)]
        if ours:
            graph_module.graph = changed
        for _ in ours:
            applied.did("ops")
        if len(ours) < len(losses):
            applied.left("ops", _USED_ELSEWHERE)
        return late

    _before_inductor(fuse)


def count_losses() -> Callable[[], int]:
    """Count from now on the losses that `with_our_loss` would fuse; returns a function that gives their number so far."""
    found: list[Node] = []

    def count(graph_module: GraphModule) -> Sequence[_Late]:
        found.extend(loss.node for loss in _losses(graph_module.graph) if not loss.has_other_uses)
        return ()

    _before_inductor(count)
    return lambda: len(found)


def _before_inductor(see: Callable[[GraphModule], Sequence[_Late]]) -> None:
    """Call `see` with each graph that torch.compile's default backend is about to compile; it may change the graph."""
    backend: Any = torch._TorchCompileInductorWrapper
    compile_graph = backend.__call__

    @functools.wraps(compile_graph)
    def call(self: Any, graph_module: Any, *arguments: Any, **options: Any) -> Any:
        late: Sequence[_Late] = ()
        with suppress(Exception):  # the graph is as it was then, and the script goes on with its own loss
            late = see(graph_module) if isinstance(graph_module, GraphModule) else ()
        compiled = compile_graph(self, graph_module, *arguments, **options)
        return functools.partial(_called, compiled, late) if late else compiled

    backend.__call__ = call


def _called(compiled: Callable[..., Any], late: Sequence[_Late], *inputs: Any) -> list[Any]:
    """The graph's results, with late logits where the compiled graph returns hidden states in their place."""
    results = [*compiled(*inputs)]
    for each in late:
        results[each.place] = late_logits(
            results[each.place], inputs[each.weight], matmul_dtype=each.matmul_dtype, dtype=each.dtype
        )
    return results


def _copied(graph: Graph) -> Graph:
    """A copy in which each input also has the attributes that Dynamo sets and AOTAutograd needs: copying a node drops them."""
    copied = copy.deepcopy(graph)
    for given, taken in zip(*(each.find_nodes(op="placeholder") for each in (graph, copied)), strict=True):
        vars(taken).update({name: value for name, value in vars(given).items() if name not in vars(taken)})
    return copied


def _losses(graph: Graph) -> Iterator[_Loss]:
    """The cross-entropies of whole rows of logits that a head without a bias makes, where our op has a kernel."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is F.cross_entropy:
            loss = _loss_of(node)
            if loss is not None:
                yield loss


def _loss_of(node: Node) -> _Loss | None:
    given = _arguments(node)
    logits, targets = given["input"], given["target"]
    if any(given[name] is not None for name in ("weight", "size_average", "reduce")):
        return None
    if given["reduction"] not in ("mean", "sum") or not (isinstance(logits, Node) and isinstance(targets, Node)):
        return None
    values = _value(logits), _value(targets)
    if not all(isinstance(value, Tensor) for value in values) or [value.dim() for value in values] != [2, 1]:
        return None
    if values[1].dtype != torch.int64:
        return None
    between: list[Node] = []
    at = logits
    while not _is_head(at):
        if not _keeps_rows(at):
            return None
        between.insert(0, at)
        at = at.args[0]  # type: ignore[assignment]
    loss = _Loss(node, at, between)
    return None if loss.changes_between else loss


def _changes(node: Node) -> bool:
    """Whether a node writes in place, or turns autocast or gradients on or off."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    is_mode = name in _MODES or "autocast" in name
    in_place = name.endswith("_") and not name.endswith("__")
    writes = in_place or node.target in _WRITES or "out" in node.kwargs
    return node.op.startswith("call") and (is_mode or writes)


def _arguments(node: Node) -> dict[str, Any]:
    bound = _SIGNATURE.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _is_head(node: Node) -> bool:
    """Whether the node is a matmul with a weight and nothing else, of tensors that our op has a kernel for."""
    if node.op != "call_function" or node.target is not F.linear:
        return False
    hidden, weight, bias = _operands(node)
    values = [_value(each) for each in (hidden, weight, node)]
    if bias is not None or not all(isinstance(value, Tensor) for value in values):
        return False
    return values[1].dim() == 2 and values[0].dim() > 1 and has_kernel(*values)


def _operands(head: Node) -> tuple[Any, Any, Any]:
    """hidden, weight and bias of a linear, which has no signature that could be asked."""
    given = dict(zip(("input", "weight", "bias"), head.args, strict=False)) | head.kwargs
    return given.get("input"), given.get("weight"), given.get("bias")


def _keeps_rows(node: Node) -> bool:
    """Whether the node's result has rows of logits, as they were, in the same order."""
    source = node.args[0] if node.args else None
    value, given = _value(node), _value(source)
    if not (isinstance(value, Tensor) and isinstance(given, Tensor)) or node.kwargs:
        return False
    if value.dim() < 2 or value.shape[-1] != given.shape[-1]:
        return False
    if node.op == "call_function":
        return node.target is operator.getitem and _keeps_last(node.args[1], given.dim())
    if node.op != "call_method":
        return False
    if node.target == "to":
        return node.args[1:] == (torch.float32,)
    if node.target in _OWN_SIZES:
        return all(isinstance(size, int | Node) for size in _sizes(node))
    return node.target == "float" or node.target in _ALIKE


def _sizes(node: Node) -> Sequence[Any]:
    """The sizes that a view or reshape is given, one by one or as one sequence."""
    first = node.args[1]
    return first if isinstance(first, tuple | list) else node.args[1:]


def _keeps_last(index: Any, dimensions: int) -> bool:
    """Whether an index is made of slices and takes all of the last dimension."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice) or part is Ellipsis for part in parts):
        return False
    reaches_last = len(parts) == dimensions or (Ellipsis in parts and parts[-1] is not Ellipsis)
    return not reaches_last or parts[-1] == slice(None)


def _outputs(graph: Graph) -> Node:
    output: Node = next(iter(reversed(graph.nodes)))
    return output


def _fuse(graph: Graph, loss: _Loss) -> list[_Late]:
    """Replace the loss and what leads to it by our op on hidden states; returns what the graph returns hidden states for."""
    given = _arguments(loss.node)
    hidden, weight, _ = _operands(loss.head)
    dtype, late = _value(loss.node).dtype, _return_hidden(graph, loss, hidden)
    with graph.inserting_before(loss.node):
        for node in loss.between:
            hidden = _same_rows(graph, node, hidden)
        fused = graph.call_function(
            linear_cross_entropy,
            (hidden, weight, given["target"]),
            {
                **{name: given[name] for name in ("ignore_index", "label_smoothing", "reduction")},
                "chunk_tokens": _chunk_tokens(_value(weight).shape[0], _value(loss.head).element_size()),
                # Gradients of fp16 logits that are made in forward lack the scaler's factor, and most of them are 0
                "gradients_in_forward": _value(loss.head).dtype != torch.float16,
            },
        )
        if dtype != torch.float32:  # torch's cross-entropy of 16-bit logits outside autocast
            fused = graph.call_method("to", (fused, dtype))
    fused.meta = dict(loss.node.meta)
    loss.node.replace_all_uses_with(fused)
    for node in (loss.node, *reversed(loss.between), loss.head):
        graph.erase_node(node)
    return late


def _chunk_tokens(vocabulary: int, element_bytes: int) -> int:
    """More than our op has by default: the script had room for whole logits, and each chunk reads and writes the sum of dW."""
    return max(256, _MOST_LOGITS_BYTES // (vocabulary * element_bytes) // 256 * 256)


def _return_hidden(graph: Graph, loss: _Loss, hidden: Any) -> list[_Late]:
    """Return hidden states in place of logits, if the graph returns these."""
    returned = loss.returned
    if returned is None:
        return []
    output, inputs = _outputs(graph), [node for node in graph.nodes if node.op == "placeholder"]
    results = output.args[0]
    assert isinstance(results, Sequence)
    output.args = (tuple(hidden if each is returned else each for each in results),)
    dtypes = {"matmul_dtype": _value(loss.head).dtype, "dtype": _value(returned).dtype}
    weight = inputs.index(_operands(loss.head)[1])
    return [_Late(place=place, weight=weight, **dtypes) for place, each in enumerate(results) if each is returned]


def _same_rows(graph: Graph, node: Node, hidden: Any) -> Any:
    """What the node does with rows of logits, done with rows of hidden states; casts are left out, as our op sums in fp32."""
    if node.target in _CASTS:
        return hidden
    if node.target in _OWN_SIZES:
        arguments = (hidden, (*_sizes(node)[:-1], _value(hidden).shape[-1]))
        same = graph.call_method("reshape", arguments)
        value = _value(hidden).reshape(map_arg(arguments[1], _value))
    elif node.target is operator.getitem:
        same = graph.call_function(operator.getitem, (hidden, node.args[1]))
        value = _value(hidden)[map_arg(node.args[1], _value)]
    else:
        same = graph.call_method(str(node.target), (hidden, *node.args[1:]))
        value = getattr(_value(hidden), str(node.target))(*node.args[1:])
    same.meta["example_value"] = value
    return same


def _value(node: Any) -> Any:
    """What Dynamo traced the node with, a tensor without data or a symbolic size; None for what is no node."""
    return node.meta.get("example_value") if isinstance(node, Node) else None
