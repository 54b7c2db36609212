"""Measure a model on a benchmark: `torchrun --nproc_per_node 2 -m spmd_rl.evaluate --model DIR --benchmark FILE`.

Without torchrun it is one process.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from spmd_rl.config.check_serving import SUMMARY, evaluation_problems, weights_dtype
from spmd_rl.config.loading import load, load_dataset_config
from spmd_rl.config.model_directory import find_model
from spmd_rl.config.redact import hidden
from spmd_rl.config.serving import EvaluateConfig, of_evaluation
from spmd_rl.data.image_reader import ImageReader
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.sources.few_shot import read_shots
from spmd_rl.data.sources.prompts import Loaded, load_dataset
from spmd_rl.data.tokens import chat_template, fingerprint, load_tokenizer
from spmd_rl.distributed.environment import size_from_environment
from spmd_rl.errors import ConfigError, Problem, refuse
from spmd_rl.evaluation import report
from spmd_rl.evaluation.benchmark import Benchmark, Line, ask, asked, check_asked, compare, measure
from spmd_rl.models.model_shape import ModelShape, read_model_shape
from spmd_rl.program import run_rank
from spmd_rl.runtime.process import Started, launch
from spmd_rl.runtime.startup import names_split
from spmd_rl.serve import ServeSpec, Serving

DESCRIPTION = """\
Ask a model the questions of a benchmark and grade its answers. Every setting below can also stand in a YAML file.

  --config FILE   the YAML file; without it the defaults below hold
"""
NEEDED = {"model": "name a Hugging Face directory or a checkpoint with --model DIR"}
_BY_ITSELF = "evaluate it by itself, and name its output directory here"


@dataclass(frozen=True)
class Evaluation:
    """Settings that have passed all checks."""

    settings: EvaluateConfig
    spec: ServeSpec
    output: Path
    names: dict[str, str]
    """Name under which the ranks keep a benchmark's prompts -> the benchmark's name."""
    earlier: Path | None
    """The baseline, when it is an earlier evaluation."""


def configure(arguments: list[str]) -> Evaluation:
    """Everything that can be wrong before any rank has met another, without torch. Raises ValueError: all problems."""
    # torchrun itself stumbles over --n, which could begin several of its own options.
    arguments = ["--samples" + word[3:] if word == "--n" or word.startswith("--n=") else word for word in arguments]
    settings = load(EvaluateConfig, arguments, NEEDED, DESCRIPTION)
    found = find_model("model", settings.model)
    directory = found.config
    shape = read_model_shape(directory, "model")
    config = of_evaluation(settings, directory, weights_dtype(directory, settings.dtype))
    problems = evaluation_problems(settings, shape, config.model.dtype, size_from_environment())
    names: dict[str, str] = {}
    for text in settings.benchmark:
        try:
            names_split(load_dataset_config(text, "benchmark").name or text, names)
        except ConfigError as error:
            problems += error.problems
    models, earlier = (found.weights,), None
    if settings.baseline is not None:
        if (Path(settings.baseline) / SUMMARY).is_file():
            earlier = Path(settings.baseline)
            try:
                for name in names.values():
                    report.read_lines(earlier, name)
            except ConfigError as error:
                problems += error.problems
        else:
            try:
                other = find_model("baseline", settings.baseline)
            except ConfigError as error:
                problems += error.problems
            else:
                models += (other.weights,)
                problems += _other_model(other.config, shape)
    refuse(problems)
    max_tokens = settings.max_prompt_length + settings.max_response_length
    output = Path(settings.output or _new_directory(settings, names))
    spec = ServeSpec(config, shape, models, max_tokens, settings.platform, output)
    return Evaluation(settings, spec, output, names, earlier)


def _other_model(baseline: str, shape: ModelShape) -> Sequence[Problem]:
    """Return what keeps a second model from being evaluated by the same engines."""
    try:
        other = read_model_shape(baseline, "baseline")
    except ConfigError as error:
        return error.problems
    if other == shape:
        return []
    met = f"a {other.architecture} of {other.layers} layers with another config.json than the model"
    return [Problem("baseline", baseline, met, _BY_ITSELF)]


def _new_directory(settings: EvaluateConfig, names: dict[str, str]) -> str:
    stem = "-".join([Path(settings.model).resolve().name, *names.values()])
    number = 1
    while (found := Path("evaluations") / (stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return str(found)


def run(evaluation: Evaluation, started: Started) -> None:
    """Live one rank's life."""
    run_rank(Serving(evaluation.spec, partial(_read, evaluation), partial(control, evaluation)), started)


def _read(evaluation: Evaluation, tokenizer: Any, images: ImageReader | None) -> tuple[dict[str, Any], list[str]]:
    """Read all questions, on every rank: only their row numbers travel."""
    settings, config = evaluation.settings, evaluation.spec.config
    for model in () if len(evaluation.spec.models) == 1 else (settings.baseline or "",):
        other = load_tokenizer(find_model("baseline", model).config, settings.trust_remote_code, "baseline")
        if fingerprint(other) != fingerprint(tokenizer) or chat_template(other) != chat_template(tokenizer):
            met = "its tokenizer or chat template is not the model's"
            raise ConfigError(Problem("baseline", model, met, _BY_ITSELF))
    loaded: dict[str, Loaded] = {}
    for split, text in zip(evaluation.names, settings.benchmark, strict=True):
        dataset, data, seed = load_dataset_config(text), config.data, settings.seed
        shots = read_shots(settings.shots, settings.shots_source, dataset, data, seed) if settings.shots else []
        loaded[split] = load_dataset(dataset, data, tokenizer, seed, "eval", settings.limit, images, shots)
    for text, one in zip(settings.benchmark, loaded.values(), strict=True):
        if not one.prompts:
            raise ConfigError(Problem("benchmark", text, "there is no question in it", "name another"))
    if evaluation.earlier is not None:
        for name, one in zip(evaluation.names.values(), loaded.values(), strict=True):
            earlier = asked(report.read_lines(evaluation.earlier, name))
            check_asked(earlier, [(prompt.index, prompt.text, prompt.answer) for prompt in one.prompts])
    prompts = {split: one.prompts for split, one in loaded.items()}
    return prompts, [note for one in loaded.values() for note in one.notes]


def control(evaluation: Evaluation, serving: Serving) -> None:
    """Evaluate, as rank 0 controls it."""
    settings, output, inputs = evaluation.settings, evaluation.output, serving.rank.inputs
    for note in inputs.notes:
        print(hidden(note), flush=True)
    benchmarks = [Benchmark(name, split, len(inputs.prompts[split])) for split, name in evaluation.names.items()]
    output.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"settings": hidden(asdict(settings)), "dtype": evaluation.spec.config.model.dtype}
    summary |= {"ranks": serving.rank.world.size, "benchmarks": {}}
    baseline: dict[str, list[Line]] = {}
    for benchmark in benchmarks:
        if evaluation.earlier is not None:
            baseline[benchmark.name] = report.read_lines(evaluation.earlier, benchmark.name)
    # The baseline first: the model's own numbers are then the last that are printed.
    for model in reversed(evaluation.spec.models):
        serving.servers.load(model)
        is_baseline = model != evaluation.spec.models[0]
        directory = output / "baseline" if is_baseline else output
        print(
            f"{'baseline' if is_baseline else 'model'} {settings.baseline if is_baseline else settings.model}",
            flush=True,
        )
        for benchmark in benchmarks:
            lines = _evaluate(settings, serving, benchmark)
            report.write_lines(directory, benchmark.name, lines)
            if page := report.write_page(directory, benchmark.name, lines):
                print(f"questions with their pictures  {page}", flush=True)
            if is_baseline:
                baseline[benchmark.name] = lines
                continue
            numbers: dict[str, Any] = measure(lines)
            numbers["accuracy_low"], numbers["accuracy_high"] = report.accuracy_interval(lines)
            if benchmark.name in baseline:
                compared = compare(baseline[benchmark.name], lines)
                changed = report.write_lines(output, f"changed_{benchmark.name}", compared.changed())
                print(report.comparison_text(settings.baseline, compared, changed), flush=True)
                numbers["comparison"] = report.comparison_numbers(compared)
            summary["benchmarks"][benchmark.name] = {"questions": len(lines)} | numbers
    report.write_summary(output, summary)
    print(f"everything is in {output}", flush=True)


def _evaluate(settings: EvaluateConfig, serving: Serving, benchmark: Benchmark) -> list[Line]:
    sampling = SamplingParams(
        temperature=settings.temperature,
        max_tokens=settings.max_response_length,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop=settings.stop,
        stop_token_ids=settings.stop_token_ids,
    )
    started = time.perf_counter()
    with report.progress(benchmark.name, serving.rank.world.size // settings.rollout.tensor) as heard:
        serving.worker.rollouts.heard = heard
        lines, waited = ask(serving.servers.ranks, benchmark, 0, settings.samples, sampling)
    print(report.result_text(benchmark.name, lines, time.perf_counter() - started, waited), flush=True)
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Run the command; the exit status is 2 where the user can fix what is wrong."""
    launch(configure, run, arguments)


if __name__ == "__main__":
    main()
