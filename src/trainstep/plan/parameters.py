"""The built-in model's parameters, one by one, from its shape: what messages and memory are planned from."""

from trainstep.config.model import ModelConfig
from trainstep.costs.exchange import ParameterSize

_WEIGHT_BYTES = {"fp32": 4, "tf32": 4, "bf16_autocast": 4, "fp16_autocast": 4, "bf16": 2, "bf16_master": 2}


def weight_bytes(precision: str) -> int:
    """Bytes of an element of a parameter, its gradient and its optimizer state (RunConfig.precision)."""
    return _WEIGHT_BYTES[precision]


def transformer_parameters(model: ModelConfig, precision: str) -> tuple[ParameterSize, ...]:
    """In the module's order; a unit a block, and one for embedding, last norm and head."""
    d, d_ff, element_bytes = model.d_model, model.d_ff, weight_bytes(precision)
    in_block = {
        "attention_norm": d,
        "attention.qkv": 3 * d * d,
        "attention.out": d * d,
        "mlp_norm": d,
        "mlp.gate": d * d_ff,
        "mlp.up": d * d_ff,
        "mlp.down": d_ff * d,
    }
    blocks = [
        ParameterSize(
            name=f"blocks.{layer}.{name}.weight", numel=numel, element_bytes=element_bytes, unit=f"blocks.{layer}"
        )
        for layer in range(model.layers)
        for name, numel in in_block.items()
    ]
    around = [
        ParameterSize(name=f"{name}.weight", numel=numel, element_bytes=element_bytes)
        for name, numel in {"embedding": model.vocab_size * d, "norm": d, "head": model.vocab_size * d}.items()
    ]
    return (around[0], *blocks, *around[1:])
