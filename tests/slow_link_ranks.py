"""Run by torchrun on two pretend nodes (test_slow_link.py): times steps of FSDP in one group and in a group for each node.

    slow_link_ranks.py RESULT LINK RATE PAIRS [RATE PAIRS ...]

Writes to RESULT-NODE, for each rate of the link: seconds and bytes that the link sent for each step, plain and hybrid in turns.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from trainstep.costs.exchange import Exchange
from trainstep.costs.gradient_sync import Message, step_messages
from trainstep.costs.strategies import strategy_named
from trainstep.parallel import FSDP, Ranks, start_ranks, stop_ranks
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.units import parameter_sizes

WIDTH, LAYERS = 512, 6
RANKS_OF_NODE = 2
KINDS = {"plain": None, "hybrid": RANKS_OF_NODE}


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])


def expected(shard_ranks: int | None, ranks: int) -> tuple[Message, ...]:
    """The messages of a step by formula."""
    exchange = Exchange(strategy=strategy_named("fsdp"), ranks=ranks, shard_ranks=shard_ranks)
    return step_messages(exchange, parameter_sizes(blocks()))


def main(result: str, link: str, *rates: str) -> None:
    ranks = start_ranks("gloo")
    everyone = Collectives(ranks)
    wrapped = {kind: FSDP(blocks(), ranks, shard_ranks=size) for kind, size in KINDS.items()}
    node, place = divmod(ranks.rank, RANKS_OF_NODE)
    found = []
    for rate, pairs in zip(rates[::2], map(int, rates[1::2]), strict=True):
        if place == 0:
            subprocess.run(["tc", "qdisc", "replace", "dev", link, "root", *limited_to(rate)], check=True)
        steps: dict[str, list[tuple[float, int]]] = {kind: [] for kind in KINDS}
        for number in range(pairs + 1):  # the first pair warms up
            for kind, sync in wrapped.items():
                step = timed(sync, ranks, everyone, link)
                if number:
                    steps[kind].append(step)
        found.append(steps)
    if place == 0:
        Path(f"{result}-{node}").write_text(json.dumps(found))
    everyone.barrier()
    del wrapped
    stop_ranks(ranks)


def limited_to(rate: str) -> list[str]:
    """Arguments of tc: at most this rate, with a queue of 50 ms."""
    return ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]


def timed(sync: FSDP, ranks: Ranks, everyone: Collectives, link: str) -> tuple[float, int]:
    """Seconds of a step, and the bytes that the link sent in it, up to a few of the barriers around it."""
    everyone.barrier()
    sent_before, began_s = sent_bytes(link), time.perf_counter()
    x = torch.full((4, WIDTH), float(ranks.rank))
    sync(x).square().mean().backward()
    sync.finish_gradient_synchronization()
    everyone.barrier()
    seconds = time.perf_counter() - began_s
    sync.zero_grad()
    return seconds, sent_bytes(link) - sent_before


def sent_bytes(link: str) -> int:
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
