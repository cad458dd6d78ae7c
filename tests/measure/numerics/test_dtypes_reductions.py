"""Sums in 16 bits: the textbooks' numbers, and the error of a narrow accumulator beside that of fp32."""

import pytest
import torch

from trainstep.measure.numerics.dtypes import Columns, accumulation_table, reductions_table


def test_accumulated_totals_are_those_of_the_textbooks():
    table = accumulation_table()
    totals = dict(zip(table["how"], table["total"], strict=True))
    assert totals["fp32 into fp32"] == pytest.approx(10.0001, abs=5e-5)
    assert totals["fp16 into fp16"] == pytest.approx(9.9531, abs=5e-5)
    assert totals["fp16 into fp32"] == pytest.approx(10.0021, abs=5e-5)
    assert totals["fp16 upcast to fp32, into fp32"] == pytest.approx(10.0021, abs=5e-5)
    assert totals["bf16 into bf16"] == 4.0  # from there on, half the distance to the next number is 1/64


def row_of(table: Columns, **where: str) -> dict[str, object]:
    """The only row of a table with these values."""
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    [row] = [row for row in rows if all(row[name] == word for name, word in where.items())]
    return row


@pytest.fixture(scope="module")
def table() -> Columns:
    generator = torch.Generator().manual_seed(0)
    return reductions_table(
        torch.randn(2, 8, 768, generator=generator), 0.5 * torch.randn(2, 8, 2000, generator=generator)
    )


def test_masked_logits_count_as_zero_and_nan_is_left_out():
    """A logit of -inf counts as exp(-inf) = 0; a vector that contains NaN is left out, even if that leaves none."""
    masked = torch.randn(4, 8).index_fill(-1, torch.tensor([7]), float("-inf"))
    row = row_of(
        reductions_table(torch.full((4, 8), float("nan")), masked),
        what="softmax's sum",
        numbers="bf16",
        accumulator="fp32",
    )
    assert row["error_max"] < 1e-5  # type: ignore[operator]
    all_nan = reductions_table(torch.full((4, 8), float("nan")), masked)
    row = row_of(all_nan, what="mean of squares", values="activations", numbers="bf16", accumulator="fp32")
    assert row["error_median"] is row["error_max"] is row["overflow_share"] is None


@pytest.mark.parametrize("what", ["mean of magnitudes", "mean of squares"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_fp32_accumulator_is_a_hundred_times_better(table: Columns, what: str, dtype: str):
    narrow = row_of(table, what=what, values="activations", numbers=dtype, accumulator=dtype)
    wide = row_of(table, what=what, values="activations", numbers=dtype, accumulator="fp32")
    assert narrow["error_median"] > 100 * wide["error_median"]  # type: ignore[operator]
    assert wide["error_max"] < 1e-5  # type: ignore[operator]


def test_softmax_in_bf16_stops_where_terms_are_under_half_the_spacing(table: Columns):
    narrow = row_of(table, what="softmax's sum", numbers="bf16", accumulator="bf16")
    assert narrow["error_median"] > 0.1  # type: ignore[operator]


def test_large_values_overflow_fp16_alone(table: Columns):
    words = {"what": "mean of squares", "values": "scaled to 1,000 at most"}
    assert row_of(table, **words, numbers="fp16", accumulator="fp16")["overflow_share"] == 1
    assert row_of(table, **words, numbers="fp16", accumulator="fp32")["overflow_share"] == 0
    assert row_of(table, **words, numbers="bf16", accumulator="bf16")["overflow_share"] == 0


def test_rms_norm_loses_accuracy_in_a_16_bit_accumulator(table: Columns):
    for dtype in ("bf16", "fp16"):
        inside = row_of(table, what="RMSNorm", values="activations", numbers=dtype, accumulator=dtype)
        outside = row_of(table, what="RMSNorm", values="activations", numbers=dtype, accumulator="fp32")
        assert inside["error_max"] > 1.3 * outside["error_max"]  # type: ignore[operator]
    lost = row_of(table, what="RMSNorm", values="scaled to 1,000 at most", numbers="fp16", accumulator="fp16")
    assert lost["overflow_share"] == 1  # the inverse of an infinite mean makes every element zero
    assert lost["error_median"] is None


def test_zeros_lose_nothing():
    table = reductions_table(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))
    assert set(table["overflow_share"]) == {0.0}
