"""A step's kernels with no host between them: captured once in a CUDA graph, replayed, timed by events.

The check on a profile of a launch-bound step: what its kernels add up to should be what a replay of the same kernels takes.
Capture follows PyTorch's rules (docs.pytorch.org/docs/stable/notes/cuda.html, CUDA graphs): warmed up on a side stream, the same
input tensors at every replay, gradients set to none before capture so that backward allocates them in the graph's own memory,
and nothing that makes the host wait. So of the optimizer only the fused AdamW without loss scaling is captured: scaling asks the
device whether the gradients are finite, and AdamW's other implementations run other kernels in a graph than outside.
"""

from collections.abc import Sequence

import torch

from trainstep.config.phases import Phase
from trainstep.config.run import RunConfig
from trainstep.measure.failures import failure_of
from trainstep.records.facts import Fact, facts_of
from trainstep.training.batches import Batch
from trainstep.training.build import Assembly
from trainstep.training.step import TrainStep

_WARMUPS, _REPLAYS = 3, 20
_PHASES = {
    "forward": (Phase.FORWARD,),
    "forward_no_grad": (Phase.FORWARD,),
    "forward_backward": (Phase.FORWARD, Phase.BACKWARD),
    "step": (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER),
}


def graph_replay_facts(
    assembly: Assembly, batches: Sequence[Batch], kernels_s: dict[str, float], replays: int = _REPLAYS
) -> dict[str, Fact]:
    """graph_replay_s: mean of the replays, one step each; graph_replay_kernels_s: the same phases in `kernels_s`, by phase.

    Whatever goes wrong is the fact graph_replay_failed. The assembly's weights move on, and it is not to be used afterwards.
    """
    left_out = reason_without_optimizer(assembly.run)
    mode = "forward_backward" if left_out else assembly.run.mode
    try:
        replay_s = _replay_s(_capturable(assembly, mode), batches, replays)
    except Exception as error:  # noqa: BLE001  (a user's model may raise anything, and a capture more)
        return facts_of(graph_replay_failed=failure_of(error, "graph_replay").message)
    phases = [str(phase) for phase in _PHASES[mode]]
    facts = facts_of(
        graph_replay_s=replay_s,
        graph_replay_kernels_s=sum(kernels_s.get(phase, 0.0) for phase in phases),
        graph_replay_phases=", ".join(phases),
    )
    return facts | facts_of(graph_replay_left_out=left_out or None)


def reason_without_optimizer(run: RunConfig) -> str:
    """Why a graph of this run leaves its optimizer out, in a sentence; empty where it has none or captures it."""
    if not run.trains:
        return ""
    if run.precision == "fp16_autocast":
        return "The optimizer is left out: loss scaling waits for the device, which a graph cannot."
    if run.adamw != "fused":
        return f"The optimizer is left out: AdamW's {run.adamw} runs other kernels in a graph; take adamw fused."
    return ""


def _capturable(assembly: Assembly, mode: str) -> TrainStep:
    """The step as far as a graph can hold it. The fused AdamW has its step count on the device already."""
    step = assembly.step
    if mode == "step" and step.optimizer is not None:
        for group in step.optimizer.param_groups:
            group["capturable"] = True
    return TrainStep(
        step.module,
        step.optimizer if mode == "step" else None,
        mode=mode,
        autocast=step.autocast,
        scaler=step.scaler,
        clip_grad_norm=step.clip_grad_norm,
    )


def _replay_s(step: TrainStep, batches: Sequence[Batch], replays: int) -> float:
    """Seconds a replay, over replays back to back."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARMUPS):
            step.clear_gradients()
            step(batches)
    torch.cuda.current_stream().wait_stream(stream)
    step.clear_gradients()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(batches)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / replays
