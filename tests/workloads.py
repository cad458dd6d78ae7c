"""Workloads without torch that sleep, compute, or fail in every way that a cell can: `workloads:SLEEP` and others.

Config, all optional: `seconds` of a step, `steps`, `act` (one of ACTS, in place of the workload's own) and `where` it is done
(prepare, settle, take, finish), `settles` (the measurement has that method), `log` (a file that gets a line for each call, with
`name`), `pid_file` for a grandchild's id, `alone` (a file that one process at a time can lock: memory for one), `work` (rounds of
hashing per step).
"""

import ctypes
import fcntl
import hashlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from trainstep.measure.harness.workload import Findings, Measurement, Stage
from trainstep.records.record import Fact, Samples

Config = Mapping[str, Any]
COMPILE_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class Planted:
    """A workload that does its act, unless the config names another."""

    def __init__(self, act: str = "nothing", *, shares_worker: bool = False) -> None:
        self.act = act
        self.shares_worker = shares_worker

    def prepare(self, config: Config, stage: Stage) -> Measurement:
        stage("build")
        kind = SettlingMeasurement if config.get("settles") else PlantedMeasurement
        return kind({"act": self.act, **config}, stage)


class PlantedMeasurement:
    """A measurement that sleeps or computes its steps, logs each call, and does its act in `where`."""

    def __init__(self, config: Config, stage: Stage) -> None:
        self._config = config
        self._stage = stage
        self._times_s: list[float] = []
        self._alone = _hold_alone(config)
        self._called("prepare")
        stage("steps")

    def take(self, steps: int) -> None:
        for _ in range(steps):
            started_s = time.perf_counter()
            time.sleep(self._config.get("seconds", 0))
            _compute(self._config.get("work", 0))
            self._times_s.append(time.perf_counter() - started_s)
        self._called("take", steps)

    def finish(self) -> Findings:
        self._stage("afterwards")
        self._called("finish")
        score = Path("/proc/self/oom_score_adj")
        facts = {
            "pid": os.getpid(),
            "oom_score_adj": int(score.read_text()) if score.exists() else None,
            **memory_limit(),
            "device_order": os.environ.get("CUDA_DEVICE_ORDER"),
            "compile_caches": " ".join(map(os.environ.get, COMPILE_CACHES))
            if self._config.get("cold_compile")
            else None,
            "folder": os.getcwd(),
            "torch_threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None,
            "typed": sys.stdin.read() if self._config.get("reads") else "",
        }
        if self._config["act"] == "nan":
            facts["loss"] = float("nan")
        times: Any = ("soon", "later") if self._config["act"] == "words" else self._times_s
        return Findings(
            samples={"step": Samples(unit="s", values=times)},
            facts={name: Fact(value=value) for name, value in facts.items()},
        )

    def _called(self, what: str, steps: int | None = None) -> None:
        if "log" in self._config:
            with open(self._config["log"], "a") as log:
                log.write(f"{self._config.get('name', '')} {what}{'' if steps is None else f' {steps}'}\n")
        if self._config.get("where", "take") == what:
            ACTS[self._config["act"]](self._config)


def memory_limit() -> dict[str, int]:
    """The fact of this process's limit; empty without one, which the system gives as -1."""
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return {} if limit == resource.RLIM_INFINITY else {"memory_limit_bytes": limit}


class SettlingMeasurement(PlantedMeasurement):
    """A measurement that logs the call of `settle`, too."""

    def settle(self) -> None:
        self._called("settle")


def _hold_alone(config: Config) -> Any:
    """Lock the file `alone` until this process ends; MemoryError if another process has it."""
    if "alone" not in config:
        return None
    file = open(config["alone"], "w")  # noqa: SIM115  (held until the process ends)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise MemoryError("tried to allocate 77 bytes, but another process holds them") from None
    return file


def _compute(rounds: int) -> None:
    """Hash in native code: a loop in Python can be up to 8 % faster in one process than in an identical one."""
    digest = b""
    for _ in range(rounds):
        digest = hashlib.sha256(digest + bytes(100_000)).digest()


def _nothing(config: Config) -> None:
    pass


def _abort(config: Config) -> NoReturn:
    os.abort()


def _abort_second(config: Config) -> None:
    """Abort in every process after the first one."""
    if Path(config["file"]).exists():
        os.abort()
    Path(config["file"]).touch()


def _run_out_second(config: Config) -> None:
    """Run out of memory in the second process alone."""
    first, second = Path(config["file"]), Path(config["file"] + ".second")
    if first.exists() and not second.exists():
        second.touch()
        _run_out(config)
    first.touch()


def _meet(config: Config) -> None:
    """From a variant's second process on, wait until the other of two variants is here as often; fail after ten seconds."""
    folder = Path(config["folder"])
    folder.mkdir(exist_ok=True)
    (folder / f"{config['name']} {os.getpid()}").touch()
    times = len(list(folder.glob(f"{config['name']} *")))
    end_s = time.monotonic() + 10
    while times > 1 and len(list(folder.iterdir())) < 2 * times:
        if time.monotonic() > end_s:
            raise RuntimeError("the other variant did not come")
        time.sleep(0.01)


def _send(number: int) -> Callable[[Config], None]:
    return lambda config: os.kill(os.getpid(), number)


def _hang(config: Config) -> None:
    time.sleep(600)


def _hang_in_native_code(config: Config) -> None:
    """Sleep without releasing the interpreter's lock, so that no other thread of this process runs."""
    ctypes.PyDLL(None).sleep(600)


def _raise(config: Config) -> NoReturn:
    print("about to raise", file=sys.stderr)
    raise RuntimeError(config.get("message", "this was planted"))


def _leave(config: Config) -> NoReturn:
    sys.exit("no more")


def _leave_hard(config: Config) -> NoReturn:
    os._exit(7)


def _run_out(config: Config) -> NoReturn:
    raise MemoryError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.")


def _import(config: Config) -> None:
    import a_package_that_is_nowhere  # noqa: F401


def _interrupt(config: Config) -> NoReturn:
    raise KeyboardInterrupt


def _spawn(config: Config) -> None:
    """Start a grandchild that outlives this process unless the whole group is killed."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(config["pid_file"]).write_text(str(child.pid))
    ACTS[config.get("then", "nothing")](config)


def _run_python(config: Config) -> None:
    """Start a grandchild as torch does: `-c` puts the current folder first on the path."""
    subprocess.run([sys.executable, "-c", "import json, random"], check=True)


def _fork(config: Config) -> None:
    """Fork a grandchild, which keeps the pipes of this process open."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    Path(config["pid_file"]).write_text(str(child))
    ACTS[config.get("then", "nothing")](config)


def _return_twice(config: Config) -> None:
    """Fork, so that two processes answer, the child first."""
    if os.fork():
        time.sleep(0.2)


def _print_last_words(config: Config) -> NoReturn:
    print(config["words"], file=sys.stderr, flush=True)
    os.abort()


def _fill_compile_cache(config: Config) -> None:
    for folder in map(os.environ.get, COMPILE_CACHES):
        os.makedirs(folder or "")
    ACTS[config.get("then", "nothing")](config)


def _fill_memory(config: Config) -> None:
    """Write to every page of one GiB."""
    _ = b"x" * 2**30


def _hold_folder(config: Config) -> None:
    from trainstep.measure.harness.files import TemporaryFolder

    with TemporaryFolder():
        ACTS[config["then"]](config)


def _be_noisy(config: Config) -> None:
    print("a line on stdout")
    os.write(1, b'{"event": "taken"}\n')
    print("a line on stderr", file=sys.stderr)


ACTS: dict[str, Callable[[Config], None]] = {
    "nothing": _nothing,
    "nan": _nothing,
    "words": _nothing,
    "abort": _abort,
    "abort_second": _abort_second,
    "run_out_second": _run_out_second,
    "meet": _meet,
    "segfault": _send(signal.SIGSEGV),
    "kill": _send(signal.SIGKILL),
    "real_time_signal": _send(40),
    "hang": _hang,
    "hang_in_native_code": _hang_in_native_code,
    "raise": _raise,
    "exit": _leave,
    "hard_exit": _leave_hard,
    "run_out": _run_out,
    "import": _import,
    "interrupt": _interrupt,
    "spawn": _spawn,
    "fork": _fork,
    "run_python": _run_python,
    "return_twice": _return_twice,
    "last_words": _print_last_words,
    "fill_memory": _fill_memory,
    "hold_folder": _hold_folder,
    "compile": _fill_compile_cache,
    "print": _be_noisy,
}

SLEEP = Planted()
SHARED = Planted(shares_worker=True)
CRASH = Planted("abort")
SEGFAULT = Planted("segfault")
HANG = Planted("hang")
RAISE = Planted("raise")
OOM = Planted("run_out")
KILLED = Planted("kill")
SPAWNS = Planted("spawn")
NOISY = Planted("print", shares_worker=True)
