"""What `--apply` changes of what a script builds: optimizers, loaders, modules, buckets; and what stays its own."""

import functools
import gc
from collections.abc import Iterator

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainstep.measure.run.changed.applied import Applied
from trainstep.ops.adamw import AdamW

DATA = TensorDataset(torch.arange(12.0))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Installs changes, and takes back what they wrapped."""
    places = (
        (torch.optim.Adam, "__init__"),
        (torch.optim, "AdamW"),
        (DataLoader, "__init__"),
        (DistributedDataParallel, "__init__"),
        (torch.Tensor, "to"),
        (torch.Tensor, "cuda"),
        (torch, "compile"),
    )
    for owner, name in places:
        monkeypatch.setattr(owner, name, getattr(owner, name))

    def installed(**changes: str) -> Applied:
        applied = Applied(changes)
        applied.install()
        return applied

    return installed


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"foreach": True}])
def test_adamw_is_built_fused(install, kind: str, options: dict[str, bool]):
    applied = install(adamw="fused")
    optimizer = getattr(torch.optim, kind)(iter(weights()), lr=0.5, **options)
    assert optimizer.param_groups[0]["fused"] is True
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert len(optimizer.param_groups[0]["params"]) == 1
    assert not applied.not_applied


def test_what_cannot_be_fused_is_built_as_written_and_told(install):
    applied = install(adamw="fused")
    assert applied.not_applied == {"adamw": "the script builds no Adam or AdamW of torch.optim"}
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, device="meta"))], lr=0.5)
    assert not optimizer.param_groups[0]["fused"]
    assert applied.not_applied == {"adamw": "torch's fused kernel takes other parameters"}
    applied = install(adamw="fused")
    torch.optim.AdamW(weights(), fused=True)
    assert applied.not_applied == {"adamw": "it is fused already"}


def test_adamw_is_trainsteps_unless_it_lacks_an_option(install):
    applied = install(adamw="trainstep")
    optimizer = torch.optim.AdamW(weights(), 0.5, weight_decay=0.25, foreach=False)
    assert isinstance(optimizer, AdamW)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.25)
    assert not applied.not_applied
    applied.counts["adamw"] = 0
    assert not isinstance(torch.optim.AdamW(weights(), amsgrad=True), AdamW)
    assert applied.not_applied == {"adamw": "trainstep's AdamW has no amsgrad"}


def test_loaders_have_workers_and_give_the_same_data(install):
    before = [batch[0].tolist() for batch in DataLoader(DATA, 4)]
    applied = install(workers="2", pin_memory="on")
    loader = DataLoader(DATA, 4)
    assert (loader.num_workers, loader.persistent_workers, loader.batch_size) == (2, True, 4)
    assert [batch[0].tolist() for batch in loader] == before
    assert set(applied.not_applied) <= {"pin_memory"}


def test_loaders_that_would_change_or_have_enough_are_left_alone(install):
    applied = install(workers="2")
    assert DataLoader(Stream(), batch_size=None).num_workers == 0
    assert "IterableDataset" in applied.not_applied["workers"]
    applied = install(workers="2")
    assert DataLoader(DATA, num_workers=3).num_workers == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory is pinned for a GPU")
def test_without_a_gpu_nothing_is_pinned(install):
    applied = install(pin_memory="on")
    assert not DataLoader(DATA).pin_memory
    assert applied.not_applied == {"pin_memory": "there is no GPU to pin memory for"}


@pytest.mark.parametrize(
    ("call", "is_changed"),
    [
        (lambda x: x.to("cuda"), True),
        (lambda x: x.to(torch.device("cuda", 1), torch.float16), True),
        (lambda x: x.to(device=0), True),
        (lambda x: x.cuda(), True),
        (lambda x: x.cuda(1), True),
        (lambda x: x.to("cuda", non_blocking=False), True),  # as accelerate calls it
        (lambda x: x.to("cuda", non_blocking=True), False),
        (lambda x: x.to("cuda", torch.float16, False), False),
        (lambda x: x.to("cpu"), False),
        (lambda x: x.to(torch.float16), False),
        (lambda x: x.to(torch.zeros(1)), False),
    ],
)
def test_copies_from_pinned_memory_do_not_wait(install, monkeypatch: pytest.MonkeyPatch, call, is_changed: bool):
    given: list[dict[str, object]] = []
    for name in ("to", "cuda"):

        def original(tensor: torch.Tensor, *_: object, **options: object) -> None:
            given.append(options)

        original.__name__ = name
        monkeypatch.setattr(torch.Tensor, name, original)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    applied = install(copies="non_blocking")
    call(torch.zeros(2))
    assert all(options.get("non_blocking") for options in given if is_changed)
    assert len(given) == 1
    assert applied.counts["copies"] == is_changed


def test_copies_from_pageable_memory_stay_as_they_are(install):
    applied = install(copies="non_blocking")
    assert torch.zeros(2).to(torch.float16).dtype == torch.float16
    assert applied.not_applied == {"copies": "no copy from pinned memory to a GPU makes the host wait"}


def test_the_outermost_module_is_compiled_in_the_mode_that_was_asked_for(install, monkeypatch: pytest.MonkeyPatch):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: modes.append(options.get("mode")) or call)
    for value, mode in (("module", None), ("reduce_overhead", "reduce-overhead")):
        applied = install(compile=value)
        model = torch.nn.Linear(2, 2)
        applied.change_module(model)
        assert model._compiled_call_impl is not None
        assert modes.pop() == mode
        assert not applied.not_applied


def test_what_the_script_compiles_gets_the_mode_and_is_not_compiled_twice(install, monkeypatch: pytest.MonkeyPatch):
    modes = []
    original = functools.partial(lambda call=None, **options: modes.append(options.get("mode")) or call)
    monkeypatch.setattr(torch, "compile", original)
    applied = install(compile="reduce_overhead")
    model = torch.compile(torch.nn.Linear(2, 2))
    applied.change_module(model)
    assert modes == ["reduce-overhead"]
    assert not applied.not_applied
    monkeypatch.setattr(torch, "compile", original)
    applied = install(compile="module")
    applied.change_module(torch.compile(torch.nn.Linear(2, 2)))
    assert applied.not_applied == {"compile": "the script calls torch.compile already"}
    monkeypatch.setattr(torch, "compile", original)
    applied = install(compile="reduce_overhead")
    torch.compile(torch.nn.Linear(2, 2), mode="max-autotune")
    assert "mode or options of its own" in applied.not_applied["compile"]


class Seen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        self.dtypes.append(y.dtype)
        return {"y": y}


@pytest.mark.parametrize("is_compiled", [False, True])
def test_forward_is_under_autocast_and_its_results_are_fp32(install, is_compiled: bool):
    applied = install(precision="bf16_autocast")
    model = Seen()
    if is_compiled:
        model._compiled_call_impl = model._call_impl
    applied.change_module(model)
    results = model(torch.ones(2, 4))
    assert model.dtypes == [torch.bfloat16]
    assert results["y"].dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert not applied.not_applied


def test_tf32_is_told_where_the_script_sets_its_own(install):
    before = torch.get_float32_matmul_precision()
    try:
        applied = install(precision="tf32")
        assert torch.get_float32_matmul_precision() == "high"
        assert not applied.not_applied
        torch.set_float32_matmul_precision("highest")
        assert applied.not_applied == {"precision": "the script sets the precision of matmuls itself"}
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_batch_of_the_first_loader_is_changed_and_of_those_like_it(install):
    applied = install(batch_size="6", workers="2")
    sizes = [DataLoader(DATA, batch_size=size).batch_size for size in (3, 3, 5)]
    assert sizes == [6, 6, 5]
    assert DataLoader(DATA, batch_sampler=[[0, 1]]).batch_size is None
    assert DataLoader(DATA, batch_size=None).batch_size is None
    assert not applied.not_applied


def test_a_loader_of_whole_batches_keeps_them(install):
    applied = install(batch_size="6")
    loader = DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]])
    assert [len(batch[0]) for batch in loader] == [2, 2]
    assert applied.not_applied.keys() == {"batch_size"}


def test_ddp_has_buckets_of_the_size(install):
    applied = install(bucket_cap_mb="7")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(2, 2), bucket_cap_mb=1)
        assert model.bucket_bytes_cap == 7 * 2**20
    finally:
        torch.distributed.destroy_process_group()
    assert not applied.not_applied


def test_garbage_is_collected_by_us_alone(install):
    assert gc.isenabled()
    try:
        applied = install(gc="off")
        applied.step_ended(1)
        assert not gc.isenabled()
        assert not applied.not_applied
    finally:
        gc.enable()
