"""What torch.compile cost a process, and whether its on-disk cache had the answer already."""

import os

from trainstep.records.facts import Fact, facts_of

_FORWARD, _BACKWARD = "_compile.compile_inner", "backward._backward_impl"
"""The timers that cover a whole graph's compilation; the backward graph's runs in the first backward."""


def use_compile_cache(folder: str) -> None:
    """Point Inductor and Triton there, before either is imported. The folder is the caller's to remove."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")


def compilation_facts() -> dict[str, Fact]:
    """`compile_s`: seconds in compilation so far. `compile_cache`: 'warm' if every graph came from the on-disk cache."""
    import torch._dynamo.utils as dynamo  # here, for a second and a half that only compiled cells should pay

    seconds = sum(sum(dynamo.compilation_time_metrics.get(timer, ())) for timer in (_FORWARD, _BACKWARD))
    counts = dynamo.counters["inductor"]
    missed = counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]
    warm = not missed and (counts["fxgraph_cache_hit"] or dynamo.counters["aot_autograd"]["autograd_cache_hit"])
    return facts_of(
        compile_s=seconds,
        compile_cache="warm" if warm else "cold",
        compiled_graphs=dynamo.counters["stats"]["unique_graphs"],
    )
