"""Callbacks that watch the training of Hugging Face's Trainer and of Lightning.

    Trainer(..., callbacks=[trainstep.hugging_face_callback()])
    L.Trainer(..., callbacks=[trainstep.lightning_callback()])

Both take the options of `trainstep.watch`. They watch from the beginning of training to its end; `trainstep run train.py` needs no
callback, and sees the time before and after too.
"""

import atexit
import importlib
import importlib.util
import inspect
from typing import Any

from trainstep.measure.run.code import Session, watch
from trainstep.measure.run.recording import Ending, ended_by

_DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(watch).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


class _Training:
    """Watches one training at a time. A watch ends once: with the training or, after an error in training, with the process."""

    def __init__(self, options: dict[str, Any]) -> None:
        unknown = next((option for option in options if option not in _DEFAULTS), None)
        if unknown is not None:
            raise ValueError(f"{unknown}: is not an option of trainstep.watch; known: {', '.join(_DEFAULTS)}")
        self._options = {**_DEFAULTS, **options}
        self._session: Session | None = None

    def begin(self) -> None:
        if self._session is None:
            self._session = Session([], [], **self._options)
            self._session.start()
            atexit.register(self.end, Ending(words="the trainer did not end training"))

    def end(self, ending: Ending) -> None:
        session, self._session = self._session, None
        if session is not None:
            atexit.unregister(self.end)
            session.end(ending)


def hugging_face_callback(**options: Any) -> Any:
    """A `TrainerCallback` of transformers that watches training, with the options of `trainstep.watch`.

    ImportError without transformers; ValueError for an unknown option.
    """
    base = _class_of("transformers", "transformers.trainer_callback", "TrainerCallback")
    training = _Training(options)

    class TrainstepCallback(base):  # type: ignore[misc, valid-type]
        """Watches the training of a Trainer."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            training.begin()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            training.end(Ending(words="finished"))

    return TrainstepCallback()


def lightning_callback(**options: Any) -> Any:
    """A `Callback` of Lightning that watches training, with the options of `trainstep.watch`.

    ImportError without lightning; ValueError for an unknown option.
    """
    package = "lightning" if _is_there("lightning") else "pytorch_lightning"
    place = "lightning.pytorch.callbacks" if package == "lightning" else "pytorch_lightning.callbacks"
    base = _class_of("lightning", place, "Callback")
    training = _Training(options)

    class TrainstepCallback(base):  # type: ignore[misc, valid-type]
        """Watches the training of a Lightning Trainer."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            training.begin()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            training.end(Ending(words="finished"))

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            training.end(ended_by(exception))

    return TrainstepCallback()


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _class_of(package: str, module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ImportError(f"the callback needs the package: pip install {package} ({error})") from None
