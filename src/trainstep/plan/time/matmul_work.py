"""How much of a GPU a matmul occupies: its tiles go to multiprocessors in whole waves, so that the last wave may be half empty.

    time = fixed + work / rate        work(m, n, k): FLOPs that the waves of the best tiling could have done

A tile of a x b takes its 2 a b k FLOPs, and as much again as `_LEAD` steps of k would take, to fill its pipeline and to write its
result. Small tiles reuse less of what they load, so that their rate is lower. A long product may be split over k, whose parts are
then added up. The best tiling is what cuBLAS's heuristics look for, and seldom miss. The tiles and their relative rates were found
with results/h200/profile.jsonl (fp32) and profile_captured.jsonl (bf16); a calibration measures `fixed` and `rate`.
"""

import functools
from math import ceil, inf

_SIMT_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (128, 64, 0.9), (64, 64, 0.8))
"""Sides of a tile and its relative rate, of fp32 products without matrix units."""
_SIMT_LEAD, _MATRIX_LEAD = 32, 128
_SIDES_M, _SIDES_N = (64, 128, 192, 256), (64, 96, 128, 160, 192, 256)
_LARGEST_TILE = 256 * 160
_REUSE = 16
"""A tile of a x b is slower by this times 1 / a + 1 / b, than one of 128 x 256."""
_SPLITS = (1, 2, 3, 4, 6, 8)
_LEAST_SPLIT_K = 256
_SPLIT_FLOPS = 1e8
"""Adding up the parts of a split product costs about as much as these FLOPs: one more launch."""
_SPLIT_FLOPS_PER_ELEMENT = 35
"""The same for each element of each part, which is written and read."""


def _matrix_tiles() -> tuple[tuple[int, int, float], ...]:
    def rate(m: int, n: int) -> float:
        return 1 / (1 + _REUSE * (1 / m + 1 / n - 1 / 128 - 1 / 256))

    return tuple((m, n, rate(m, n)) for m in _SIDES_M for n in _SIDES_N if m * n <= _LARGEST_TILE)


_MATRIX_TILES = _matrix_tiles()


@functools.lru_cache(maxsize=4096)
def matmul_work(dtype: str, m: int, n: int, k: int, batch: int, units: int) -> float:
    """FLOPs by which the time of an (m, k) x (k, n) product is computed. `units`: multiprocessors; 1: a CPU, which has no waves."""
    if units == 1:
        return 2.0 * m * n * k * batch
    simt = dtype == "fp32"
    tiles, lead = (_SIMT_TILES, _SIMT_LEAD) if simt else (_MATRIX_TILES, _MATRIX_LEAD)
    best = inf
    for side_m, side_n, rate in tiles:
        count = ceil(m / side_m) * ceil(n / side_n) * batch
        for parts in _SPLITS if simt else (1,):
            if parts > 1 and k < parts * _LEAST_SPLIT_K:
                break
            waves = ceil(count * parts / units)
            work = waves * units * 2 * side_m * side_n * (k / parts + lead) / rate
            if parts > 1:
                work += _SPLIT_FLOPS + _SPLIT_FLOPS_PER_ELEMENT * (parts + 1) * m * n * batch
            best = min(best, work)
    return best
