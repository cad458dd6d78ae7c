"""Staging buffers: shared by units alike, lent again, without memory while nobody uses them."""

import torch

from trainstep.parallel.flat_buffer import FlatBuffer
from trainstep.parallel.staging import Shelf, StagingPool


def shelf(pool: StagingPool, *shape: int) -> Shelf:
    return pool.shelf([torch.empty(shape), torch.empty(3)], dtype=torch.float32, parts=2)


def memory_bytes(buffer: FlatBuffer) -> int:
    return buffer.flat.untyped_storage().nbytes()


def test_units_alike_share_a_shelf():
    pool = StagingPool(torch.device("cpu"))
    assert shelf(pool, 2, 5) is shelf(pool, 2, 5)
    assert shelf(pool, 2, 5) is not shelf(pool, 5, 2)


def test_what_was_given_back_is_lent_again_as_it_is():
    lender = shelf(StagingPool(torch.device("cpu")), 2, 5)
    first, second = lender.borrow(), lender.borrow()
    assert first is not second
    first.flat.fill_(1)
    lender.give_back(first)
    assert lender.borrow() is first
    assert first.flat.all()


def test_a_clear_frees_what_nobody_uses_and_it_is_lent_again_zeroed():
    pool = StagingPool(torch.device("cpu"))
    lender = shelf(pool, 2, 5)
    idle, used = lender.borrow(), lender.borrow()
    idle.flat.fill_(1)
    used.flat.fill_(1)
    lender.give_back(idle)
    pool.clear()
    assert memory_bytes(idle) == 0
    assert used.flat.all()
    assert lender.borrow() is idle
    assert memory_bytes(idle) == idle.flat.nbytes
    assert not idle.flat.any()


def test_one_that_has_memory_is_lent_before_one_that_has_none():
    lender = shelf(StagingPool(torch.device("cpu")), 2, 5)
    both = [lender.borrow(), lender.borrow()]
    for buffer in both:
        lender.give_back(buffer)
    lender.clear()
    lender.give_back(lender.borrow())
    lender.borrow()
    assert sorted(memory_bytes(buffer) for buffer in both) == [0, both[0].flat.nbytes]
