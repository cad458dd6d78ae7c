"""`trainstep plan`: will a step fit, by how much, and what to cut first; by formula, without a GPU and without torch."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from trainstep.cli.options import check_sync_options, with_fields
from trainstep.config.grid import grid_from_text
from trainstep.config.machine import gpu_named
from trainstep.config.model import UserModel
from trainstep.config.parallel import SyncConfig
from trainstep.config.parsing import build
from trainstep.config.plan import PlanConfig
from trainstep.config.run import RunConfig
from trainstep.costs.strategies import YARDSTICK

_MOST_STEPS = 200


@with_fields(PlanConfig)
def plan(
    *,
    gpu: str | None = None,
    gpu_memory_gib: float | None = None,
    grade: Path | None = None,
    terms: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    **fields: str | None,
) -> int:
    """Predict the memory of a training step by formula: at each moment, by category, and whether it fits on a GPU.

    Nothing runs, and no GPU is needed. The step is replayed tensor by tensor, with the rules of torch's allocator, for every
    precision, attention, compilation, recomputation, capture and parallel strategy of trainstep. Lists compare steps: one row each.
    A model of your own is traced first, which needs torch and no memory.

    Exit codes: 0 it fits (of several steps: one of them), or no GPU was named; 1 it does not fit; 2 bad input.

    Examples:

        trainstep plan --model 8B --context 32768 --ranks 2 --gpu h200

        trainstep plan --model xl --gpu a100-sxm4-80gb --batch-size 1,2,4,8 --recompute none,selective,block

        trainstep plan --model 2.7B --ranks 8 --sync bucketed,sharded_flat,fsdp --gpu-memory-gib 24 --precision bf16_autocast

        trainstep plan --model my_package.my_module:build --context 4096 --gpu h200

        trainstep plan --model medium --terms

        trainstep plan --grade results/h200

    Parameters
    ----------
    gpu
        The GPU that it should fit on: h200, h100, a100-sxm4-80gb, rtx-4090...
    gpu_memory_gib
        Its memory in GiB, for a GPU that is not in the list, or for a part of one.
    grade
        A file of records or a folder of them: predict each measured step anew and compare. Prints Markdown.
    terms
        Also print the formula of each tensor that forward keeps, with its source.
    json
        Print JSON, which begins with `answer`; sizes in bytes.
    """
    if grade is not None:
        given = [
            name
            for name, value in {"gpu": gpu, "gpu_memory_gib": gpu_memory_gib, **fields}.items()
            if value is not None
        ]
        if given or terms:
            raise ValueError(
                f"{(given or ['terms'])[0]}: has no effect on --grade, whose records say what was run; leave it out"
            )
        return _show_grades(grade, as_json=json)
    memory_bytes = _gpu_memory_bytes(gpu, gpu_memory_gib)
    points = _points(fields)
    if terms and len(points) > 1:
        raise ValueError("terms: are those of one step; give one value for each option")
    configs = [build(PlanConfig, point, where="plan") for point in points]

    from trainstep.plan.prediction import cuts, predict
    from trainstep.report.plan.prediction import Planned

    trace = _tracer() if any(isinstance(config.run.model, UserModel) for config in configs) else None
    predictions = [predict(config, gpu_memory_bytes=memory_bytes, trace=trace) for config in configs]
    name = gpu if gpu_memory_gib is None else None
    planned = [
        Planned(prediction=prediction, gpu=name, cuts=cuts(prediction) if len(configs) == 1 else ())
        for prediction in predictions
    ]
    _show(planned, _varied(points), terms=terms, as_json=json)
    return 1 if all(prediction.fits is False for prediction in predictions) else 0


def _tracer() -> Callable[[RunConfig], Any]:
    """What traces models of the user's own. It imports torch, and their code with it."""
    from trainstep.config.import_path import search_current_folder
    from trainstep.training.trace import Tracer

    search_current_folder()
    tracer = Tracer()

    def trace(run: RunConfig) -> Any:
        with redirect_stdout(sys.stderr):  # what the user's code prints is no part of the answer
            return tracer(run)

    return trace


def _gpu_memory_bytes(gpu: str | None, gpu_memory_gib: float | None) -> int | None:
    if gpu_memory_gib is not None:
        if not 0 < gpu_memory_gib <= 2**20:
            raise ValueError(f"gpu_memory_gib: must be a positive number of GiB, not {gpu_memory_gib:g}")
        return round(gpu_memory_gib * 2**30)
    return None if gpu is None else gpu_named(gpu).memory_bytes


def _points(fields: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """The flat values of each step."""
    options = grid_from_text(dict(fields))
    grid = {"model": ["small"], **options}
    if "sync" not in options:
        grid["sync"] = [YARDSTICK if all(ranks == 1 for ranks in grid.get("ranks", [1])) else SyncConfig().name]
    elif all(ranks == 1 for ranks in grid.get("ranks", [1])) and grid["sync"] not in ([None], [YARDSTICK]):
        raise ValueError("sync: has no effect on one rank; add --ranks 2 or more")
    check_sync_options(options, grid["sync"])
    grid["sync"] = [YARDSTICK if name is None else name for name in grid["sync"]]
    count = 1
    for values in grid.values():
        count *= len(values)
    if count > _MOST_STEPS:
        raise ValueError(
            f"plan: {count:,} steps are too many to compare; give fewer values, {_MOST_STEPS} steps at most"
        )
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def _varied(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The values of each step that differ among the steps."""
    names = [name for name in points[0] if len({str(point[name]) for point in points}) > 1]
    return [{name: point[name] for name in names} for point in points]


def _show(planned: Sequence[Any], points: Sequence[Mapping[str, Any]], *, terms: bool, as_json: bool) -> None:
    from trainstep.report.kit.answer import plain_answers, print_answers
    from trainstep.report.kit.visible import ascii_json
    from trainstep.report.plan.prediction import comparison_table, plain, plan_answer, plan_tables, terms_table

    answers = [plan_answer(planned[0])] if len(planned) == 1 else []
    if as_json:
        rows = [
            {**plain(item), **({"options": point} if point else {})}
            for item, point in zip(planned, points, strict=True)
        ]
        extra = {"terms": terms_table(planned[0].prediction).raw} if terms else {}
        print(ascii_json({"answer": plain_answers(answers), "rows": rows, **extra}, indent=1))
        return
    from trainstep.report.kit.terminal import print_tables

    print_answers(answers, sys.stdout)
    tables = plan_tables(planned[0]) if answers else [comparison_table(planned, points)]
    if terms:
        tables.append(terms_table(planned[0].prediction))
    print_tables(tables, [], sys.stdout)


def _show_grades(path: Path, *, as_json: bool) -> int:
    """Grade a file of records, or every *.jsonl of a folder, and print it. ValueError if nothing in it can be graded."""
    # Only grading reads records.
    from trainstep.cli.streams import outliving_reader
    from trainstep.plan.grade import grade_records
    from trainstep.records.store import Store
    from trainstep.report.plan.grade import FiledGrade, grade_answer, grade_tables, plain, refusal_lines

    if not path.exists():
        raise ValueError(f"grade: {path} is neither a file of records nor a folder with some")
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    with outliving_reader(sys.stderr):
        print(
            f"predicting the steps of {len(files)} files of records anew, about ten a second",
            file=sys.stderr,
            flush=True,
        )
    grades, refusals = list[FiledGrade](), dict[str, int]()
    for file in files:
        graded, refused = grade_records(Store(file).read())
        grades += [FiledGrade(file=file.stem, grade=grade) for grade in graded]
        for reason, count in refused.items():
            refusals[reason] = refusals.get(reason, 0) + count
    if not grades:
        reason = next(
            iter(refusals), "a step on a GPU with its peaks, as bench, profile, memory and parallel record them"
        )
        raise ValueError(f"grade: {path} holds no step that can be graded: {reason}")
    answer = grade_answer(grades)
    if as_json:
        from trainstep.report.kit.answer import plain_answers
        from trainstep.report.kit.visible import ascii_json

        rows = [plain(item) for item in grades]
        print(ascii_json({"answer": plain_answers([answer]), "rows": rows, "refused": refusals}, indent=1))
        return 0
    from trainstep.report.kit.frames import markdown

    sys.stdout.write(markdown(grade_tables(grades), [answer]))
    for line in refusal_lines(refusals):
        print(f"\n{line}")
    return 0
