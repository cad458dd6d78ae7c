"""Kernel names people can read: CUDA templates demangle to a thousand characters, of which two words tell what runs."""

import re

_FUNCTOR = re.compile(
    r"(\w+)(?:_kernel|_kernel_cuda)\(at::TensorIterator|(\w*Functor\w*|\w+_kernel_cuda|\w+_kernel_impl\w*|\w+Ops(?=<)|\w+_functor|"
    r"\w*LogSoftMax\w*)"
)
_EMPTY = re.compile(r"gpu_kernel_impl\w*|[ABU]{0,2}(Binary|Unary)Functor")
"""Wrappers that say nothing of what is computed."""
_LONGEST = 160


def short_name(name: str) -> str:
    """`vectorized_elementwise_kernel MulFunctor` for a demangled template; names without templates as they are."""
    flat = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")
    base = re.split(r"[<(]", flat, maxsplit=1)[0].split("::")[-1].strip()
    if base == "Kernel2":  # CUTLASS: the kernel is the template's argument
        inner = re.search(r"<\s*(\w+)", flat)
        base = inner[1] if inner else base
    if not base or flat == base or "Mem" in flat[:3]:
        return _cut(flat)
    found = (first.removesuffix("_kernel") or second for first, second in _FUNCTOR.findall(flat))
    functors = [word for word in dict.fromkeys(found) if word and word != base]
    kept = [word for word in functors if not _EMPTY.fullmatch(word)]
    return _cut(" ".join([base, *kept[:1]]))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
