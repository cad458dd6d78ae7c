"""Live bytes on a CPU: storages that operators make, and those that are freed and allocated again without an operator."""

import torch

from trainstep.measure.step.live_bytes import live_bytes


def test_tensors_count_until_they_are_freed():
    with live_bytes(torch.device("cpu")) as live:
        x = torch.zeros(100)
        y = x.view(10, 10)  # shares the storage
        assert live.now() == live.peak() == 400
        del x, y
        assert (live.now(), live.peak()) == (0, 400)


def test_a_storage_that_is_resized_counts_while_it_is_there():
    whole = torch.empty(1000)
    whole.untyped_storage().resize_(0)
    with live_bytes(torch.device("cpu"), [whole]) as live:
        whole.untyped_storage().resize_(4000)
        assert live.now() == 4000
        x = whole[:10] + 1
        whole.untyped_storage().resize_(0)
        assert (live.now(), live.peak()) == (40, 4040)
        live.begin_peak()
        del x
        assert (live.now(), live.peak()) == (0, 40)
