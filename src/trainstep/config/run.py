"""The config of a training step, with everything that decides what is computed and how it is timed, and its phases."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from trainstep.config.fields import check_choices, check_integer, check_positive, described, nearest
from trainstep.config.model import ModelConfig, UserModel
from trainstep.config.nodes import check_nodes
from trainstep.costs.transformer import step_flops

MODES = ("forward", "forward_no_grad", "forward_backward", "step")
PRECISIONS = ("fp32", "tf32", "bf16_autocast", "fp16_autocast", "bf16", "bf16_master")
ATTENTIONS = (
    *("plain", "sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "flex"),
    *("flash_attn_4", "trainstep"),
)
OPS = ("plain", "fused")
COMPILES = ("none", "block", "model")
ADAMWS = ("loop", "foreach", "fused", "trainstep")
RECOMPUTES = ("none", "selective", "narrow", "block")
"""In order, from the mode that keeps most for backward to the one that keeps least (training/recompute.py)."""
UPDATES = ("after_backward", "in_backward", "by_bucket")
CAPTURES = ("none", "auto", "step")
DEVICES = ("cpu", "cuda")
TIMING_FIELDS = frozenset(("steps", "warmups", "sync", "nvtx", "cold_compile", "seed"))
"""Fields of RunConfig that say how a step is timed, not what it is: files of winning options leave them to their user."""
_MOST_RANKS = 1024
_FLASH_ATTN_4_WIDTHS = (64, 96, 128)
"""Heads of these widths had right gradients on an H200, heads 80 wide a wrong dq (results/h200/attention_hopper_widths.jsonl)."""


class Phase(StrEnum):
    """The phases of a training step. A phase ends where the next begins; together they are the step.

    One enum names the trace span, the record's sample, the predicted term and the chart.
    """

    FORWARD = "forward"
    """Batch on the device -> loss."""
    BACKWARD = "backward"
    """`loss.backward()`, with any communication that it hides, and with update in_backward the updates."""
    GRAD_SYNC = "grad_sync"
    """End of backward -> last gradient ready: the exposed part of communication. Absent on one process."""
    OPTIMIZER = "optimizer"
    """Unscale, clip, step, zero_grad; with update in_backward what is left of them."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training step and how it is timed. ValueError names the field and the remedy."""

    has_messages: ClassVar[bool] = False
    """Whether it is the step of one of several ranks."""

    model: ModelConfig | UserModel
    batch_size: int = described("sequences in a (micro-)batch", 4)
    context: int = described("tokens in a sequence", 256)
    mode: str = described("how much of the step runs", "step", MODES)
    precision: str = described(
        "arithmetic of the step; bf16: weights and optimizer state too; bf16_master: weights, with fp32 copies in the optimizer",
        "fp32",
        PRECISIONS,
    )
    attention: str = described(
        "attention of the built-in model; flash_attn_4 needs the package flash-attn-4, a GPU and 16 bits",
        "sdpa",
        ATTENTIONS,
    )
    ops: str = described(
        "the built-in model's norms, rotation, SwiGLU and loss: plain PyTorch, or fused kernels", "plain", OPS
    )
    loss_sum_dtype: str = described(
        "with fused ops: the dtype in which the gradient of the head's weight is summed over chunks of tokens: fp32, or own, that "
        "of the matmuls, which takes less time and memory, but rounds after each chunk",
        "fp32",
        ("fp32", "own"),
    )
    compile: str = described("what torch.compile wraps", "none", COMPILES)
    recompute: str = described(
        "what backward computes again instead of keeping it; block: a whole block; selective: all but the results of its matmuls "
        "and of attention; narrow: also results of matmuls that are wider than their input",
        "none",
        RECOMPUTES,
    )
    recompute_every: int = described("recompute in every k-th block only", 1)
    narrow_blocks: int = described(
        "with recompute selective: so many blocks, the first, keep only what narrow keeps", 0
    )
    recompute_budget_gib: float | None = described(
        "choose, from measured bytes and times of this model's blocks, the least recomputation whose step fits into this many GiB; "
        "ranks that exchange messages choose the same",
        None,
    )
    capture: str = described(
        "run the step as one CUDA graph: auto captures as much as possible and says what is left out; step fails if anything is",
        "none",
        CAPTURES,
    )
    adamw: str = described("implementation of AdamW: torch's, or ours in one launch", "fused", ADAMWS)
    learning_rate: float = described("AdamW's learning rate", 3e-4)
    clip_grad_norm: float | None = described("clip the gradient's 2-norm to this", None)
    update: str = described(
        "when parameters are updated; in_backward: a block when its gradients are complete, which are freed, so that all gradients "
        "never exist at once; needs adamw trainstep, no clipping, no accumulation; by_bucket, of sync bucketed: after backward, a "
        "bucket as soon as its average arrives, while the next is on its way (with transport copies on GPUs also during backward); "
        "needs the same, but for accumulation",
        "after_backward",
        UPDATES,
    )
    accumulation: int = described("micro-batches whose gradients are added before the optimizer's step", 1)
    data: str = described(
        "tokens: random, stdlib (Python's own sources as bytes), or a file or folder of text", "random"
    )
    seed: int = described("seed of weights and batches", 0)
    device: str = described("device to run on", "cpu", DEVICES)
    warmups: int = described("steps before the timed steps; recorded separately", 5)
    steps: int = described("timed steps", 10)
    sync: str | int = described("synchronise at each 'step', at each 'phase' edge, or every k steps (windows)", "step")
    cold_compile: bool = described("compile with an empty on-disk cache", False)
    nvtx: bool = described("open NVTX ranges around the spans, for nsys; needs a GPU", False)

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "batch_size", "context", "accumulation", "steps")
        check_integer(self, "warmups", at_least=0)
        check_integer(self, "seed", at_least=0, at_most=2**63 - 1)
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate: must be positive, not {self.learning_rate!r}")
        if self.clip_grad_norm is not None and not 0 < self.clip_grad_norm < math.inf:
            raise ValueError(f"clip_grad_norm: must be positive or none, not {self.clip_grad_norm!r}")
        self._check_budget()  # first, because the other two would advise what a budget refuses
        self._check_update()
        self._check_recompute()
        self._check_sync()
        self._check_device()
        self._check_capture()
        if self.data != "random" and isinstance(self.model, ModelConfig) and self.model.vocab_size < 256:
            raise ValueError(f"vocab_size: text is read as bytes and needs at least 256, not {self.model.vocab_size}")
        if self.loss_sum_dtype != "fp32" and self.ops != "fused":
            raise ValueError("loss_sum_dtype: only the fused loss sums by chunks; take ops fused, or leave it at fp32")
        if self.ops != "plain" and isinstance(self.model, UserModel):
            raise ValueError(
                "ops: a model of your own brings its own ops; leave ops at plain, and use trainstep.ops in it"
            )
        if self.data != "random" and isinstance(self.model, UserModel):
            raise ValueError("data: a model of your own brings its own batches; leave data at random")

    def _check_budget(self) -> None:
        if self.recompute_budget_gib is None:
            return
        if not 0 < self.recompute_budget_gib < math.inf:
            raise ValueError(f"recompute_budget_gib: must be positive or none, not {self.recompute_budget_gib!r}")
        chosen = {"recompute": "none", "recompute_every": 1, "narrow_blocks": 0}
        for name, default in chosen.items():
            if getattr(self, name) != default:
                raise ValueError(f"{name}: is chosen by recompute_budget_gib; leave one of them out")
        if self.compile == "model":
            raise ValueError(
                "recompute_budget_gib: chooses by block, which compile model does not know; take compile block or none"
            )
        if self.mode not in ("forward_backward", "step"):
            raise ValueError(f"recompute_budget_gib: mode {self.mode} has no backward that recomputes; leave it out")
        if self.updates_in_backward:
            raise ValueError(
                "recompute_budget_gib: its measured backward must not update weights; take update after_backward"
            )

    def _check_update(self) -> None:
        if self.update == "after_backward":
            return
        if self.update == "by_bucket" and not self.has_messages:
            raise ValueError(
                "update: by_bucket hides messages between ranks, of which there are none; take in_backward or after_backward"
            )
        remedies = {
            f"mode {self.mode} has no update; take mode step": not self.trains,
            f"AdamW's {self.adamw} updates all parameters at once; take adamw trainstep": self.adamw != "trainstep",
            "clipping needs the norm of all gradients first; take clip_grad_norm none": self.clip_grad_norm is not None,
            "gradients of micro-batches add up first; take accumulation 1": (
                self.accumulation > 1 and self.updates_in_backward
            ),
            "loss scaling looks for overflows in all gradients first; take another precision than fp16_autocast": (
                self.precision == "fp16_autocast"
            ),
            "a model compiled whole completes all gradients at once; take compile block or none": (
                self.compile == "model" and self.updates_in_backward
            ),
        }
        for remedy, applies in remedies.items():
            if applies:
                raise ValueError(f"update: {self.update}: {remedy}, or update after_backward")

    def _check_recompute(self) -> None:
        check_positive(self, "recompute_every")
        if self.recompute == "none" and self.recompute_every != 1:
            raise ValueError(
                "recompute_every: has no effect without recompute; take recompute block, selective or narrow"
            )
        self._check_narrow_blocks()
        keeps_attention = self.recompute in ("selective", "narrow") or self.recompute_budget_gib is not None
        unknown_to_torch = {"flex": "compiles itself", "flash_attn_4": "is not an operator of torch's"}
        if keeps_attention and self.attention in unknown_to_torch and isinstance(self.model, ModelConfig):
            raise ValueError(
                f"attention: {self.attention} {unknown_to_torch[self.attention]}, so that recompute selective, narrow and a "
                "recompute_budget_gib cannot keep its result; take another attention, or recompute block or none without a budget"
            )

    def _check_narrow_blocks(self) -> None:
        check_integer(self, "narrow_blocks", at_least=0)
        if not self.narrow_blocks:
            return
        if self.recompute != "selective":
            raise ValueError(
                "narrow_blocks: only recompute selective has narrow blocks; take that, or leave narrow_blocks out"
            )
        if self.recompute_every != 1:
            raise ValueError("narrow_blocks: recompute_every leaves out blocks; leave one of the two out")
        if isinstance(self.model, ModelConfig) and self.narrow_blocks > self.model.layers:
            raise ValueError(f"narrow_blocks: the model has {self.model.layers} blocks, not {self.narrow_blocks}")

    def _check_sync(self) -> None:
        if self.sync in ("step", "phase"):
            return
        if isinstance(self.sync, str):
            hint = nearest(self.sync, ("step", "phase"))
            raise ValueError(f"sync: {self.sync!r} is not known{hint}; known: step, phase, or a number of steps")
        check_integer(self, "sync", at_least=2)
        if self.steps % self.sync:
            raise ValueError(f"sync: windows of {self.sync} steps do not divide steps {self.steps}")

    def _check_capture(self) -> None:
        if self.capture == "none":
            return
        if self.sync == "phase":
            raise ValueError(
                "sync: the host cannot wait for a phase inside a captured step; take sync step, or capture none"
            )
        if self.device == "cpu" and self.compile != "none":
            raise ValueError(
                f"capture: on a CPU a step is recorded by its operators, which compile {self.compile} hides; take compile none"
            )
        if self.capture == "step" and self.trains and self.adamw in ("loop", "foreach"):
            raise ValueError(
                f"capture: AdamW's {self.adamw} counts its steps on the host; take adamw fused or trainstep, or capture auto"
            )

    def _check_device(self) -> None:
        if self.device == "cpu" and self.nvtx:
            raise ValueError("nvtx: ranges need a GPU; leave it out on a CPU")
        if self.device == "cpu" and self.precision == "tf32":
            raise ValueError("precision: tf32 is a mode of NVIDIA matrix units; on a CPU take fp32 or bf16_autocast")
        if self.device == "cpu" and self.attention in ("sdpa_cudnn", "sdpa_efficient", "flash_attn_4"):
            raise ValueError(
                f"attention: {self.attention} runs on CUDA only; on a CPU take sdpa, sdpa_flash, sdpa_math or plain"
            )
        if self.device == "cpu" and self.attention == "flex" and self.mode != "forward_no_grad":
            raise ValueError("attention: flex has no backward on a CPU; take sdpa or plain, or mode forward_no_grad")
        if (
            self.attention in ("sdpa_flash", "sdpa_cudnn", "flash_attn_4")
            and self.device == "cuda"
            and self.precision in ("fp32", "tf32")
        ):
            raise ValueError(
                f"attention: {self.attention} takes 16-bit inputs; with precision {self.precision} take sdpa_efficient or sdpa, or "
                "take precision bf16_autocast"
            )
        if self.attention == "flash_attn_4" and isinstance(self.model, ModelConfig):
            self._check_flash_attn_4(self.model)

    def _check_flash_attn_4(self, model: ModelConfig) -> None:
        widths = _FLASH_ATTN_4_WIDTHS
        if model.head_dim not in widths:
            raise ValueError(
                f"attention: flash_attn_4 is known to be right for heads {', '.join(map(str, widths[:-1]))} and {widths[-1]} "
                f"wide, not {model.head_dim}; take trainstep or sdpa"
            )
        all_recompute = self.recomputes and self.recompute_every == 1
        if self.compile == "model" or (self.compile == "block" and all_recompute):
            where = " where every block recomputes" if all_recompute else ""
            raise ValueError(
                f"compile: flash_attn_4 is not an operator of torch's, so that compile {self.compile}{where} would compile "
                f"nothing; take another attention, or compile {'none' if all_recompute else 'block or none'}"
            )

    @property
    def tokens(self) -> int:
        """Tokens that a whole step reads."""
        return self.batch_size * self.context * self.accumulation

    def model_flops(self, model: ModelConfig) -> int:
        """Model FLOPs of a whole step of the built-in Transformer (costs/transformer.py)."""
        return step_flops(
            self.mode,
            self.accumulation,
            layers=model.layers,
            d_model=model.d_model,
            d_ff=model.d_ff,
            vocab_size=model.vocab_size,
            batch_size=self.batch_size,
            context=self.context,
        )

    @property
    def recomputes(self) -> bool:
        """Whether backward may compute a part of forward again."""
        return self.recompute != "none" or self.recompute_budget_gib is not None

    @property
    def trains(self) -> bool:
        return self.mode == "step"

    @property
    def updates_in_backward(self) -> bool:
        return self.update == "in_backward"


@dataclass(frozen=True, kw_only=True)
class BenchConfig(RunConfig):
    """The step that every rank takes by itself, without messages. ValueError names the field and the remedy."""

    ranks: int = described(
        "processes that take this step at the same time, each by itself, on a GPU of its own where there are GPUs; over several "
        "nodes the default is one for each of their GPUs, on CPUs one a node",
        1,
    )
    nodes: int = described(
        "nodes that these processes are spread over; more than one needs --slurm, or a launch by srun or torchrun, whose nodes are "
        "the default there",
        1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "ranks", at_least=1, at_most=_MOST_RANKS)
        check_nodes(self.ranks, self.nodes)
