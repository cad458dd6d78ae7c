"""How large a bucket of gradients should be, from what a message costs.

P bytes of gradients in buckets of s bytes; a message of s bytes takes a + s / w (a: latency, w: bandwidth). Gradients are taken to
come as fast as they are sent, so what backward does not hide is every message's latency and the last bucket's own time:

    overhead(s) = a P / s + s / w        least at s = sqrt(P a w)
"""

import math


def bucket_overhead_s(gradient_bytes: float, bucket_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Seconds of a step that buckets of this size add to one without messages. A bucket is at most all gradients."""
    size = min(bucket_bytes, gradient_bytes)
    return latency_s * gradient_bytes / size + size / bytes_per_s


def best_bucket_bytes(gradient_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """The size with the least overhead. ValueError without a latency: then the smallest would be the best."""
    if latency_s <= 0:
        raise ValueError(f"latency_s: must be positive for a best size to exist, not {latency_s}")
    return min(math.sqrt(gradient_bytes * latency_s * bytes_per_s), gradient_bytes)
