"""Classes of kernels by their real names, from recorded torch versions and from other libraries."""

from collections import Counter
from pathlib import Path

import pytest

from trainstep.traces.kernel_classes import (
    CLASSES,
    OTHER,
    class_of_kernel,
    class_of_op,
    inductor_ops,
    kernel_class,
    short_name,
)
from trainstep.traces.kineto import MEMCPY, MEMSET, Activity

RECORDED = sorted((Path(__file__).parent / "fixtures").glob("kernels_*.tsv"))


def names(path: Path) -> list[tuple[str, str]]:
    return [(kind, name) for kind, _, name in (line.partition("\t") for line in path.read_text().splitlines())]


@pytest.mark.parametrize("path", RECORDED, ids=[path.stem for path in RECORDED])
def test_recorded_names_have_their_class(path: Path):
    wrong = [(kind, class_of_kernel(name), name[:90]) for kind, name in names(path) if class_of_kernel(name) != kind]
    assert not wrong
    counts = Counter(kind for kind, _ in names(path))
    assert OTHER not in counts
    assert {"matmul", "attention", "softmax", "element-wise", "reduction", "normalisation", "optimizer"} <= set(counts)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float(ncclWorkElem)", "communication"),
        ("void multimem_all_reduce_kernel<c10::BFloat16, 16>(...)", "communication"),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)", "communication"),
        ("add_up_kernel", "communication"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1", "attention"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>(...)", "attention"),
        (
            "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
            "attention",
        ),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>(...)", "attention"),
        ("forward_kernel", "attention"),
        ("hopper_gradients_kernel", "attention"),
        ("split_key_gradients_kernel", "attention"),
        ("split_parts_kernel", "attention"),
        ("rms_norm_backward_kernel", "normalisation"),
        ("rotary_kernel", "element-wise"),
        ("swiglu_backward_kernel", "element-wise"),
        ("cross_entropy_kernel", "softmax"),
        ("scale_kernel", "element-wise"),
        ("triton_tem_fused_mm_3", "matmul"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn", "matmul"),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4>(...)", "matmul"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "matmul"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(...)", "normalisation"),
        ("triton_red_fused_native_layer_norm_0", "normalisation"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>(...)", "element-wise"),
        ("layer_norm_forward_kernel", "normalisation"),
        ("a_kernel_of_tomorrow", "other"),
    ],
)
def test_names_of_other_libraries_have_their_class(name: str, expected: str):
    assert class_of_kernel(name) == expected


@pytest.mark.parametrize("kind", [MEMCPY, MEMSET])
def test_copies_and_memsets_are_copies(kind: str):
    activity = Activity(kind=kind, name="?", device=0, stream=0, start_ns=0, duration_ns=1, correlation=1)
    assert kernel_class(activity) == "copies"


def test_a_copy_between_gpus_is_communication():
    name = "Memcpy PtoP (Device -> Device)"
    activity = Activity(kind=MEMCPY, name=name, device=0, stream=0, start_ns=0, duration_ns=1, correlation=1)
    assert kernel_class(activity) == "communication"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trainstep::add_rms_norm", "normalisation"),
        ("trainstep::rotary_split", "element-wise"),
        ("aten::mm", "matmul"),
        ("aten::addmm", "matmul"),
        ("aten::_softmax", "softmax"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::copy_", "copies"),
        ("aten::sum", "reduction"),
        ("aten::silu", "element-wise"),
        ("aten::as_strided", "overhead"),
        ("autograd::engine::evaluate_function: MmBackward0", "overhead"),
        ("MmBackward0", "overhead"),
        ("c10d::allreduce_", "communication"),
        ("my::op", "other"),
        ("cpp_fused__to_copy_add_0", "element-wise"),
    ],
)
def test_ops_have_their_class(name: str, expected: str):
    assert class_of_op(name) == expected


def test_inductors_names_contain_the_fused_ops():
    assert inductor_ops("triton_poi_fused_add_mul_3") == ["add", "mul"]
    assert inductor_ops("triton_per_fused__softmax__to_copy_masked_fill_4") == ["_softmax", "_to_copy", "masked_fill"]
    assert inductor_ops("elementwise_kernel") == []


def test_classes_are_named_once():
    assert len(set(CLASSES)) == len(CLASSES)


@pytest.mark.parametrize("path", RECORDED, ids=[path.stem for path in RECORDED])
def test_short_names_are_short_and_not_empty(path: Path):
    for _, name in names(path):
        short = short_name(name)
        assert 0 < len(short) <= 160
        assert "<" not in short
        assert "(" not in short or name.startswith("Mem")


@pytest.mark.parametrize(
    ("part", "short"),
    [
        ("silu_backward_kernel", "vectorized_elementwise_kernel silu_backward"),
        ("MeanOps", "reduce_kernel MeanOps"),
        ("FusedAdamMathFunctor", "multi_tensor_apply_kernel FusedAdamMathFunctor"),
        ("Kernel2<cutlass_80_simt_sgemm_64x64", "cutlass_80_simt_sgemm_64x64_8x5_tn_align1"),
    ],
)
def test_short_names_contain_the_function(part: str, short: str):
    name = next(name for path in RECORDED for _, name in names(path) if part in name)
    assert short_name(name) == short
