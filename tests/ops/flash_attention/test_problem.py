"""What a launch of attention depends on: its mask's offset, its device, the names of its strides."""

import torch

from trainstep.ops.flash_attention.portable.tiles import Arithmetic
from trainstep.ops.flash_attention.problem import Problem, device_of, strides


def test_the_offset_depends_on_the_alignment():
    assert Problem(1.0, True, False, Arithmetic.HALF).offset(3, 8) == 0
    assert Problem(1.0, True, True, Arithmetic.HALF).offset(3, 8) == 5


def test_a_cpu_is_any_architecture():
    assert device_of(torch.device("cpu")).architecture == "any"
    assert strides(dk=(9, 8, 7, 1)) == {"stride_dkb": 9, "stride_dkh": 8, "stride_dks": 7}
