"""Gives a Hugging Face Llama the fused ops: `patch(model)` replaces its norms, its MLPs' activation, its rotation and its loss.

    from trainstep.ops import hugging_face_llama
    from trainstep.ops.flash_attention import hugging_face
    hugging_face.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="trainstep")
    hugging_face_llama.patch(model)

Weights, their names and the mathematics stay. While the model trains and is given labels, its output has no logits, because they
never exist whole; in evaluation and without labels it has them. In the tuple of return_dict=False None stands in their place. A
copied model keeps the ops; a model that comes from a pickle has to be patched again. Needs `pip install trainstep[hf]`; tested
with transformers 5.5 and 5.23.
"""

from functools import update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainstep.ops.linear_cross_entropy import linear_cross_entropy
from trainstep.ops.operators import autocast_dtype
from trainstep.ops.rms_norm import rms_norm
from trainstep.ops.rotary import rotary
from trainstep.ops.swiglu import swiglu

_IGNORED = -100
"""The label of tokens that do not count, in transformers."""
_SILU = ("silu", "swish")
"""The names of SiLU in transformers."""
_BEFORE_LABELS = 5
"""Arguments of LlamaForCausalLM.forward in front of the labels. Who gives these by position gets the usual forward."""


def patch(model: Any) -> None:
    """Change a LlamaForCausalLM in place; a second call changes nothing more.

    The rotation is a function of transformers' module, so it changes for every Llama of the process. Modules inside whose forward
    somebody has replaced keep it. ValueError for another model, for an activation other than SiLU, and for a model whose own
    forward or loss was replaced (by mixed precision of accelerate, torch.compile or another patch): patch it before.
    """
    # Imported here: transformers takes seconds to import, and is an extra of this package.
    from transformers.models.llama import modeling_llama

    if not isinstance(model, modeling_llama.LlamaForCausalLM):
        raise ValueError(f"model: must be a LlamaForCausalLM, but is a {type(model).__name__}")
    if model.config.hidden_act not in _SILU:
        raise ValueError(f"model: its activation must be silu, but is {model.config.hidden_act}")
    patch_loss(model)
    replaced: dict[Any, Any] = {modeling_llama.LlamaRMSNorm: _norm, modeling_llama.LlamaMLP: _mlp}
    for kind, forward in replaced.items():
        update_wrapper(forward, kind.forward)  # under this name a pickle finds the class's own
    for module in model.modules():
        if type(module) in replaced and has_own_forward(module):
            module.forward = MethodType(replaced[type(module)], module)


def patch_loss(model: Any) -> None:
    """Change the loss of a LlamaForCausalLM, and the rotation of all Llamas. ValueError as `loss_refusal` says."""
    from transformers.models.llama import modeling_llama  # see patch

    if why := loss_refusal(model):
        raise ValueError(f"model: {why}")
    update_wrapper(_loss, type(model).forward)  # transformers' Trainer takes the columns of its data from the signature
    model.forward = MethodType(_loss, model)
    vars(modeling_llama)["apply_rotary_pos_emb"] = _rotate


def loss_refusal(model: Any) -> str:
    """Why a LlamaForCausalLM has to keep its loss; empty if it has not."""
    from transformers.loss.loss_utils import ForCausalLMLoss  # see patch

    if not has_own_forward(model) and getattr(vars(model)["forward"], "__func__", None) is not _loss:
        return "its forward was replaced already, as mixed precision of accelerate does; patch it before"
    if not getattr(type(model).forward, "__module__", "").startswith("transformers."):
        return "its class has a forward of another package"
    if model.loss_function is not ForCausalLMLoss:
        return "it has another loss than the usual"
    return ""


def has_own_forward(module: Any) -> bool:
    """Whether the module runs the forward of its class; a pickle of a patched module keeps it as an attribute of the module."""
    forward = vars(module).get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(module).forward


def has_hooks(module: Any) -> bool:
    """Whether somebody's hooks run with the module."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(kinds)


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    result: Tensor = rms_norm(hidden_states, self.weight, self.variance_epsilon)
    return result


def _mlp(self: Any, x: Tensor) -> Tensor:
    result: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
    return result


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate as apply_rotary_pos_emb does: cos and sin (B or 1, S, D), each half alike; heads are where `unsqueeze_dim` says."""
    tables = [table[..., : table.shape[-1] // 2] for table in (cos, sin)]
    cos, sin = (table[0] if table.shape[0] == 1 else table for table in tables)
    if unsqueeze_dim == 1:
        return rotary(q, k, cos, sin, interleaved=False)
    q, k = rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved=False)
    return q.transpose(1, 2), k.transpose(1, 2)


def _loss(self: Any, *inputs: Any, labels: Tensor | None = None, **options: Any) -> Any:
    """LlamaForCausalLM.forward, which leaves out the logits where it may."""
    from transformers.modeling_outputs import CausalLMOutputWithPast  # see patch

    if len(inputs) > _BEFORE_LABELS:
        return type(self).forward(self, *inputs, **options)
    keeps_all = isinstance(keep := options.get("logits_to_keep", 0), int) and keep == 0
    if labels is None or not self.training or not keeps_all or not _is_plain(self.lm_head):
        return type(self).forward(self, *inputs, labels=labels, **options)
    options.pop("logits_to_keep", None)
    loss_options = {
        name: options.pop(name, None) for name in ("num_items_in_batch", "shift_labels", "ignore_index", "return_dict")
    }
    outputs = self.model(*inputs, **options)
    ignored = _IGNORED if loss_options["ignore_index"] is None else loss_options["ignore_index"]
    targets = loss_options["shift_labels"]
    if targets is None:  # a token's target is the next token, and the last has none
        targets = pad(labels, (0, 1), value=ignored)[..., 1:]
    tokens = loss_options["num_items_in_batch"]
    hidden = outputs.last_hidden_state
    loss = linear_cross_entropy(
        hidden.flatten(0, -2),
        self.lm_head.weight,
        targets.to(hidden.device).flatten(),  # shift_labels may have any shape, as in ForCausalLMLoss
        ignore_index=ignored,
        reduction="mean" if tokens is None else "sum",
        # Gradients of fp16 logits that are made in forward lack the scaler's factor, and most of them are 0
        gradients_in_forward=(autocast_dtype(hidden) or hidden.dtype) != torch.float16,
    )
    result = CausalLMOutputWithPast(
        loss=loss if tokens is None else loss / torch.as_tensor(tokens, device=loss.device),
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )
    if loss_options["return_dict"] is not False:
        return result
    loss, *others = result.to_tuple()  # without what is None, so the cache would stand where callers look for logits
    return loss, None, *others


def _is_plain(head: Any) -> bool:
    """Whether a head is its weight's product and nothing else: adapters, biases and hooks need the head itself."""
    return (
        type(head) is torch.nn.Linear
        and getattr(head, "bias", None) is None
        and has_own_forward(head)
        and not has_hooks(head)
    )
