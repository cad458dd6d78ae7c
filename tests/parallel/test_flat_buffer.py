"""Flat buffers: aligned layouts, views shaped as their tensors, and shards that cover everything once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainstep.costs.buckets import ALIGNMENT
from trainstep.parallel.flat_buffer import FlatBuffer, lay_out


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    parts=st.integers(1, 5),
)
def test_pieces_of_all_shards_make_each_tensor(sizes: list[int], parts: int):
    tensors = [torch.arange(size) for size in sizes]
    layout = lay_out(tensors, parts=parts)
    assert layout.numel % parts == 0
    assert all(start % ALIGNMENT == 0 for start in layout.starts)
    assert [layout.shard(rank, parts)[0] for rank in range(parts)] == [
        rank * layout.numel // parts for rank in range(parts)
    ]
    for index, size in enumerate(sizes):
        covered = [number for rank in range(parts) for number in range(*layout.piece(index, rank, parts))]
        assert covered == list(range(size))


def test_views_are_views_of_the_flat_tensor():
    tensors = [torch.empty(2, 3), torch.empty(5), torch.empty(())]
    buffer = FlatBuffer(tensors, dtype=torch.float32, device=torch.device("cpu"), extra=3)
    for number, view in enumerate(buffer.views):
        view.fill_(number + 1)
    assert [view.shape for view in buffer.views] == [tensor.shape for tensor in tensors]
    assert buffer.flat.tolist() == [1] * 6 + [0] * 2 + [2] * 5 + [0] * 3 + [3] + [0] * 7 + [0] * 3


def test_a_dense_tensor_keeps_its_strides():
    channels_last = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    sparse = torch.empty(4, 6)[:, ::2]
    buffer = FlatBuffer([channels_last, sparse], dtype=torch.float32, device=torch.device("cpu"))
    assert buffer.views[0].stride() == channels_last.stride()
    assert buffer.views[1].is_contiguous()


def test_memory_taken_again_is_zero_and_has_the_same_views():
    buffer = FlatBuffer([torch.empty(3), torch.empty(2, 5)], dtype=torch.float32, device=torch.device("cpu"))
    buffer.flat.fill_(1)
    buffer.free_memory()
    assert buffer.flat.untyped_storage().nbytes() == 0
    buffer.take_memory()
    assert not buffer.flat.any()
    buffer.flat.fill_(2)
    assert all((view == 2).all() for view in buffer.views)
    buffer.take_memory()
    assert (buffer.flat == 2).all()  # it was there: nothing changes
