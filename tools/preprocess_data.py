"""Prompts of a dataset as token ids, once and in parallel:

    python tools/preprocess_data.py --config configs/datasets/gsm8k.yaml:data/gsm8k --model DIR --output out.parquet

Training takes the output as it takes the raw file, `--data.source out.parquet`, with the same token ids; it refuses
what another tokenizer or template made. The pictures that prompts show stand in a directory beside it, out.pictures.
Everything that can be wrong with a row is found, counted and shown here.
"""

import argparse
import functools
import logging
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spmd_rl.config.data_config import DataConfig
from spmd_rl.config.loading import load_dataset_config
from spmd_rl.data.image_reader import ImageReader
from spmd_rl.data.pictures import decode
from spmd_rl.data.sources import prepared
from spmd_rl.data.sources.prompts import Encoded, encode, select, template_of, with_images
from spmd_rl.data.sources.questions import Question, Reading, read_questions
from spmd_rl.data.templates import Template
from spmd_rl.data.tokens import load_tokenizer
from spmd_rl.models.model_shape import read_model_shape

USER_ERROR = 2
_AT_ONCE = 512
_BARS = 10
_SHEET = 24
_BAR_WIDTH = 40


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    chosen = _arguments()
    try:
        _prepare(chosen)
    except ValueError as error:
        print(f"\npreprocess_data cannot go on:\n{error}\n", file=sys.stderr)
        sys.exit(USER_ERROR)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", required=True, help="a file of configs/datasets, FILE.yaml:PATH, or a bare source as data.source")
    add("--model", required=True, help="Hugging Face directory with the tokenizer")
    add("--output", type=Path, help="Parquet file to write; without it only the summary is made")
    add("--force", action="store_true", help="write over an existing output")
    add(
        "--contact-sheet",
        type=Path,
        metavar="FILE",
        help="write the pictures of the first prompts there, as one (.png)",
    )
    add("--images-per-prompt", type=int, default=DataConfig.images_per_prompt, help="as data.images_per_prompt")
    add("--image-min-pixels", type=int, help="as data.image_min_pixels")
    add("--image-max-pixels", type=int, help="as data.image_max_pixels")
    add("--image-urls", choices=("refuse", "fetch"), default="refuse", help="as data.image_urls: fetched once, here")
    add("--show", type=int, default=0, metavar="N", help="print the first N prompts as the model sees them")
    add("--split", choices=("train", "eval"), default="train", help="which of the dataset's two splits")
    add("--template", help="as data.template")
    add("--system", help="as data.system")
    add("--enable-thinking", choices=("true", "false"), help="as data.enable_thinking")
    add("--max-prompt-length", type=int, default=DataConfig.max_prompt_length, help="tokens; longer ones are dropped")
    add("--bad-rows", choices=("drop", "refuse"), default="drop", help="rows that cannot be used")
    add("--empty-answers", choices=("drop", "refuse"), default="drop", help="rows without an answer")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes; default: %(default)s")
    add("--seed", type=int, default=1, help="of problems generated, as run.seed")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the tokenizer")
    return parser.parse_args()


def _prepare(chosen: argparse.Namespace) -> None:
    output: Path | None = chosen.output
    if output is not None and output.exists() and not chosen.force:
        raise ValueError(f"--output {output}: it exists already; name another file, or add --force")
    if output is not None and (output.suffix != ".parquet" or not output.parent.is_dir()):
        raise ValueError(f"--output {output}: expected a .parquet file in a directory that exists")
    for name in ("workers", "images_per_prompt", "image_min_pixels", "image_max_pixels"):
        if (number := getattr(chosen, name)) is not None and number < 1:
            raise ValueError(f"--{name.replace('_', '-')} {number}: it must be 1 or more")
    dataset = load_dataset_config(chosen.config)
    data = DataConfig(
        source=dataset.source,
        template=chosen.template,
        system=chosen.system,
        enable_thinking=None if chosen.enable_thinking is None else chosen.enable_thinking == "true",
        max_prompt_length=chosen.max_prompt_length,
        bad_rows=chosen.bad_rows,
        empty_answers=chosen.empty_answers,
        images_per_prompt=chosen.images_per_prompt,
        image_min_pixels=chosen.image_min_pixels,
        image_max_pixels=chosen.image_max_pixels,
        image_urls=chosen.image_urls,
    )
    vision = read_model_shape(chosen.model).vision if dataset.image_column else None
    if vision is None and dataset.image_column:
        raise ValueError(
            f"--model {chosen.model}: it sees no pictures, and the data's column {dataset.image_column} has some"
        )
    if vision is None and chosen.contact_sheet:
        raise ValueError(
            f"--contact-sheet {chosen.contact_sheet}: the data shows no pictures; image_column in a file of "
            "configs/datasets names the column of them"
        )
    images = None if vision is None else ImageReader(chosen.model, vision, data)
    if prepared.is_prepared(dataset.source):
        raise ValueError(f"--config {chosen.config}: it is prepared already; name the raw file")
    tokenizer = load_tokenizer(chosen.model, chosen.trust_remote_code)
    template = template_of(dataset, data)
    encode(tokenizer, template, data, [])
    started = time.perf_counter()
    questions, reading = read_questions(dataset, data, template, chosen.seed, chosen.split, None, images)
    encoded = _encode(chosen, questions, template, data, tokenizer)
    if images is not None:
        encoded = [with_images(one, question, images) for one, question in zip(encoded, questions, strict=True)]
    seconds = time.perf_counter() - started
    kept = select(data, questions, encoded, reading)
    for number, (question, one) in enumerate(kept[: max(chosen.show, 0)]):
        _show(number, question, one)
    _summarize(reading, [len(one.token_ids) for _, one in kept], seconds)
    if images is not None:
        _summarize_pictures([question for question, _ in kept], images.vision.merge**2)
    if chosen.contact_sheet is not None:
        contact_sheet([question for question, _ in kept[:_SHEET]]).save(chosen.contact_sheet)
        print(f"\nwritten: {chosen.contact_sheet}, the pictures of the first {min(_SHEET, len(kept))} prompts")
    if output is not None:
        spelled = prepared.spelling(
            tokenizer, template, dataset.system if data.system is None else data.system, data.enable_thinking
        )
        prepared.write(output, [(question, one.text, one.token_ids) for question, one in kept], spelled)
        print(f"\nwritten: {output} ({output.stat().st_size / 2**20:.1f} MiB)")
        if any(question.pictures for question, _ in kept):
            print(f"         {prepared.pictures_beside(output)}, the pictures; the two go together")


# ---- in parallel

_encoder: Callable[[list[Any]], list[Encoded]] | None = None


def _work(chunk: list[Any]) -> list[Encoded]:
    assert _encoder is not None
    return _encoder(chunk)


def _encode(
    chosen: argparse.Namespace, questions: Sequence[Question], template: Template, data: DataConfig, tokenizer: Any
) -> list[Encoded]:
    global _encoder
    _encoder = functools.partial(encode, tokenizer, template, data)
    chunks = [
        [question.content for question in questions[start : start + _AT_ONCE]]
        for start in range(0, len(questions), _AT_ONCE)
    ]
    workers = min(chosen.workers, len(chunks))
    if workers == 1:
        return _with_progress(map(_work, chunks), questions)
    # Forked: a process that starts afresh takes seconds to load the tokenizer that it inherits here at once. Children
    # do nothing but spell and tokenize, in one thread.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        return _with_progress(pool.map(_work, chunks), questions)


def _with_progress(made: Iterator[list[Encoded]], questions: Sequence[Question]) -> list[Encoded]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    encoded: list[Encoded] = []
    columns = TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True) as progress:
        bar = progress.add_task("prompts", total=len(questions))
        for some in made:
            encoded += some
            progress.advance(bar, len(some))
    return encoded


# ---- what a person reads


def _show(number: int, question: Question, one: Encoded) -> None:
    print(f"---- {number}: {question.place}, {len(one.token_ids)} tokens; answer: {question.answer}")
    print(one.text)


def _summarize(reading: Reading, lengths: list[int], seconds: float) -> None:
    print(
        f"\n{reading.source}: {reading.rows} rows, {len(lengths)} prompts kept; read and tokenized in {seconds:.1f} s"
    )
    dropped = reading.dropped + Counter({"cannot be used": reading.bad.count})
    for reason, count in dropped.most_common():
        print(f"  dropped, {reason}: {count}")
    for note in reading.all_notes():
        print(f"  {note}")
    ordered = sorted(lengths)
    middle, late = (ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] for percent in (50, 95))
    print(f"tokens: {sum(lengths):,} in all; shortest {ordered[0]}, median {middle}, 95% {late}, longest {ordered[-1]}")
    step = max(1, -(-(ordered[-1] - ordered[0] + 1) // _BARS))
    bars = Counter((length - ordered[0]) // step for length in lengths)
    for bar in range(max(bars) + 1):
        first = ordered[0] + bar * step
        filled = "#" * -(-_BAR_WIDTH * bars[bar] // max(bars.values()))
        print(f"  {first:>6} to {first + step - 1:>6} {bars[bar]:>8} {filled}".rstrip())


def _summarize_pictures(questions: Sequence[Question], merged: int) -> None:
    """`merged`: patches that become one token."""
    counts = [sum(map(math.prod, question.grids)) for question in questions]
    pictures, patches = sum(len(question.pictures) for question in questions), sum(counts)
    print(
        f"pictures: {pictures:,}; patches: {patches:,} in all, {max(counts):,} in a prompt at most; image tokens: "
        f"{patches // merged:,} in all, {max(counts) // merged:,} in a prompt at most"
    )


def contact_sheet(questions: Sequence[Question], side: int = 160, columns: int = 6) -> Any:
    """Return one picture of those that questions show, each with the number of its row."""
    from PIL import Image, ImageDraw

    shown = [(question.index, decode(picture)) for question in questions for picture in question.pictures]
    line = 14
    sheet = Image.new("RGB", (columns * side, max(1, -(-len(shown) // columns)) * (side + line)), "white")
    for number, (row, image) in enumerate(shown):
        left, top = number % columns * side, number // columns * (side + line)
        image.thumbnail((side - 4, side - 4))
        sheet.paste(image, (left + 2, top + line))
        ImageDraw.Draw(sheet).text((left + 2, top + 1), f"row {row}", fill="black")
    return sheet


if __name__ == "__main__":
    main()
