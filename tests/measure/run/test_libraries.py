"""The callbacks in the real trainers, where these are installed: Hugging Face's needs accelerate too."""

from pathlib import Path
from typing import Any

import pytest
import torch

import trainstep
from trainstep.records.store import Store

pytestmark = pytest.mark.slow


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(16) + index
        return {"input_ids": tokens, "labels": tokens}


def test_a_trainer_of_transformers_is_watched(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 128,
    }
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=8,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    out = tmp_path / "r.jsonl"
    transformers.Trainer(
        model=transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)),
        args=arguments,
        train_dataset=Tokens(),
        callbacks=[trainstep.hugging_face_callback(out=out, page=False, quiet=True, inspect_every=5)],
    ).train()
    records = Store(out).read()
    assert records[-1].fact("steps_seen") == 8
    assert sum(record.fact("backward_passes") for record in records) == 16
    assert records[-1].samples["data_wait"].values[-1] > 0
    assert records[-1].samples["forward"].values[-1] > 0


def test_a_trainer_of_lightning_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lightning = pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(8, 8)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.model(batch[0]).square().mean()  # type: ignore[no-any-return]

        def validation_step(self, batch: Any, index: int) -> None:
            self.model(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(96, 8)), batch_size=8)
    out = tmp_path / "r.jsonl"
    lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[trainstep.lightning_callback(out=out, page=False, quiet=True, inspect_every=0)],
    ).fit(Module(), data, data)
    (record,) = Store(out).read()
    assert record.fact("steps_seen") == 12
    assert record.samples["forward"].values[-1] > 0, "its module's own forward is never called"
