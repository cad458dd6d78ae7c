"""Gains that explain estimates itself, by hand-made numbers."""

import pytest

from trainstep.explain.gain import loaded_share


@pytest.mark.parametrize(
    ("data_s", "measured_s", "now", "workers", "share"),
    [
        # A batch takes the 42 ms that are waited for. Two workers have one ready every 21 ms; the rest of the step takes 2.
        (0.042, 0.044, 0, 2, 1 - (0.021 - 0.002) / 0.042),
        (0.042, 0.044, 0, 8, 1 - (0.042 / 8 - 0.002) / 0.042),
        (0.010, 0.110, 0, 2, 1.0),  # 5 ms, while the rest of the step takes 100
        # Two workers make two batches in a step of 50 ms, so one takes 100: four have one ready every 25, the rest takes 10.
        (0.040, 0.050, 2, 4, 1 - (0.025 - 0.010) / 0.040),
        (0.040, 0.050, 4, 4, 0.5),  # as many as there are
        (0.040, 0.050, 8, 4, 0.5),
        (0.040, 0.050, None, 4, 1.0),  # a record that does not know
        (0.0, 0.050, 0, 4, 1.0),
    ],
)
def test_workers_gain_what_their_number_makes_room_for(
    data_s: float, measured_s: float, now: int | None, workers: int, share: float
):
    assert loaded_share(data_s, measured_s, workers=workers, now=now) == pytest.approx(share)
