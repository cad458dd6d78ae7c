"""Sends the times of a watched run to experiment trackers, each an extra: TensorBoard, trackio.

A tracker is called after each record, so it gets the steps of some seconds at a time. For each step it gets the milliseconds of the
step and of its parts, under the step's number.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainstep.measure.run.recording import StepTimes


class TensorBoard:
    """Scalars `trainstep (ms)/step`, `.../forward` and so on, in a folder. ValueError without the package tensorboard."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise ValueError("tensorboard: needs the package: pip install 'trainstep[tensorboard]'") from None
        self._event, self._summary = Event, Summary
        try:
            self._writer = EventFileWriter(str(folder))
        except OSError as error:
            raise ValueError(f"tensorboard: {folder} cannot be written: {error.strerror}") from None

    def __call__(self, last_step: int, steps: Sequence[StepTimes]) -> None:
        for step, values in _numbered(last_step, steps):
            scalars = [
                self._summary.Value(tag=f"trainstep (ms)/{name}", simple_value=value) for name, value in values.items()
            ]
            self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._writer.close()


class Trackio:
    """Metrics `trainstep/step_ms` and so on, in a run of a trackio project. ValueError without the package trackio."""

    def __init__(self, project: str, name: str) -> None:
        try:
            import trackio
        except ImportError:
            raise ValueError("trackio: needs the package: pip install 'trainstep[trackio]'") from None
        self._run: Any = trackio.init(project=project, name=name, embed=False)

    def __call__(self, last_step: int, steps: Sequence[StepTimes]) -> None:
        for step, values in _numbered(last_step, steps):
            self._run.log({f"trainstep/{name}_ms": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def _numbered(last_step: int, steps: Sequence[StepTimes]) -> Iterator[tuple[int, dict[str, float]]]:
    """(number, milliseconds by name) of each step; an inspected step among them would shift the numbers before it by one."""
    for number, times in enumerate(steps, last_step - len(steps) + 1):
        yield number, {name: 1e3 * seconds for name, seconds in times.values().items()}
