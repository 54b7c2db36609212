"""The pictures of the demo that sees: what they show is what is asked, and the blind ones show nothing."""

import importlib.util
import json
import math
import random
from pathlib import Path

from PIL import Image

TOOL = Path(__file__).parents[2] / "tools" / "make_vision_demo.py"


def test_the_most_saturated_pixels_have_the_colour_that_is_the_answer_and_blind_pictures_are_grey(tmp_path):
    spec = importlib.util.spec_from_file_location("make_vision_demo", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.write_pictures(tmp_path, "test", 40, random.Random(3))
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    assert [sum(row["answer"] == colour for row in rows) for colour in tool.COLOURS] == [10] * 4
    for row in rows:
        pixels = Image.open(tmp_path / row["images"][0]).getcolors(maxcolors=10)
        square = max((colour for _, colour in pixels), key=lambda colour: max(colour) - min(colour))
        off = {name: math.dist(square, shade) for name, shade in tool.COLOURS.items()}
        assert min(off, key=off.get) == row["answer"]
    blind = [json.loads(line) for line in (tmp_path / "blind_test.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in blind] == [row["answer"] for row in rows]
    assert {row["images"][0] for row in blind} == {"grey.png"}
    assert Image.open(tmp_path / "grey.png").getcolors() == [(56 * 56, (128, 128, 128))]
