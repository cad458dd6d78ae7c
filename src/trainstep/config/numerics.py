"""The config of `trainstep numerics`: one model in one precision, compared with a reference."""

from dataclasses import dataclass, field

from trainstep.config.fields import check_choices, described
from trainstep.config.model import ModelConfig, UserModel, size_names
from trainstep.config.run import ATTENTIONS, DEVICES, PRECISIONS, RunConfig

REFERENCES = ("auto", "fp64", "fp32")
_MODEL_HELP = (
    "toy: two linear layers with a LayerNorm between; "
    f"sizes: {', '.join(size_names())}; or your own: package.module:function"
)
_TOY_FUNCTION = "trainstep.training.toy:build"


@dataclass(frozen=True, kw_only=True)
class ToyModel:
    """The textbook example of autocast: fc1, relu, LayerNorm, fc2, without biases."""

    name: str = "toy"


@dataclass(frozen=True, kw_only=True)
class NumericsConfig:
    """A model, a precision, and the reference that it is compared with. ValueError names the field and the remedy."""

    model: ModelConfig | UserModel | ToyModel = field(metadata={"help": _MODEL_HELP})
    precision: str = described("arithmetic that is compared with the reference", "bf16_autocast", PRECISIONS)
    batch_size: int = described("sequences in a batch", 4)
    context: int = described("tokens in a sequence", 256)
    attention: str = described("attention of the built-in model; the reference uses plain", "sdpa", ATTENTIONS)
    data: str = described(
        "tokens: random, stdlib (Python's own sources as bytes), or a file or folder of text", "random"
    )
    reference: str = described(
        "dtype of the reference for errors; auto: fp64, or fp32 where fp64 cannot run", "auto", REFERENCES
    )
    seed: int = described("seed of weights and batches", 0)
    device: str = described("device to run on", "cpu", DEVICES)
    warmups: int = described("steps before the timed steps; recorded separately", 3)
    steps: int = described("timed steps", 10)

    def __post_init__(self) -> None:
        check_choices(self)
        self.run()  # its fields are checked there

    def run(self, *, precision: str | None = None, attention: str | None = None) -> RunConfig:
        """The training step of this model, in its own or another precision, with its own or another attention."""
        model = UserModel(function=_TOY_FUNCTION) if isinstance(self.model, ToyModel) else self.model
        return RunConfig(
            model=model,
            precision=precision or self.precision,
            attention=attention or self.attention,
            batch_size=self.batch_size,
            context=self.context,
            data=self.data,
            seed=self.seed,
            device=self.device,
            warmups=self.warmups,
            steps=self.steps,
        )
