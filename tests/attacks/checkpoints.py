"""Damaged checkpoints: flipped bits, files cut, removed, swapped or of another save; and killed saves.

Every rank refuses each with a ValueError, and at least one names the file; none is loaded silently, and none hangs. Afterwards
the same processes load a whole checkpoint. A checkpoint without its list of parts may come from an older trainstep: it may load
as it was saved, with a warning.
"""

import json
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attacks.attack import Outcome
from attacks.damage import any_value, cut_off, dumped, overwrite
from attacks.torch_process import Answer, TorchProcess

_LONGEST_S = 60.0
_SAVED_AT = {"saved": 2, "older": 1}
"""Checkpoint -> the number of steps before it was written."""
_KINDS = ("bit", "bit", "bit", "bit", "cut", "overwritten", "removed", "empty", "swapped", "older", "json", "killed")
_PARTS_OF_OLD_ONES = (".metadata", "optimizer.json", ".distcp")
_OTHER_JSON = (
    "[1]",
    "null",
    '[{"params": []}]',
    "[]",
    "{}",
    "5",
    '"x"',
    '[{"lr": "x"}]',
    "[[]]",
    "[" * 100_000,
    "[{}]",
    '[{"lr": NaN}]',
)


class Checkpoints:
    """Checkpoints written and read by one to three ranks: 60 cases at full size."""

    name = "checkpoints"
    full = 60

    def __init__(self, torch_process: TorchProcess) -> None:
        self._torch = torch_process
        self._home = tempfile.TemporaryDirectory(prefix="trainstep-checkpoints-")
        self._states: dict[int, dict[str, str]] = {}

    def attack(self, draw: random.Random, folder: Path) -> Outcome:
        size = draw.choice((1, 1, 2, 3))
        self._save(size)
        whole = Path(self._home.name, str(size))
        for name in _SAVED_AT:
            shutil.copytree(whole / name, folder / name)
        kind = draw.choice(_KINDS)
        if kind == "killed":
            names, what = self._kill_a_save(draw, size, folder), "a save was killed"
        else:
            names, what = _damage(draw, kind, folder / "saved", folder / "older")
        case = f"{size} ranks: {what}"
        answer = self._torch.call("attacks.checkpoints:load_all", size, str(folder), timeout_s=_LONGEST_S)
        if answer.timed_out or answer.error:
            return Outcome(case=case, time="it hangs" if answer.timed_out else "", traceback=_last_lines(answer))
        return self._judged(case, answer.value, size, kind, names)

    def afterwards(self) -> Iterator[Outcome]:
        self._home.cleanup()
        return self._torch.left()

    def _save(self, size: int) -> None:
        """Write two whole checkpoints by this many ranks, once."""
        if size not in self._states:
            folder = Path(self._home.name, str(size))
            folder.mkdir()
            answer = self._torch.call("attacks.checkpoints:save_all", size, str(folder), timeout_s=_LONGEST_S)
            assert isinstance(answer.value, dict), answer
            self._states[size] = answer.value

    def _kill_a_save(self, draw: random.Random, size: int, folder: Path) -> list[str]:
        """Replace the saved checkpoint by what a killed save leaves; an empty list, since no file is damaged."""
        shutil.rmtree(folder / "saved")
        after_s = draw.uniform(0.0, 0.1)
        self._torch.call("attacks.checkpoints:killed_save", size, str(folder / "saved"), after_s, timeout_s=_LONGEST_S)
        return []

    def _judged(self, case: str, ranks: list[dict[str, Any]], size: int, kind: str, names: list[str]) -> Outcome:
        loaded = [rank["saved"] for rank in ranks if rank["saved"].get("state")]
        refusals = [rank["saved"]["error"] for rank in ranks if "error" in rank["saved"]]
        other, traceback, lost = "", "", ""
        if loaded:
            as_saved = len(loaded) == len(ranks) and all(
                rank["state"] == self._states[size]["saved"] for rank in loaded
            )
            old_one = kind == "removed" and not any(part in names[0] for part in _PARTS_OF_OLD_ONES)
            warned = any(rank["warnings"] for rank in loaded)
            if not (as_saved and (kind == "killed" or (old_one and warned))):
                other = "it was loaded" if as_saved else "it was loaded, and is not what was saved"
        if unexpected := [error for error in refusals if error["kind"] != "ValueError"]:
            traceback = f"{unexpected[0]['frame']}: {unexpected[0]['kind']}: {unexpected[0]['text'][:200]!a}"
        elif refusals and names and not any(name in error["text"] for error in refusals for name in names):
            other = f"no rank names {' or '.join(names)}: {refusals[0]['text'][:200]!a}"
        if any(rank["older"].get("state") != self._states[size]["older"] for rank in ranks):
            lost = f"afterwards the older one does not load: {ranks[0]['older']}"[:300]
        return Outcome(case=case, traceback=traceback, lost=lost, other=other)


def _last_lines(answer: Answer) -> str:
    return " ".join(answer.error.strip().splitlines()[-2:])[:300]


def _damage(draw: random.Random, kind: str, folder: Path, older: Path) -> tuple[list[str], str]:
    """Damage one or two files of a checkpoint; their names, and a description."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    file = draw.choice(files)
    content = file.read_bytes()
    what = kind
    if kind == "bit":
        at, bit = draw.randrange(len(content)), draw.randrange(8)
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
        what = f"bit {bit} of byte {at}"
    elif kind in ("cut", "overwritten"):
        damaged, what = (cut_off if kind == "cut" else overwrite)(draw, content)
        while damaged == content:
            damaged, what = cut_off(draw, content)
        file.write_bytes(damaged)
    elif kind == "removed":
        file.unlink()
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "json":
        file = folder / "optimizer.json"
        text = draw.choice(_OTHER_JSON) if draw.random() < 0.7 else dumped(any_value(draw)).decode()
        file.write_text(text)
        what = f"is {text[:60]!a}"
    else:
        candidates = files if kind == "swapped" else [older / path.name for path in files]
        others = [path for path in candidates if path.exists() and path.read_bytes() != content]
        if not others:
            return _damage(draw, "bit", folder, older)
        other = draw.choice([path for path in others if kind == "swapped" or path.name == file.name] or others)
        if kind == "older":
            file = folder / other.name
            file.write_bytes(other.read_bytes())
            # An older manifest makes every other file a damaged one, so any of them may be named
            return [] if "manifest" in file.name else [file.name], f"{file.name} is that of an older save"
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return [file.name, other.name], f"{file.name} and {other.name} are swapped"
    return [file.name], f"{file.name}: {what}"


def save_all(size: int, folder: str) -> dict[str, str]:
    """Write the checkpoints; the digest of the state in each."""
    return _on_ranks(size, _save, folder)[0]


def load_all(size: int, folder: str) -> list[dict[str, Any]]:
    """Load the damaged checkpoint and then the older one; the results of each rank."""
    return _on_ranks(size, _load, folder)


def _on_ranks(size: int, function: Any, folder: str) -> list[Any]:
    """Run a function on new ranks and end them; its result on each rank."""
    from ranks import Pool

    pool = Pool(size)
    try:
        return pool.run(function, folder)
    finally:
        pool.kill()


def killed_save(size: int, folder: str, after_s: float) -> None:
    """Start a save and kill all of its ranks."""
    from ranks import Pool

    pool = Pool(size)
    pool.run(_model_of)
    for pipe in pool.pipes:
        pipe.send(((__name__, "_save_one", __file__), (folder,)))
    time.sleep(after_s)
    pool.kill()


def _model_of(ranks: Any) -> None:
    """Build the model once, so that the kill falls into the save and not into an import."""
    _model(ranks)


def _model(ranks: Any) -> tuple[Any, Any, Any]:
    import torch

    from trainstep.parallel.fsdp import FSDP

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 11), torch.nn.Tanh(), torch.nn.Linear(11, 3)
    )
    return model, FSDP(model, ranks), torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.99))


def _steps(model: Any, sync: Any, optimizer: Any, numbers: range) -> None:
    import torch

    for number in numbers:
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        sync.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 1e-2 / (number + 2)


def _save(ranks: Any, folder: str) -> dict[str, str]:
    from trainstep.parallel.checkpoint.save_load import save_checkpoint

    states = {}
    for name, steps in sorted(_SAVED_AT.items(), key=lambda item: item[1]):
        model, sync, optimizer = _model(ranks)
        _steps(model, sync, optimizer, range(steps))
        save_checkpoint(Path(folder, name), sync, optimizer)
        states[name] = _state(ranks, sync, optimizer)
    return states


def _save_one(ranks: Any, folder: str) -> None:
    from trainstep.parallel.checkpoint.save_load import save_checkpoint

    model, sync, optimizer = _model(ranks)
    _steps(model, sync, optimizer, range(_SAVED_AT["saved"]))
    save_checkpoint(Path(folder), sync, optimizer)


def _load(ranks: Any, folder: str) -> dict[str, Any]:
    from trainstep.parallel.checkpoint.save_load import load_checkpoint

    _, sync, optimizer = _model(ranks)
    results = {}
    for name in ("saved", "older"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                load_checkpoint(Path(folder, name), sync, optimizer)
                results[name] = {"loaded": True, "warnings": [str(warning.message) for warning in caught]}
            except BaseException as error:  # noqa: BLE001  (an error of torch need not be an Exception)
                results[name] = {"error": _error(error)}
        if ranks.group is not None and not _all_loaded(ranks, "loaded" in results[name]):
            continue
        if "loaded" in results[name]:
            results[name]["state"] = _state(ranks, sync, optimizer)
    return results


def _all_loaded(ranks: Any, loaded: bool) -> bool:
    import torch

    flag = torch.tensor([float(loaded)])
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=ranks.group)
    return bool(flag.item())


def _error(error: BaseException) -> dict[str, str]:
    trace, frame = error.__traceback__, "?"
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if "/trainstep/" in path:
            frame = f"{path.rpartition('/trainstep/')[2]}:{trace.tb_lineno} {trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    return {"kind": type(error).__name__, "text": " ".join(str(error).split())[:1000], "frame": frame}


def _state(ranks: Any, sync: Any, optimizer: Any) -> str:
    """A digest of the content of a checkpoint: parameters, buffers, the state of this rank's pieces, hyperparameters."""
    import hashlib

    digest = hashlib.sha256()
    for name, value in sorted(sync.full_state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    if ranks.world_size == 1:  # of several ranks, each has different pieces
        for parameter in optimizer.param_groups[0]["params"]:
            for key, value in sorted(optimizer.state[parameter].items()):
                digest.update(key.encode() + value.numpy().tobytes())
    plain = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    digest.update(json.dumps(plain, default=str, sort_keys=True).encode())
    return digest.hexdigest()
