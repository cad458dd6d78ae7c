"""The check of replicas finds and names tensors that differ, and passes equal ones, whatever they contain."""

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks
from trainstep.parallel.agreement import ReplicasDisagree, agreed, check_agreement
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ranks import Ranks

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).replace(".", "_")


def module_with(**tensors: Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 10).to(dtype)


def outcome(module: nn.Module, ranks: Ranks, **options: object) -> dict[str, list[int]]:
    try:
        check_agreement(module, ranks, **options)  # type: ignore[arg-type]
    except ReplicasDisagree as error:
        disagreement = error
    else:
        return {}
    assert all(name in str(disagreement) for name in list(disagreement.differing)[:10] if name != "names")
    return disagreement.differing


def compare_tensors_of_all_kinds(ranks: Ranks, odd_rank: int | None) -> dict[str, list[int]]:
    tensors = {name_of(dtype): numbers(5, 7).to(dtype) for dtype in DTYPES}
    tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.0), "not_a_number": torch.full((3,), torch.nan)}
    tensors |= {
        "transposed": numbers(4, 6).t(),
        "every_other": numbers(20)[::2],
        "expanded": numbers(1, 3).expand(4, 3),
    }
    tensors["conjugated"] = numbers(6, dtype=torch.complex64).conj()
    if ranks.rank == odd_rank:
        for name, tensor in tensors.items():
            changed = tensor.resolve_conj().contiguous().clone()
            if changed.numel():
                raw = torch.view_as_real(changed) if changed.is_complex() else changed
                raw.view(-1)[-1:].view(torch.uint8)[0] ^= 1
            tensors[name] = changed
    return outcome(module_with(**tensors), ranks, what="buffers")


def test_equal_replicas_pass():
    assert run_ranks(3, compare_tensors_of_all_kinds, None) == [{}, {}, {}]


def test_a_bit_of_one_element_is_found_in_every_dtype():
    for differing in run_ranks(3, compare_tensors_of_all_kinds, 1):
        expected = {name_of(dtype) for dtype in DTYPES} | {
            "scalar", "not_a_number", "transposed", "every_other", "expanded", "conjugated",
        }  # fmt: skip
        assert differing == {name: [1] for name in expected}


def planted(ranks: Ranks, what: str) -> dict[str, list[int]]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(numbers(*parameter.shape))
        weight = model[1].weight
        weight[0, 0] = 0.0
        if ranks.rank == ranks.world_size - 1:
            if what == "sign of zero":
                weight[0, 0] = -0.0
            elif what == "swapped":
                weight[1, 0], weight[1, 1] = weight[1, 1].clone(), weight[1, 0].clone()
            elif what == "rotated":
                weight.copy_(weight.roll(1))
            elif what == "three that cancel":  # in a sum with linearly growing weights
                bits = weight.view(torch.int32).view(-1)
                bits[1:4] += torch.tensor([1, -2, 1], dtype=torch.int32)
            elif what == "another shape":
                model[1].weight = nn.Parameter(weight.t().contiguous())
    return outcome(model, ranks)


@pytest.mark.parametrize("what", ["sign of zero", "swapped", "rotated", "three that cancel", "another shape"])
def test_any_difference_of_the_odd_rank_is_found(what: str):
    assert run_ranks(3, planted, what) == [{"1.weight": [2]}] * 3


def test_of_two_ranks_both_are_named():
    assert run_ranks(2, planted, "swapped") == [{"1.weight": [0, 1]}] * 2


def trained(ranks: Ranks, what: str) -> dict[str, list[int]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if ranks.rank == 0:
        if what == "gradients":
            model.bias.grad = None
        elif what == "optimizer":
            optimizer.state[model.bias]["exp_avg_sq"][0] += 1
        elif what == "lacking":
            del optimizer.state[model.bias]
    everything = ("parameters", "buffers", "gradients", "optimizer")
    return outcome(model, ranks, what=everything, optimizer=optimizer)


@pytest.mark.parametrize(
    ("what", "differing"),
    [
        ("nothing", {}),
        ("gradients", {"gradient of bias": [0]}),
        ("optimizer", {"exp_avg_sq of bias": [0]}),
        ("lacking", {"names": [0]}),
    ],
)
def test_differing_gradients_and_optimizer_state_are_named(what: str, differing: dict[str, list[int]]):
    assert run_ranks(3, trained, what) == [differing] * 3


def compare_two_chunks(ranks: Ranks) -> dict[str, list[int]]:
    tensor = torch.zeros(2**22 + 5, dtype=torch.bfloat16)
    if ranks.rank == 1:  # at the same place in its chunk: the first element of the second chunk, and of the first
        tensor[2**22] = 1
    else:
        tensor[0] = 1
    return outcome(module_with(tensor=tensor), ranks, what="buffers")


def test_positions_continue_over_chunks():
    assert run_ranks(2, compare_two_chunks) == [{"tensor": [0, 1]}] * 2


def errors_of_bad_input(ranks: Ranks) -> list[str]:
    sentences = []
    for options in ({"what": "weights"}, {"what": "optimizer"}):
        with pytest.raises(ValueError) as error:
            check_agreement(nn.Linear(1, 1), ranks, **options)
        sentences.append(str(error.value))
    return sentences


def test_bad_options_are_refused_by_name():
    assert run_ranks(2, errors_of_bad_input)[0] == [
        "what: must be of parameters, buffers, gradients, optimizer, not weights",
        "optimizer: must be given for what='optimizer'",
    ]


def failing(ranks: Ranks, errors: dict[int, Exception]) -> tuple[str, str]:
    def work() -> int:
        if ranks.rank in errors:
            raise errors[ranks.rank]
        return ranks.rank

    try:
        return "fine", str(agreed(work, Collectives(ranks)))
    except Exception as error:  # noqa: BLE001  (the test asks which error it is)
        return type(error).__name__, str(error)


def test_an_error_on_one_rank_is_an_error_on_all():
    assert run_ranks(3, failing, {}) == [("fine", "0"), ("fine", "1"), ("fine", "2")]
    of_the_others = ("ValueError", "x: is bad (found by rank 1)")
    assert run_ranks(3, failing, {1: ValueError("x: is bad")}) == [
        of_the_others,
        ("ValueError", "x: is bad"),
        of_the_others,
    ]
    assert run_ranks(3, failing, {1: ValueError("x: is bad"), 2: KeyError("y")})[2] == of_the_others
    assert run_ranks(2, failing, {0: KeyError("y")}) == [
        ("KeyError", "'y'"),
        ("RuntimeError", "rank 0 failed: KeyError: 'y'"),
    ]
    assert run_ranks(2, failing, {0: PermissionError(13, "no")})[1] == ("OSError", "[Errno 13] no (found by rank 0)")
