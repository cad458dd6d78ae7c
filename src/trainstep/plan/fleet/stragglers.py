"""How long all ranks wait for the slowest of them.

Ranks compute the same, but not equally fast: temperature, clocks and other work of the host differ. We take their speeds as normal
with a relative standard deviation `spread`, and every step ends when the slowest rank is done:

    E[max of M] = spread x z(M)      z(M) = quantile((M - 0.375) / (M + 0.25)) of the standard normal distribution

(G. Blom, Statistical Estimates and Transformed Beta-Variables, 1958.) z(8) is 1.4, z(1024) is 3.2.
"""

from statistics import NormalDist


def slowest(ranks: int) -> float:
    """How many standard deviations the slowest of `ranks` is expected to be behind the mean; 0 for one."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def waiting_share(ranks: int, spread: float) -> float:
    """How much longer a step takes than the mean rank's work, as a share of that work."""
    return spread * slowest(ranks)
