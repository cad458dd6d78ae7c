"""AdamW in each of torch's implementations."""

from typing import Any


def adamw_options(implementation: str, *, learning_rate: float) -> dict[str, Any]:
    """Options of torch.optim.AdamW (Loshchilov 2019): a loop over parameters, foreach groups, or fused; its defaults otherwise."""
    return {"lr": learning_rate, "foreach": implementation == "foreach", "fused": implementation == "fused"}
