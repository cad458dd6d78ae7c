"""Changes a user's script from outside: wraps constructors before the script runs, and changes its module once that is known.

    applied = Applied({"adamw": "fused", "compile": "module"})
    applied.install()               # after torch was imported, before the script builds anything
    applied.change_module(module)   # the outermost module that the script really calls, between two steps
    applied.step_ended(steps)
    applied.not_applied             # change -> why it did nothing

Each change is a function here. It counts what it changed, because a change that found nothing to change proves nothing: a script
without a DataLoader runs under `workers=8` exactly as before. What is wrapped stays wrapped until the process ends.

[Note: what stays the script's] A change leaves alone what it could not keep correct: a DataLoader of an IterableDataset keeps its
workers (each worker would give all of the data), an optimizer whose arguments torch refuses with `fused` is built as written, and
attention with a mask or dropout goes to torch. The first step runs before the outermost module is known, so changes of the module
begin with a later step.
"""

import functools
import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from trainstep.measure.run.changed.attention import models_said_causal, said_causal, with_our_kernel
from trainstep.measure.run.changed.fused_loss import with_our_loss
from trainstep.measure.run.changed.fused_ops import with_our_ops
from trainstep.measure.run.device_clock import matmul_precision
from trainstep.ops.adamw import AdamW

_COLLECT_EVERY = 200
"""Steps between two collections of garbage, under gc=off."""
_ADAMW_OPTIONS = ("lr", "betas", "eps", "weight_decay")
_TORCH_ADAMW_ONLY = ("amsgrad", "maximize", "differentiable")


class Applied:
    """The changes of one process, and what became of each."""

    def __init__(self, changes: Mapping[str, str]) -> None:
        self.changes = dict(changes)
        self.counts = dict.fromkeys(self.changes, 0)
        """Change -> how many things it changed: loaders, optimizers, modules, calls of attention while nothing compiles."""
        self._why: dict[str, str] = {}
        self._script_compiles = self._compiles_itself = False
        self.in_warmups = True
        self.batch_size: int | None = None
        """The batch size that the script itself gives the loaders that are changed."""

    def install(self) -> None:
        """Wrap what the script will call."""
        for name, install in _INSTALL.items():  # in this order: a mask is taken away before our kernel refuses it
            if name in self.changes:
                install(self, self.changes[name])

    def change_module(self, module: torch.nn.Module) -> None:
        """Change the outermost module. Called once, when no forward pass is under way."""
        if "mask" in self.changes:
            models_said_causal(self, module)
        if "ops" in self.changes:
            with_our_ops(self, module)
        mode = self.changes.get("compile")
        if mode is not None:
            self._compile_module(module, mode)
        if self.changes.get("precision") == "bf16_autocast":
            _under_autocast(module)
            self.did("precision")

    def step_ended(self, steps: int) -> None:
        """Do what the changes need between two steps."""
        if self.changes.get("compile") == "reduce_overhead":
            torch.compiler.cudagraph_mark_step_begin()  # else torch keeps a graph's results as still needed
        if "gc" in self.changes and steps % _COLLECT_EVERY == 1:
            gc.disable()
            gc.collect()
            self.did("gc")

    def did(self, name: str) -> None:
        """Count that the change found something to change."""
        self.counts[name] += 1

    def left(self, name: str, why: str) -> None:
        """Note why something stays as it is."""
        self._why.setdefault(name, why)

    @property
    def not_applied(self) -> Mapping[str, str]:
        """Change -> why it changed nothing."""
        why = {name: self._why.get(name, _NOTHING[name]) for name, count in self.counts.items() if not count}
        if self.changes.get("precision") == "tf32" and matmul_precision() == "highest":
            why["precision"] = "the script sets the precision of matmuls itself"
        return why

    def compile_options(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options for a call of torch.compile by the script, with the change applied."""
        if self._compiles_itself:  # this call is the change's own
            return options
        self._script_compiles = True
        if self.changes["compile"] == "module":
            self.left("compile", "the script calls torch.compile already")
            return options
        if options.get("mode") not in (None, "default") or options.get("options") or options.get("disable"):
            self.left("compile", "the script gives torch.compile a mode or options of its own")
            return options
        if options.get("backend", "inductor") != "inductor":
            self.left("compile", f"the script compiles with the backend {options['backend']}")
            return options
        self.did("compile")
        return {**options, "mode": "reduce-overhead"}

    def _compile_module(self, module: torch.nn.Module, value: str) -> None:
        """Compile the module in place, so that all who hold it call compiled code; of DDP the inner one, as DDP's forward sends."""
        if self._script_compiles:
            return
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        options: dict[str, Any] = {"mode": "reduce-overhead"} if value == "reduce_overhead" else {}
        self._compiles_itself = True
        if type(inner).forward.__module__.startswith("torch."):  # for a plain Sequential, `compile()` compiles nothing
            inner._compiled_call_impl = torch.compile(functools.partial(_call_of, inner), **options)
        else:
            inner.compile(**options)
        self._compiles_itself = False
        self.did("compile")


def _call_of(module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
    return module._call_impl(*arguments, **options)


def _adamw(applied: Applied, value: str) -> None:
    """`fused`: build each torch.optim.Adam and AdamW with fused=True. `trainstep`: replace torch.optim.AdamW by ours."""
    if value == "trainstep":
        _wrap(torch.optim, "AdamW", functools.partial(_trainstep_adamw, applied))
        return
    kinds: set[type] = {torch.optim.Adam}
    if torch.optim.Adam not in torch.optim.AdamW.__mro__:  # true in older torch; else AdamW's constructor calls Adam's
        kinds.add(torch.optim.AdamW)
    for kind in kinds:
        _wrap(kind, "__init__", functools.partial(_fused_init, applied))


def _fused_init(applied: Applied, init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def fused_init(optimizer: Any, params: Any, *arguments: Any, **options: Any) -> None:
        params = params if isinstance(params, torch.Tensor) else list(params)  # a generator can be read only once
        if options.get("fused") or options.get("differentiable"):
            applied.left("adamw", "it is fused already" if options.get("fused") else "it is differentiable")
            return init(optimizer, params, *arguments, **options)
        try:
            init(optimizer, params, *arguments, **{**options, "fused": True, "foreach": None})
        except (RuntimeError, ValueError) as error:
            applied.left("adamw", f"torch refuses it: {next(iter(str(error).splitlines()), '')}")
            return init(optimizer, params, *arguments, **options)
        if all(_has_fused_kernel(weight) for group in optimizer.param_groups for weight in group["params"]):
            applied.did("adamw")
            return None
        applied.left("adamw", "torch's fused kernel takes other parameters")
        return init(optimizer, params, *arguments, **options)

    return fused_init


def _has_fused_kernel(weight: torch.Tensor) -> bool:
    """Whether torch's fused kernel takes this parameter; torch itself checks it only in the first step."""
    return weight.device.type in ("cpu", "cuda") and torch.is_floating_point(weight)


def _trainstep_adamw(applied: Applied, original: Callable[..., Any]) -> type:
    """A class that builds trainstep's AdamW, or torch's if an option asks for what ours lacks."""

    class AppliedAdamW(AdamW):
        """trainstep's AdamW with the arguments of torch's."""

        def __new__(cls, params: Any, *arguments: Any, **options: Any) -> Any:
            only = [name for name in _TORCH_ADAMW_ONLY if options.get(name)]
            if not only and len(arguments) <= len(_ADAMW_OPTIONS):
                return super().__new__(cls)
            applied.left("adamw", f"trainstep's AdamW has no {only[0] if only else 'amsgrad'}")
            return original(params, *arguments, **options)

        def __init__(self, params: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(params, *arguments, **{key: options[key] for key in _ADAMW_OPTIONS if key in options})
            applied.did("adamw")

    AppliedAdamW.__name__ = AppliedAdamW.__qualname__ = "AdamW"
    return AppliedAdamW


def _loaders(applied: Applied, _: str) -> None:
    """Build each DataLoader with the requested workers, pinned memory and batch size; one wrapper makes all three changes."""
    if not hasattr(DataLoader.__init__, "changes_loaders"):
        _wrap(DataLoader, "__init__", functools.partial(_changed_loader, applied))


def _changed_loader(applied: Applied, init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def changed_init(loader: Any, *arguments: Any, **options: Any) -> None:
        bound = signature.bind(loader, *arguments, **options)
        given = bound.arguments
        if "workers" in applied.changes:
            workers = int(applied.changes["workers"])
            if isinstance(given.get("dataset"), IterableDataset):
                applied.left("workers", "with workers an IterableDataset may give other data")
            elif given.get("num_workers", 0) >= workers:
                applied.left("workers", f"it has {given['num_workers']} already")
            else:
                given |= {"num_workers": workers, "persistent_workers": True}
                applied.did("workers")
        if "pin_memory" in applied.changes:
            if given.get("pin_memory"):
                applied.left("pin_memory", "it is on already")
            elif not torch.cuda.is_available():
                applied.left("pin_memory", "there is no GPU to pin memory for")
            else:
                given["pin_memory"] = True
                applied.did("pin_memory")
        if "batch_size" in applied.changes:
            _change_batch(applied, given)
        init(*bound.args, **bound.kwargs)

    changed_init.changes_loaders = True  # type: ignore[attr-defined]
    return changed_init


def _change_batch(applied: Applied, given: dict[str, Any]) -> None:
    """Change the batch size of the first loader that has one, and of loaders with the same size; evaluation often uses another."""
    size = given.get("batch_size", 1)
    if given.get("batch_sampler") is not None or size is None:
        applied.left("batch_size", "a loader has a sampler of whole batches, or gives samples one by one")
    elif applied.batch_size in (None, size):
        applied.batch_size = size
        given["batch_size"] = int(applied.changes["batch_size"])
        applied.did("batch_size")


def _copies(applied: Applied, _: str) -> None:
    """Make copies from pinned memory to a GPU non-blocking, so that the host does not wait for them.

    torch keeps freed memory until the copy is done. It does not stop a script from writing into its own buffer before that.
    """

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        name = original.__name__

        @functools.wraps(original)
        def moved(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if _is_waited_for(tensor, name, arguments, options):
                options = {**options, "non_blocking": True}
                applied.did("copies")
            return original(tensor, *arguments, **options)

        return moved

    for name in ("to", "cuda"):
        _wrap(torch.Tensor, name, made)


def _is_waited_for(tensor: torch.Tensor, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether this is a copy from pinned memory to a GPU for which the host waits. A call with a bool by position is left alone."""
    if tensor.device.type != "cpu" or options.get("non_blocking") or any(isinstance(each, bool) for each in arguments):
        return False
    target = options.get("device", options.get("other", next(iter(arguments), None)))
    if isinstance(target, torch.Tensor):
        target = target.device
    if isinstance(target, int):
        kind = "cuda"
    else:
        kind = torch.device(target).type if isinstance(target, str | torch.device) else "cuda" if name == "cuda" else ""
    return kind == "cuda" and tensor.is_pinned()


def _compile(applied: Applied, _: str) -> None:
    """Give each torch.compile of the script, which `Module.compile` calls too, the requested mode."""

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compiled(*arguments: Any, **options: Any) -> Any:
            return original(*arguments, **applied.compile_options(options))

        return compiled

    _wrap(torch, "compile", made)


def _precision(applied: Applied, value: str) -> None:
    """Turn on TF32 for fp32 matmuls. Autocast is turned on later, when the outermost module is known."""
    if value == "tf32" and matmul_precision() == "highest":
        torch.set_float32_matmul_precision("high")
        applied.did("precision")


def _under_autocast(module: torch.nn.Module) -> None:
    """Run each forward pass of the module under bf16 autocast, with results in fp32, as loss functions outside expect them."""
    parameter = next(module.parameters(), None)
    device = "cpu" if parameter is None else parameter.device.type
    contexts: list[Any] = []

    def enter(*_: Any) -> None:
        contexts.append(torch.autocast(device, torch.bfloat16))
        contexts[-1].__enter__()

    def leave(_module: Any, _arguments: Any, results: Any) -> Any:
        contexts.pop().__exit__(None, None, None)
        return tree_map(_in_fp32, results)

    compiled = getattr(module, "_compiled_call_impl", None)
    if compiled is None:
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return

    def call(*arguments: Any, **options: Any) -> Any:  # hooks would be traced into its graph
        with torch.autocast(device, torch.bfloat16):
            return tree_map(_in_fp32, compiled(*arguments, **options))

    module._compiled_call_impl = call


def _in_fp32(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if is_half else value


def _buckets(applied: Applied, value: str) -> None:
    """Build each DistributedDataParallel with buckets of so many MiB."""

    def made(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def changed_init(*arguments: Any, **options: Any) -> None:
            init(*arguments, **{**options, "bucket_cap_mb": int(value)})
            applied.did("bucket_cap_mb")

        return changed_init

    _wrap(DistributedDataParallel, "__init__", made)


def _wrap(owner: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, made(getattr(owner, name)))


_INSTALL: Mapping[str, Callable[[Applied, str], None]] = {
    "adamw": _adamw,
    "workers": _loaders,
    "pin_memory": _loaders,
    "batch_size": _loaders,
    "copies": _copies,
    "compile": _compile,
    "precision": _precision,
    "attention": lambda applied, _: with_our_kernel(applied),
    "mask": lambda applied, _: said_causal(applied),
    "ops": lambda applied, _: with_our_loss(applied),
    "bucket_cap_mb": _buckets,
}
_NOTHING: Mapping[str, str] = {
    "adamw": "the script builds no Adam or AdamW of torch.optim",
    "workers": "the script builds no DataLoader",
    "pin_memory": "the script builds no DataLoader",
    "batch_size": "the script builds no DataLoader",
    "copies": "no copy from pinned memory to a GPU makes the host wait",
    "compile": "no outermost module of the script was called",
    "precision": "no outermost module of the script was called",
    "attention": "the script calls no scaled_dot_product_attention",
    "mask": "the script calls no scaled_dot_product_attention",
    "ops": "no outermost module of the script was called",
    "bucket_cap_mb": "the script builds no DistributedDataParallel",
    "gc": "no step ended",
}
"""Change -> why it changed nothing, if no other reason was noted."""
