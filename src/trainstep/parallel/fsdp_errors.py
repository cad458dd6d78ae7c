"""What FSDP says where a program takes a parameter for what it is not: whole outside its block, or cast after wrapping."""

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

_OF_SHAPES = re.compile(r"\b(size|shape|dimension|dim|must be \d-D)", re.IGNORECASE)
_MOST_NAMED = 3


def explain_shapes(pieces: Iterable[tuple[str, Tensor]], output: Any) -> None:
    """Called behind the module's forward, also one that raised: add a note to an error about shapes, naming the parameters whose
    pieces on this rank have as many elements as it speaks of. `pieces`: of units that are not whole now."""
    error = sys.exc_info()[1]
    if output is not None or type(error) is not RuntimeError or not _OF_SHAPES.search(str(error)):
        return
    spoken = {int(number) for number in re.findall(r"\d+", str(error))}
    named = [f"{name} ({piece.numel()} elements here)" for name, piece in pieces if piece.numel() in spoken]
    which = ", ".join(named[:_MOST_NAMED]) or "a parameter of another block"
    error.add_note(
        "FSDP: outside its own block's forward a parameter is this rank's piece of it, one-dimensional. "
        f"If this was {which}: call the block that it belongs to, or make the module that uses it and that block one unit "
        "(units=[...])"
    )


def check_pieces(names: Sequence[str], pieces: Sequence[tuple[int, nn.Parameter, Tensor]]) -> None:
    """ValueError where a parameter of a unit was cast, or the first that has a piece here no longer is that piece.

    A cast is seen on every rank, also one without a piece: the others would wait for it.
    """
    for index, parameter, piece in pieces:
        if parameter.dtype != piece.dtype or (piece.numel() and parameter.data_ptr() != piece.data_ptr()):
            raise ValueError(
                f"{names[index]}: is no longer the piece that FSDP made of it; move or cast the module before it is wrapped "
                "(compute_dtype is what FSDP computes in), and load values by load_full_state_dict or load_checkpoint"
            )
        if piece.numel():
            return
