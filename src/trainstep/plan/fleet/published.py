"""Tables of training throughput that others published, and what plan predicts of their rows.

    table = read_table(Path("results/published/torchtitan_h100.toml"))
    grade = grade_table(table)
    grade.factor, grade.median, grade.worst, grade.tau

A file says where its figures are from (repository, file, commit), on what they were measured, and what is unknown. A row has the
options of the step of trainstep that is nearest to the measured run, and the tokens per second of a GPU.

One factor a table is fitted, on its smallest row: that with the fewest GPUs, then parameters, then tokens in a sequence. It holds
what other software and another machine cost. All other rows are predicted: time x factor.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from trainstep.config.machine import gpu_named
from trainstep.config.parsing import build
from trainstep.config.plan import FleetConfig, PlanConfig
from trainstep.plan.fleet.fleet_time import fleet_time
from trainstep.plan.fleet.model_parallel import ModelParallelStep, model_parallel_time
from trainstep.plan.fleet.other_models import complex_rotation
from trainstep.plan.fleet.topology import Topology, topology_of
from trainstep.plan.model_ops import model_of
from trainstep.plan.time.calibration import Calibration, calibration_for, scaled_to
from trainstep.plan.time.step_kernels import step_kernels

_LINKS = ("network_gbs", "rails", "nvlink_gbs")
_OWN = (
    *("reduces_each_micro_batch", "rotary", "tensor_parallel", "pipeline_parallel", "virtual_stages", "global_batch"),
    "overlaps_messages",
)
"""Options of rows that no step of trainstep has."""
_NEEDED = (
    "title",
    "repository",
    "file",
    "commit",
    "url",
    "hardware",
    "measured",
    "unknown",
    "machine",
    "models",
    "table",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured row: `options` of its step, without the model's shape."""

    model: str
    gpus: int
    options: Mapping[str, Any]
    tokens_per_s: float
    """Tokens per second of one GPU."""


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """A file of figures. `words`: its texts: title, repository, file, commit, url, hardware, measured."""

    name: str
    words: Mapping[str, str]
    unknown: tuple[str, ...]
    machine: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]]
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class GradedRow:
    """`predicted`: tokens a second of a GPU, before the factor. `fitted`: whether the factor is from this row.

    `flops`: of a token, by which a rate becomes a utilisation. `size`: GPUs, parameters and tokens of a sequence.
    """

    row: Row
    predicted: float
    flops: float
    size: tuple[int, int, int]
    fitted: bool = False


@dataclass(frozen=True, kw_only=True)
class TableGrade:
    """A table's rows with their predictions. `factor`: measured time over predicted, of the smallest row."""

    table: PublishedTable
    rows: tuple[GradedRow, ...]
    factor: float

    def tokens_per_s(self, graded: GradedRow) -> float:
        """The prediction with the factor."""
        return graded.predicted / self.factor

    def error(self, graded: GradedRow) -> float:
        """Predicted over measured step time, less 1."""
        return graded.row.tokens_per_s / self.tokens_per_s(graded) - 1

    @property
    def others(self) -> list[GradedRow]:
        """The rows that the factor was not fitted on."""
        return [graded for graded in self.rows if not graded.fitted]

    @property
    def median(self) -> float:
        return median(abs(self.error(graded)) for graded in self.others)

    @property
    def worst(self) -> GradedRow:
        return max(self.others, key=lambda graded: abs(self.error(graded)))

    @property
    def tau(self) -> float:
        """Kendall's tau of tokens a second."""
        return kendall_tau([(graded.row.tokens_per_s, graded.predicted) for graded in self.rows])

    @property
    def utilisation_tau(self) -> float:
        """Kendall's tau of model FLOPs per second. It is harder to reach: tokens per second mostly follow the models' sizes."""
        return kendall_tau(
            [(graded.flops * graded.row.tokens_per_s, graded.flops * graded.predicted) for graded in self.rows]
        )


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b of pairs (M. G. Kendall, The treatment of ties in ranking problems, 1945). NaN if all of one side are equal.

    (concordant - discordant) / sqrt((pairs - ties in x) (pairs - ties in y))
    """
    concordance = ties_x = ties_y = count = 0
    for (x, y), (other_x, other_y) in combinations(pairs, 2):
        count += 1
        ties_x += x == other_x
        ties_y += y == other_y
        concordance += ((x > other_x) - (x < other_x)) * ((y > other_y) - (y < other_y))
    scale = ((count - ties_x) * (count - ties_y)) ** 0.5
    return concordance / scale if scale else float("nan")


def read_table(path: Path) -> PublishedTable:
    """A file's figures. ValueError names what is wrong with it."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"grade: {path} is no TOML: {error}") from None
    missing = [name for name in _NEEDED if name not in content]
    if missing:
        raise ValueError(f"grade: {path} has no {missing[0]}; a published table says where its figures are from")
    columns, common = content["table"]["columns"], content.get("step", {})
    rows = []
    for values in content["table"]["rows"]:
        options = {**common, **dict(zip(columns, values, strict=True))}
        model, gpus = options.pop("model"), options.pop("gpus")
        measured = _tokens_per_s(options, content["models"][model], content["machine"])
        rows.append(Row(model=model, gpus=gpus, options=options, tokens_per_s=measured))
    return PublishedTable(
        name=path.stem,
        words={name: content[name] for name in _NEEDED[:7]},
        unknown=tuple(content["unknown"]),
        machine=content["machine"],
        models=content["models"],
        rows=tuple(rows),
    )


def _tokens_per_s(options: dict[str, Any], shape: Mapping[str, Any], machine: Mapping[str, Any]) -> float:
    """Takes the measured figure out of a row's options: tokens a second, utilisation, or TFLOP/s with recomputation."""
    if "tokens_per_s" in options:
        return float(options.pop("tokens_per_s"))
    context = options["context"]
    if "mfu" in options:
        rate = float(options.pop("mfu") * machine["mfu_tflops"] * 1e12)
        return rate / flops_per_token(shape, context)
    return float(options.pop("tflops")) * 1e12 / flops_per_token(shape, context, recomputes=True)


def flops_per_token(shape: Mapping[str, Any], context: int, *, recomputes: bool = False) -> float:
    """FLOPs of a whole step for a token, all of attention's scores counted. l: layers, h: width, s: context, V: vocabulary.

    72 l h^2 (1 + s / 6 h + V / 12 l h), or with blocks computed again 96 l h^2 (1 + s / 6 h + V / 16 l h) (arXiv:2104.04473, 5.1).
    """
    width, layers, vocabulary = shape["d_model"], shape["layers"], shape["vocab_size"]
    passes = 4 if recomputes else 3
    blocks = 24 * layers * width**2 * (1 + context / (6 * width))
    return float(passes * blocks + 6 * width * vocabulary)


def grade_table(table: PublishedTable) -> TableGrade:
    """Predict every row. ValueError for a row that has no formulas."""
    calibration = _calibration(table.machine)
    graded = [_predicted(table, row, calibration) for row in table.rows]
    smallest = min(graded, key=lambda item: item.size)
    return TableGrade(
        table=table,
        rows=tuple(replace(item, fitted=item is smallest) for item in graded),
        factor=smallest.predicted / smallest.row.tokens_per_s,
    )


def _calibration(machine: Mapping[str, Any]) -> Calibration:
    """The GPU's calibration; if the table states other rates for it, H200's efficiency at these rates."""
    spec = gpu_named(machine["gpu"])
    changes: dict[str, Any] = {}
    if "memory_tb_s" in machine:
        changes["memory_bytes_per_s"] = machine["memory_tb_s"] * 1e12
    if "peak_tflops" in machine:
        factor = machine["peak_tflops"] * 1e12 / spec.peak_flops["bf16"]
        changes["peak_flops"] = {dtype: factor * peak for dtype, peak in spec.peak_flops.items()}
    calibration = scaled_to(replace(spec, **changes)) if changes else calibration_for(spec)
    assert calibration is not None
    # These steps are of 2021 to 2024: torch's own attention was flash's on all GPUs.
    return replace(
        calibration, attention={key: speed for key, speed in calibration.attention.items() if key[0] != "sdpa"}
    )


def _predicted(table: PublishedTable, row: Row, calibration: Calibration) -> GradedRow:
    options = dict(row.options)
    nodes = max(1, row.gpus // table.machine["gpus_per_node"])
    links = {name: table.machine[name] for name in _LINKS if name in table.machine}
    fleet = FleetConfig(nodes=nodes, **links)
    spec = gpu_named(table.machine["gpu"])
    topology = topology_of(fleet, ranks=row.gpus, calibration=calibration, spec=spec)
    taken = {name: options.pop(name) for name in _OWN if name in options}
    values = {"model": "small", **table.models[row.model], **options}
    if "tensor_parallel" in taken:
        config: PlanConfig = build(PlanConfig, values, where="grade")
        predicted = _model_parallel(config, row.gpus, taken, topology, calibration)
    else:
        config = build(PlanConfig, {**values, "ranks": row.gpus, "nodes": nodes}, where="grade")
        predicted = fleet_time(
            config,
            topology,
            calibration,
            reduces_each=taken.get("reduces_each_micro_batch", False),
            kernels_of=complex_rotation if taken.get("rotary") == "complex" else step_kernels,
        ).time.tokens_per_s
    context = config.run.context
    return GradedRow(
        row=row,
        predicted=predicted / row.gpus,
        flops=flops_per_token(table.models[row.model], context),
        size=(row.gpus, model_of(config.run).parameters, context),
    )


def _model_parallel(
    config: PlanConfig, gpus: int, taken: Mapping[str, Any], topology: Topology, calibration: Calibration
) -> float:
    step = ModelParallelStep(
        run=config.run,
        gpus=gpus,
        tensor=taken["tensor_parallel"],
        pipeline=taken["pipeline_parallel"],
        virtual_stages=taken["virtual_stages"],
        global_batch=taken["global_batch"],
        overlaps=taken.get("overlaps_messages", False),
    )
    return step.global_batch * config.run.context / model_parallel_time(step, topology, calibration).step_s
