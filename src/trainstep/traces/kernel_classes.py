"""Tells from a kernel's or op's name its class of work (`other` if unknown), and shortens names for people.

The patterns of a table are tried in order. They cover names seen with torch 2.11 on an H200 (the tests' fixtures) and the names of
cuBLAS, cuDNN, NCCL, CUTLASS, FlashAttention and Inductor.
"""

import re

from trainstep.traces.kineto import MEMCPY, MEMSET, Activity

MATMUL, ATTENTION, SOFTMAX, ELEMENT_WISE = "matmul", "attention", "softmax", "element-wise"
REDUCTION, NORMALISATION, OPTIMIZER = "reduction", "normalisation", "optimizer"
COMMUNICATION, COPIES, OVERHEAD, OTHER, IDLE = "communication", "copies", "overhead", "other", "idle"
CLASSES = (
    *(MATMUL, ATTENTION, SOFTMAX, ELEMENT_WISE, REDUCTION, NORMALISATION),
    *(OPTIMIZER, COMMUNICATION, COPIES, OVERHEAD, OTHER, IDLE),
)
"""In the order of tables. `overhead`: time between ops on a CPU (Python, autograd's engine, views); `idle`: no work."""
FILLS_BYTES = "FillFunctor<unsigned char>"
"""Part of the name of the kernel that replaces the eager step's memset in a captured step (capture/memset_nodes.py)."""
_LIBRARIES = r"nccl|nvshmem|multimem|cross_device_reduce|all_?reduce|reduce_?scatter|all_?gather|gloo|mscclpp"
"""Pattern in the name of a kernel that is a library's whole message."""
_KERNELS = [
    (COMMUNICATION, rf"{_LIBRARIES}|symmetric_memory::|^add_up_kernel$|^Memcpy PtoP"),
    (OPTIMIZER, r"multi_tensor_apply|fused_?adam|adamw?_kernel|FusedAdam|FusedSgd"),
    (
        ATTENTION,
        r"flash_fwd|flash_bwd|flash::|FlashAttn|fmha|efficient_attention|AttentionKernel|AttentionBackwardKernel|sdpa|"
        r"flex_attention|mha_|_attn_(fwd|bwd)|^(forward|key_gradients|query_gradients|gradients|delta|hopper_[a-z]+)_kernel$|"
        r"^split_(peaks|parts|forward|key_gradients|query_gradients)_kernel$",
    ),
    (SOFTMAX, r"softmax|cross_entropy_kernel"),
    (
        MATMUL,
        r"gemm|gemv|nvjet|cutlass|xmma|splitKreduce|cublas|wgmma|^triton_(tem|mm)_|_matmul|dot_kernel|convolve|wgrad|"
        r"dgrad|implicit_con|^(ampere|hopper|volta|turing|sm\d+)_.*\d+x\d+",
    ),
    (NORMALISATION, r"layer_?norm|rms_?norm|RowwiseMoments|batch_?norm|bn_(fw|bw)|group_?norm|GammaBeta|_norm_kernel"),
    (
        COPIES,
        rf"^Mem(cpy|set)|direct_copy|copy_kernel|CatArrayBatchedCopy|_copy_kernel_cuda|transpose_kernel|{FILLS_BYTES}",
    ),
    (REDUCTION, r"reduce|Reduce|nll_loss|logsumexp|^cub::|DeviceScan|cumsum|sort|topk|argm(ax|in)|nonzero"),
    (
        ELEMENT_WISE,
        r"elementwise|Functor|silu|gelu|relu|dropout|distribution_|triu_tril|gather|scatter|index|embedding|fill|where|"
        r"rotary|swiglu|arange|^scale_kernel$",
    ),
]
_OPS = [
    (COMMUNICATION, r"^c10d::|^gloo:|^nccl:|all_?reduce|all_?gather|reduce_scatter"),
    (OPTIMIZER, r"_fused_adam|_foreach_|_fused_sgd"),
    (ATTENTION, r"scaled_dot_product|flash_attention|efficient_attention|flex_attention"),
    (SOFTMAX, r"softmax"),
    (
        MATMUL,
        r"::(mm|bmm|addmm|baddbmm|matmul|linear|mv|addmv|dot|einsum|convolution\w*|mkldnn\w*|_scaled_mm)$|mkl|onednn",
    ),
    (NORMALISATION, r"layer_norm|rms_norm|batch_norm|group_norm"),
    (COPIES, r"::(copy_|_to_copy|clone|contiguous|cat|stack|_local_scalar_dense)$"),
    (NORMALISATION, r"^trainstep::(add_)?rms_norm"),
    (ELEMENT_WISE, r"^trainstep::(rotary|swiglu)"),
    (REDUCTION, r"::(sum|mean|amax|amin|max|min|norm|linalg_vector_norm|logsumexp|nll_loss\w*|cumsum|any|all|var\w*)$"),
    (
        OVERHEAD,
        r"^autograd::|Backward\d*$|^torch::autograd|^TorchDynamo|Torch-Compiled|^CompiledFunction|^Pregraph|AOTDispatcher|"
        r"::(t|transpose|as_strided|view|_unsafe_view|reshape|permute|expand|select|slice|narrow|squeeze|unsqueeze|empty\w*|"
        r"detach\w*|alias|unbind|unflatten|flatten|to|result_type|resize_|item|is_nonzero|promote_types|numpy_T|chunk|split|"
        r"cross_entropy_loss|set_|lift_fresh|resolve_\w+)$|^detach$",
    ),
    (ELEMENT_WISE, r"^aten::"),
]
_FUNCTOR = re.compile(
    r"(\w+)(?:_kernel|_kernel_cuda)\(at::TensorIterator|(\w*Functor\w*|\w+_kernel_cuda|\w+_kernel_impl\w*|\w+Ops(?=<)|\w+_functor|"
    r"\w*LogSoftMax\w*)"
)
_EMPTY = re.compile(r"gpu_kernel_impl\w*|[ABU]{0,2}(Binary|Unary)Functor")
"""Wrappers that tell nothing about what is computed."""
_LONGEST = 160
_LIBRARY_MESSAGE = re.compile(_LIBRARIES, re.IGNORECASE)
_KERNEL_CLASSES = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _KERNELS]
_OP_CLASSES = [(name, re.compile(pattern)) for name, pattern in _OPS]
_INDUCTOR = re.compile(r"^triton_(poi|per|red|tem|for|split_scan|mix\w*)_fused_(.*?)(?:_\d+)?$")
_INDUCTOR_OP = re.compile(
    r"_to_copy|_unsafe_view|_softmax_backward_data|prepare_softmax_online|_softmax|masked_fill|bitwise_not|as_strided|"
    r"native_layer_norm_backward|native_layer_norm|[a-z]+_backward|[a-z0-9]+"
)
_MOVING = (
    *("_to_copy", "copy", "t", "clone", "view", "_unsafe_view", "permute", "transpose", "select", "expand"),
    *("cat", "stack", "unbind", "slice", "split", "unsqueeze", "squeeze", "as_strided"),
)
"""Ops that only move or convert values."""


def kernel_class(activity: Activity) -> str:
    """The class of a device activity. A copy between GPUs is a part of a message."""
    kind = class_of_kernel(activity.name)
    return COPIES if activity.kind in (MEMCPY, MEMSET) and kind != COMMUNICATION else kind


def is_library_message(activity: Activity) -> bool:
    """Whether the activity is a library's whole message; a message by copies (parallel/copies/messages.py) has many activities."""
    is_one = _LIBRARY_MESSAGE.search(activity.name) is not None
    return is_one and activity.kind not in (MEMCPY, MEMSET) and class_of_kernel(activity.name) == COMMUNICATION


def class_of_kernel(name: str) -> str:
    """The class of a kernel's name, demangled or not."""
    inductor = _INDUCTOR.match(name)
    if inductor:
        return _inductor_class(inductor[1], inductor[2])
    return next((kind for kind, pattern in _KERNEL_CLASSES if pattern.search(name)), OTHER)


def class_of_op(name: str) -> str:
    """The class of an op on a CPU."""
    if name.startswith(("triton_", "cpp_fused_")):
        return class_of_kernel(name.replace("cpp_fused_", "triton_poi_fused_"))
    return next((kind for kind, pattern in _OP_CLASSES if pattern.search(name)), OTHER)


def inductor_ops(name: str) -> list[str]:
    """The ops that Inductor fused into a kernel, as its name lists them: add, mul for triton_poi_fused_add_mul_3."""
    inductor = _INDUCTOR.match(name)
    return _INDUCTOR_OP.findall(inductor[2]) if inductor else []


def short_name(name: str) -> str:
    """A kernel's name for people to read: `vectorized_elementwise_kernel MulFunctor`. Names without templates stay as they are.

    A CUDA template demangles to a thousand characters, of which two words name the work.
    """
    flat = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")
    base = re.split(r"[<(]", flat, maxsplit=1)[0].split("::")[-1].strip()
    if base == "Kernel2":  # CUTLASS: the kernel is the template's argument
        inner = re.search(r"<\s*(\w+)", flat)
        base = inner[1] if inner else base
    if not base or flat == base or "Mem" in flat[:3]:
        return _cut(flat)
    words = (first.removesuffix("_kernel") or second for first, second in _FUNCTOR.findall(flat))
    functors = [word for word in dict.fromkeys(words) if word and word != base and not _EMPTY.fullmatch(word)]
    return _cut(" ".join([base, *functors[:1]]))


def _inductor_class(kind: str, ops: str) -> str:
    """The class of an Inductor kernel. `poi` is pointwise, `per` and `red` are reductions; the ops tell softmax and norms apart."""
    if kind == "tem":
        return ATTENTION if "flex_attention" in ops or "attention" in ops else MATMUL
    if "adam" in ops:
        return OPTIMIZER
    if kind in ("per", "red"):
        if "softmax" in ops:
            return SOFTMAX
        return NORMALISATION if "norm" in ops or ("rsqrt" in ops and "mean" in ops) else REDUCTION
    return COPIES if all(word in _MOVING for word in _INDUCTOR_OP.findall(ops)) else ELEMENT_WISE


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
