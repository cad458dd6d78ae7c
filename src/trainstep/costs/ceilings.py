"""What one call of a ceiling does: FLOPs of a square matmul, bytes of a copy, and in words what is counted."""

_COUNTED = {
    "matmul": "2 n^3: a multiplication and an addition for each of n^3 products",
    "copy": "bytes read plus bytes written, in one memory",
    "host_to_device": "bytes that cross the link, in one direction, from pinned memory",
    "device_to_host": "bytes that cross the link, in one direction, to pinned memory",
    "peer_copy": "bytes that cross the link, in one direction",
}


def matmul_flops(n: int) -> int:
    """n x n times n x n."""
    return 2 * n**3


def copied_bytes(kind: str, mib: int) -> int:
    """Bytes counted when `mib` MiB are copied: a copy within one memory reads and writes it."""
    return mib * 2**20 * (2 if kind == "copy" else 1)


def counted(kind: str) -> str:
    """What a kind of ceiling counts, in words."""
    return _COUNTED[kind]
