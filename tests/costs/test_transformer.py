"""FLOPs from shapes, term by term; test_workload_flops.py compares them with torch's counter."""

import pytest

from trainstep.costs.transformer import PASSES, forward_flops, step_flops

SHAPE = {"layers": 3, "d_model": 8, "d_ff": 20, "vocab_size": 50, "batch_size": 2, "context": 6}


def matmul(m: int, k: int, n: int) -> int:
    return 2 * m * k * n


def test_forward_flops_are_the_matmuls():
    tokens = 2 * 6
    assert forward_flops(**SHAPE) == {
        "attention_projections": 3 * (3 * matmul(tokens, 8, 8) + matmul(tokens, 8, 8)),
        "attention_scores_and_values": 3 * 2 * (matmul(6, 8, 6) + matmul(6, 6, 8)) // 2,
        "mlp": 3 * (2 * matmul(tokens, 8, 20) + matmul(tokens, 20, 8)),
        "head": matmul(tokens, 8, 50),
    }


@pytest.mark.parametrize(
    ("mode", "passes"), [("forward", 1), ("forward_no_grad", 1), ("forward_backward", 3), ("step", 3)]
)
def test_each_mode_has_its_passes(mode: str, passes: int):
    assert step_flops(mode, **SHAPE) == passes * sum(forward_flops(**SHAPE).values())
    assert step_flops(mode, 4, **SHAPE) == 4 * step_flops(mode, **SHAPE)
    assert set(PASSES) == {"forward", "forward_no_grad", "forward_backward", "step"}


def test_a_step_has_six_flops_per_weight_and_token():
    """The usual estimate, for a model like GPT-2 small at a short context, where attention and the embedding are small."""
    shape = {"layers": 12, "d_model": 768, "d_ff": 3072, "vocab_size": 10_000, "batch_size": 4, "context": 128}
    weights = 128_625_408 - 10_000 * 768
    assert step_flops("step", **shape) == pytest.approx(6 * weights * 4 * 128, rel=0.02)


def test_terms_grow_with_the_shape():
    def grown(**changes: int) -> dict[str, float]:
        more = forward_flops(**{**SHAPE, **changes})
        return {name: more[name] / flops for name, flops in forward_flops(**SHAPE).items()}

    assert set(grown(batch_size=4).values()) == {2}
    assert grown(context=12) == {"attention_projections": 2, "attention_scores_and_values": 4, "mlp": 2, "head": 2}
    assert grown(layers=6) == {"attention_projections": 2, "attention_scores_and_values": 2, "mlp": 2, "head": 1}
    assert grown(d_model=16) == {"attention_projections": 4, "attention_scores_and_values": 2, "mlp": 2, "head": 2}
