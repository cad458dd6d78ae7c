"""The names of NVTX ranges, read: `parse_name("aten::mm, seq = 12, op_id = 7")` is the op aten::mm with number 12.

torch's emit_nvtx (what `nsys profile --pytorch=autograd-nvtx` switches on) makes a range of each op and each record_function,
and writes the numbers behind the name. A forward op and the backward op made for it carry the same `seq`. NVTX alone does
not say what is an op and what a span that a person named: the name must.
"""

import re
from dataclasses import dataclass

_SUFFIX = re.compile(r",\s*(?:seq|op_id|sizes|input_op_ids)\s*=.*$", re.DOTALL)
_SEQUENCE = re.compile(r",\s*seq\s*=\s*(\d+)")
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function: |Backward\d*$")
_OP = re.compile(
    r"^[a-z_]\w*::"  # aten::mm, a library's own ops; people's spans (FSDP::all_gather) begin with a capital
    r"|Backward\d*$|^detach$|^triton_"
    r"|^(?:Torch-Compiled Region|CompiledFunction|TorchDynamo |Pregraph bytecode|AOTDispatcher )"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NvtxName:
    """`name` without the numbers. `sequence`: -1 where there is none. `annotation`: a person's span, no op."""

    name: str
    sequence: int
    annotation: bool
    backward: bool


def parse_name(text: str) -> NvtxName:
    """What a range's text says."""
    name = _SUFFIX.sub("", text)
    found = _SEQUENCE.search(text, len(name))
    return NvtxName(
        name=name,
        sequence=int(found[1]) if found else -1,
        annotation=found is None and _OP.search(name) is None,
        backward=found is not None and _BACKWARD.search(name) is not None,
    )
