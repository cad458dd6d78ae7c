"""Staging buffers are shared by units of equal layout, lent again, and have no memory once unused ones are cleared."""

import torch

from trainstep.parallel.flat_buffer import FlatBuffer, Shelf, StagingPool


def shelf(pool: StagingPool, *shape: int) -> Shelf:
    return pool.shelf([torch.empty(shape), torch.empty(3)], dtype=torch.float32, parts=2)


def memory_bytes(buffer: FlatBuffer) -> int:
    return buffer.flat.untyped_storage().nbytes()


def test_units_of_equal_layout_share_a_shelf():
    pool = StagingPool(torch.device("cpu"))
    assert shelf(pool, 2, 5) is shelf(pool, 2, 5)
    assert shelf(pool, 2, 5) is not shelf(pool, 5, 2)


def test_a_returned_buffer_is_lent_again_unchanged():
    lender = shelf(StagingPool(torch.device("cpu")), 2, 5)
    first, second = lender.borrow(), lender.borrow()
    assert first is not second
    first.flat.fill_(1)
    lender.give_back(first)
    assert lender.borrow() is first
    assert first.flat.all()


def test_clear_frees_unused_buffers_and_they_are_lent_again_zeroed():
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


def test_a_buffer_with_memory_is_lent_before_one_without():
    lender = shelf(StagingPool(torch.device("cpu")), 2, 5)
    buffers = [lender.borrow(), lender.borrow()]
    for buffer in buffers:
        lender.give_back(buffer)
    lender.clear()
    lender.give_back(lender.borrow())
    lender.borrow()
    assert sorted(memory_bytes(buffer) for buffer in buffers) == [0, buffers[0].flat.nbytes]
