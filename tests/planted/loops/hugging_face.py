"""A training loop by Hugging Face's Trainer, of its GPT-2: `python hugging_face.py --plant eager_attention`."""

import os
import tempfile
from typing import Any

import torch
from model import Sizes
from options import options
from plants import TINY_BUCKET_MB, Samples, TooLarge, activation, optimizer
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, masking_utils

asked = options()
if not asked.plain:  # a clean loop waits for nothing, and this check reads a value of each batch
    assert hasattr(masking_utils, "find_packed_sequence_indices"), "Transformers has another name for it"
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
plants, device = asked.plants, asked.device
sizes = Sizes.of(device, plants, plain=asked.plain)
too_large = TooLarge(device) if "fragmenting" in plants else None


class WithFeatures(torch.nn.Module):
    """The language model; features that come with the tokens are added to their embeddings."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.features = torch.nn.Linear(sizes.features, sizes.width) if sizes.features else None

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, features: torch.Tensor | None = None) -> Any:
        if self.features is None or features is None:
            return self.model(input_ids=input_ids, labels=labels)
        embedded = self.model.transformer.wte(input_ids) + self.features(features)
        return self.model(inputs_embeds=embedded, labels=labels)


class AsksForMemory(TrainerCallback):  # type: ignore[misc]
    """Asks for the buffer that does not fit, if planted."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if too_large is not None:
            too_large.ask()


class ReadingTrainer(Trainer):  # type: ignore[misc]
    """Reads each loss, if planted."""

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        loss = super().training_step(*arguments, **options)
        if "item" in plants:
            losses.append(loss.item())
        return loss


losses: list[float] = []
config = GPT2Config(
    vocab_size=sizes.vocabulary,
    n_positions=sizes.context,
    n_embd=sizes.width,
    n_layer=sizes.layers,
    n_head=sizes.heads,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    use_cache=False,
    attn_implementation="eager" if "eager_attention" in plants else "sdpa",
)
model = WithFeatures(GPT2LMHeadModel(config))
for layer, block in enumerate(model.model.transformer.h):
    block.mlp.act = activation(plants, layer, device)
tiny = {"ddp_bucket_cap_mb": TINY_BUCKET_MB} if "tiny_buckets" in plants else {}
loader = {} if asked.plain else {f"dataloader_{name}": value for name, value in asked.loader.items()}
sync = {"sync_each_batch": True} if "accumulation_sync" in plants else {}
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=asked.steps,
        per_device_train_batch_size=sizes.batch,
        gradient_accumulation_steps=asked.micro_batches,
        accelerator_config={"gradient_accumulation_kwargs": sync, "non_blocking": device == "cuda" and not asked.plain},
        use_cpu=device == "cpu",
        ddp_backend=("gloo" if device == "cpu" else "nccl") if "RANK" in os.environ else None,
        ddp_find_unused_parameters=False if "RANK" in os.environ else None,
        bf16=device == "cuda" and "fp32" not in plants,
        tf32=None if device == "cpu" or asked.plain else "fp32" not in plants,
        **loader,
        logging_steps=10_000,
        logging_nan_inf_filter=False,  # else it reads each loss
        max_grad_norm=0.0,
        report_to=[],
        torch_compile=asked.compile,
        save_strategy="no",
        disable_tqdm=True,
        **tiny,
    )
    trainer = ReadingTrainer(
        model=model,
        args=arguments,
        train_dataset=Samples(
            plants, context=sizes.context, vocabulary=sizes.vocabulary, features=sizes.features, batch=sizes.batch
        ),
        callbacks=[AsksForMemory()],
        optimizers=(None if asked.plain else optimizer(model.parameters(), plants), None),
    )
    trainer.train()
