"""Peers by name: which errors are refusals, tiles from the table or the config, and packages that are absent."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from trainstep.config.attention import AttentionConfig
from trainstep.measure.attention.peers import attend_named, own_tiles, why_refused
from trainstep.measure.harness.failures import CellFailed
from trainstep.ops import reference
from trainstep.ops.flash_attention import problem
from trainstep.ops.flash_attention.problem import Device

ON_A_GPU = {"device": "cuda", "dtype": "bf16"}


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "device_of", lambda device: Device("sm_90", 232_448))


@pytest.mark.usefixtures("h100")
def test_every_kernel_gets_the_configs_tile():
    tiles = own_tiles(AttentionConfig(block_q=64, block_k="rule", seq=4096, **ON_A_GPU))
    for tile in (tiles.forward, tiles.key_gradients, tiles.query_gradients):
        assert (tile.block_q, tile.block_k, tile.num_warps) == (64, 32, 4)
    tiles = own_tiles(AttentionConfig(block_q=128, block_k=64, num_stages=2, **ON_A_GPU))
    assert (tiles.forward.num_warps, tiles.forward.num_stages) == (8, 2), "a large tile has more warps"


@pytest.mark.usefixtures("h100")
def test_the_table_fills_in_what_the_config_leaves_out():
    table = own_tiles(AttentionConfig(num_stages=2, direction="forward", **ON_A_GPU))
    tiles = own_tiles(AttentionConfig(num_stages=1, direction="forward", **ON_A_GPU))
    assert (tiles.forward.block_q, tiles.forward.num_warps) == (table.forward.block_q, table.forward.num_warps)
    assert tiles.forward.num_stages == 1
    assert tiles.key_gradients == table.key_gradients, "a forward pass never launches it, so it is never checked"


@pytest.mark.usefixtures("h100")
def test_an_illegal_tile_names_its_kernel():
    with pytest.raises(CellFailed) as caught:
        own_tiles(AttentionConfig(block_q=128, block_k=256, **ON_A_GPU))
    failure = caught.value.failure
    assert (failure.kind, failure.phase) == ("unsupported", "build")
    assert failure.message.startswith("block_q: illegal tile: needs ")
    assert "128 x 256, 8 warps" in failure.message


class OutOfResources(Exception):
    """An error with the name that Triton's has."""


@pytest.mark.parametrize(
    ("name", "error", "warnings", "reason"),
    [
        (
            "sdpa_flash",
            RuntimeError("No available kernel. Aborting execution."),
            [
                "Flash attention kernel not used because: (Triggered internally at a.cpp:1.)",
                "Head dim 512 is too large. (Tr",
            ],
            "implementation: sdpa_flash does not take this case: Head dim 512 is too large. (Tr",
        ),
        (
            "sdpa_cudnn",
            RuntimeError("No available kernel. Aborting execution."),
            [],
            "implementation: sdpa_cudnn does not take this case: torch gives no reason",
        ),
        ("trainstep", ValueError("too wide"), [], "implementation: trainstep does not take this case: too wide"),
        (
            "trainstep",
            OutOfResources("shared memory"),
            [],
            "implementation: trainstep does not fit this GPU: shared memory",
        ),
        (
            "flash_attn_4",
            AssertionError("(head_dim, head_dim_v)=(192, 192) is not supported on SM100/SM110."),
            [],
            "implementation: flash_attn_4 does not take this case: (head_dim, head_dim_v)=(192, 192) is not supported "
            "on SM100/SM110.",
        ),
        (
            "flash_attn_4",
            NotImplementedError("not on SM8x"),
            [],
            "implementation: flash_attn_4 does not take this case: not on SM8x",
        ),
        (
            "flash_attn_4",
            AssertionError(),
            [],
            "implementation: flash_attn_4 does not take this case: it gives no reason",
        ),
        ("flash_attn_4", RuntimeError("a fault"), [], None),
        ("plain", AssertionError("a fault"), [], None),
        ("plain", ValueError("a fault"), [], None),
        ("sdpa_math", RuntimeError("a fault"), [], None),
    ],
)
def test_a_refusal_has_a_reason_and_a_fault_has_none(
    name: str, error: Exception, warnings: list[str], reason: str | None
):
    assert why_refused(AttentionConfig(implementation=name), error, warnings) == reason


def install(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any] | None) -> None:
    """Pretend that flash-attn and flash-attn-4 are installed, the second of which is a module inside the first: `flash_attn`
    and `flash_attn_4` give their flash_attn_func, None that the package is not installed."""
    flash_attn, flash_attn_4 = functions.get("flash_attn"), functions.get("flash_attn_4")
    modules: dict[str, ModuleType | None] = {
        "flash_attn": ModuleType("flash_attn") if flash_attn or flash_attn_4 else None,
        "flash_attn.cute": ModuleType("flash_attn.cute") if flash_attn_4 else None,
    }
    for module, function in zip(modules.values(), (flash_attn, flash_attn_4), strict=True):
        if function is not None:
            module.flash_attn_func = function  # type: ignore[union-attr]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("name", "installed"),
    [("flash_attn", None), ("flash_attn_4", None), ("flash_attn", "flash_attn_4"), ("flash_attn_4", "flash_attn")],
)
def test_a_package_that_is_absent_is_an_import_error(name: str, installed: str | None, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, **({installed: lambda *_, causal: None} if installed else {}))
    with pytest.raises(CellFailed) as caught:
        attend_named(AttentionConfig(implementation=name, **ON_A_GPU))
    assert caught.value.failure.kind == "import_error"
    package = name.replace("_", "-")
    beginning = f"implementation: {name} is not installed; pip install {package} (import flash_attn"
    assert caught.value.failure.message.startswith(beginning)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_dsl", r"No module named 'no_such_dsl'"),
        ("raise OSError('libcuda.so.1: cannot open')", r"libcuda\.so\.1: cannot open"),
        ("raise RuntimeError('no driver')", "no driver"),
    ],
)
def test_the_failure_says_what_a_package_lacks(text: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """flash-attn-4 needs packages of its own, such as CUTLASS's."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text(f"{text}\n")
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)  # removes what is imported under this name at the end of the test
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CellFailed, match=rf"\(import flash_attn\.cute: {reason}\)"):
        attend_named(AttentionConfig(implementation="flash_attn_4", **ON_A_GPU))


@pytest.mark.parametrize(("name", "with_lse"), [("flash_attn", False), ("flash_attn_4", True)])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD", "BSD"])
def test_a_package_gets_its_own_layout(name: str, layout: str, with_lse: bool, monkeypatch: pytest.MonkeyPatch):
    def flash_attn_func(*tensors: torch.Tensor, causal: bool) -> Any:
        q, k, v = (x.transpose(1, 2) for x in tensors)  # from (B, S, H, D)
        o = reference.attention(q, k, v, causal=causal).transpose(1, 2)
        return (o, None) if with_lse else o

    def never(*tensors: torch.Tensor, causal: bool) -> Any:
        raise AssertionError("the other package's")

    install(monkeypatch, **{"flash_attn": never, "flash_attn_4": never, name: flash_attn_func})
    heads = 1 if layout == "BSD" else 3
    shape = {"BHSD": (2, heads, 5, 4), "BSHD": (2, 5, heads, 4), "BSD": (2, 5, 4)}[layout]
    config = AttentionConfig(implementation=name, layout=layout, heads=heads, seq=5, head_dim=4, **ON_A_GPU)
    plain_config = AttentionConfig(implementation="plain", layout=layout, heads=heads, seq=5, head_dim=4)
    inputs = [torch.randn(shape) for _ in range(3)]
    torch.testing.assert_close(attend_named(config)(*inputs), attend_named(plain_config)(*inputs))
