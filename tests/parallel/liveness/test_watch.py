"""When a rank dies, ends or does not come, the others name it and leave, and no process is left. Real processes on gloo are
killed at several points of a step. The decisions of rank 0 are tested in test_desk.py."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cell_maker import import_path
from quick import slow_unless
from ranks import free_port
from trainstep.parallel.liveness.link import loopback_interface
from trainstep.parallel.liveness.watch import LEFT

SIZE = 3
VICTIM = 2

PROGRAM = """
import json, os, signal, sys, threading, time
import torch
import torch.distributed as dist
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.process_group import start_ranks, stop_ranks

torch.set_num_threads(1)

def listening_addresses():
    own = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            pass  # the one that listed them
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]

victim = int(os.environ["RANK"]) == int(sys.argv[2])
if sys.argv[1] == "absent" and victim:
    os.kill(os.getpid(), signal.SIGKILL)
ranks = start_ranks("gloo", timeout_s={"absent": 1, "stuck": 3}.get(sys.argv[1], 60))
collectives = Collectives(ranks)
act = sys.argv[1] if ranks.rank == int(sys.argv[2]) else "nothing"

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class Dies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if act == "forward":
            die()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if act == "backward":
            die()
        return gradient

weight = torch.ones(8, requires_grad=True)

def reduce(parameter):
    collectives.all_reduce(parameter.grad).wait()

weight.register_post_accumulate_grad_hook(reduce)
def launches(steps):
    # of a captured step; after some the victim is not there
    from trainstep.capture import CapturedStep
    from trainstep.ops.adamw import AdamW
    from trainstep.parallel.ddp import BucketedDDP
    from trainstep.parallel.agreement import HostAgreement

    model = torch.nn.Linear(4, 4)
    sync, optimizer = BucketedDDP(model, ranks), AdamW(model.parameters())

    def train(batch):
        loss = model(batch).sum()
        loss.backward()
        sync.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = CapturedStep(train, optimizer=optimizer, module=model, agree=HostAgreement(ranks))
    for number in range(steps):
        if number == 12 and act == "launch":
            die()
        step(torch.ones(2, 4))

if sys.argv[1] == "launch":
    launches(100)
if sys.argv[1] == "listen":
    print(json.dumps(listening_addresses()))
for step in range(3):
    if step == 1:
        if act == "raise":
            raise ArithmeticError("planted here")
        if act == "finally":
            try:
                raise ArithmeticError("planted here")
            finally:
                stop_ranks(ranks)
        if act == "exit":
            try:
                sys.exit("no data here")
            finally:
                stop_ranks(ranks)
        if act == "leave":
            sys.exit(0)
        if act == "fewer":
            break
        if act == "stuck":
            time.sleep(600)
        if act == "collective":
            threading.Timer(0.2, die).start()
            collectives.all_reduce(torch.ones(8)).wait()  # not finished: the third rank still sleeps
        if sys.argv[1] == "collective" and ranks.rank != int(sys.argv[2]):
            time.sleep(0.1 if ranks.rank == 1 else 0.6)
        if sys.argv[1] == "asleep" and ranks.rank != int(sys.argv[2]):
            time.sleep(600)  # no collective to fail: only the watch can tell
        if act == "asleep":
            die()
    (Dies.apply(weight).sum() * (ranks.rank + 1)).backward()
    collectives.count_step()
total = weight.grad.tolist()
del weight
stop_ranks(ranks)
print("ended", ranks.rank, flush=True)
"""


STARTER = """
import gc, json, os, sys
import torch, torch.distributed
import trainstep.parallel.process_group

gc.freeze()  # no rank searches torch for garbage when it ends
program = compile(sys.argv[1], "program", "exec")
for line in sys.stdin:
    act, victim, folder, port = json.loads(line)
    pids = []
    for rank in range(<size>):
        pid = os.fork()
        if pid == 0:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{folder}/{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "<size>"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TRAINSTEP_TOKEN": "of this test"}
            sys.argv = ["program", act, str(victim)]
            exec(program, {"__name__": "__main__"})
            sys.exit()
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    codes = dict(os.wait() for _ in pids)
    print(json.dumps([os.waitstatus_to_exitcode(codes[pid]) for pid in pids]), flush=True)
""".replace("<size>", str(SIZE))
"""A program that imports torch once and forks the ranks of each test; a rank ends as any script does."""


@dataclass(frozen=True)
class Ends:
    """The exit codes and the output of one program's ranks."""

    pids: list[int]
    codes: list[int]
    out: list[str]
    err: list[str]


@pytest.fixture(scope="module")
def starter() -> Iterator[subprocess.Popen[str]]:
    environ = {**os.environ, "PYTHONPATH": import_path(), "GLOO_SOCKET_IFNAME": loopback_interface() or ""}
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, PROGRAM], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.stdin.close()
    process.wait(10)


@pytest.fixture
def run(starter: subprocess.Popen[str], tmp_path: Path) -> Callable[..., Ends]:
    def until_all_ended(act: str, victim: int = VICTIM) -> Ends:
        starter.stdin.write(json.dumps([act, victim, str(tmp_path), free_port()]) + "\n")
        starter.stdin.flush()
        pids, codes = json.loads(starter.stdout.readline()), json.loads(starter.stdout.readline())
        out, err = ([(tmp_path / f"{rank}.{name}").read_text() for rank in range(SIZE)] for name in ("out", "err"))
        return Ends(pids, codes, out, err)

    return until_all_ended


def name(ends: Ends, rank: int) -> str:
    return f"rank {rank} ({socket.gethostname()}, pid {ends.pids[rank]})"


def check_others(ends: Ends, victim: int, how: str = "died") -> None:
    """Check that each other rank named the victim, printed nothing else and left."""
    for rank in set(range(SIZE)) - {victim}:
        assert ends.err[rank] == f"trainstep: {name(ends, victim)} {how}; rank {rank} leaves\n"
        assert ends.codes[rank] == LEFT
        assert "ended" not in ends.out[rank]


@pytest.mark.parametrize(
    ("victim", "act"),
    slow_unless(
        lambda victim, act: victim == VICTIM or act == "collective",
        itertools.product([0, VICTIM], ["forward", "backward", "collective", "asleep", "launch"]),
    ),
)
def test_a_killed_rank_is_named(run: Callable[..., Ends], act: str, victim: int):
    ends = run(act, victim)
    assert ends.codes[victim] == -signal.SIGKILL
    check_others(ends, victim)


@pytest.mark.parametrize("victim", [0, VICTIM])
def test_an_exception_is_printed_by_its_own_rank_alone(run: Callable[..., Ends], victim: int):
    ends = run("raise", victim)
    assert ends.codes[victim] == 1
    assert "ArithmeticError: planted here" in ends.err[victim]
    assert "trainstep" not in ends.err[victim].splitlines()[-1]
    check_others(ends, victim, "failed with ArithmeticError")


@pytest.mark.parametrize("victim", [0, VICTIM])
def test_an_exception_that_stops_the_ranks_on_its_way_is_printed(run: Callable[..., Ends], victim: int):
    ends = run("finally", victim)
    assert ends.codes == [1 if rank == victim else LEFT for rank in range(SIZE)]
    assert "ArithmeticError: planted here\n" in ends.err[victim]
    sentence = f"trainstep: rank {victim} has stopped after 1 step because of ArithmeticError and rank "
    assert all(sentence in err and "batches" not in err for err in ends.err), ends.err


def test_the_words_of_an_exit_that_stops_the_ranks_are_printed(run: Callable[..., Ends]):
    ends = run("exit")
    assert ends.codes == [1 if rank == VICTIM else LEFT for rank in range(SIZE)]
    assert ends.err[VICTIM].startswith("no data here\n")
    assert all("because of SystemExit and rank " in err and "batches" not in err for err in ends.err), ends.err


def test_a_rank_that_ends_without_stop_ranks_is_named(run: Callable[..., Ends]):
    ends = run("leave")
    assert ends.codes[VICTIM] == 0
    check_others(ends, VICTIM, "ended without stop_ranks")


@pytest.mark.parametrize("victim", [0, VICTIM])
def test_unequal_numbers_of_batches_are_refused_at_once(run: Callable[..., Ends], victim: int):
    ends = run("fewer", victim)
    for rank, err in enumerate(ends.err):
        assert err.startswith(f"trainstep: rank {victim} has stopped after 1 step and rank ")
        assert err.endswith(
            f"in all_reduce in step 2: give every rank the same number of batches; rank {rank} leaves\n"
        )
    assert ends.codes == [LEFT] * SIZE


@pytest.mark.parametrize("victim", [0, VICTIM])
def test_a_rank_that_is_stuck_is_named_by_those_that_time_out(run: Callable[..., Ends], victim: int):
    ends = run("stuck", victim)
    assert ends.codes[victim] == LEFT
    assert {1} <= set(ends.codes) <= {1, LEFT}  # the first rank to time out fails; the others may leave because of it
    sentence = f"rank {victim} is not there: it last started all_reduce in step 1, "
    assert all(sentence in err for err in ends.err), ends.err
    assert f"; rank {victim} leaves" in ends.err[victim]


def test_a_rank_that_never_comes_is_named(run: Callable[..., Ends]):
    ends = run("absent")
    assert ends.codes == [1, 1, -signal.SIGKILL]
    for err in ends.err[:VICTIM]:
        assert err.endswith(f"TimeoutError: rank {VICTIM} did not come within 1 s\n")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_listens_to_other_machines(run: Callable[..., Ends]):
    ends = run("listen")
    assert ends.codes == [0] * SIZE, ends.err
    listening = [json.loads(out.splitlines()[0]) for out in ends.out]
    assert len(listening[0]) >= 2  # the store and gloo's own
    assert {address for addresses in listening for address in addresses} == {"0100007F"}  # 127.0.0.1


def test_a_clean_end_prints_nothing(run: Callable[..., Ends]):
    ends = run("nothing")
    assert ends.err == [""] * SIZE
    assert ends.out == [f"ended {rank}\n" for rank in range(SIZE)]
    assert ends.codes == [0] * SIZE
