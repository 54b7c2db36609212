"""A rank decodes a prompt's pictures once, and its samples carry none of their pixels."""

import io

import pytest
from PIL import Image

from spmd_rl.config.data_config import DataConfig
from spmd_rl.data.image_reader import ImageReader
from spmd_rl.data.pictures import Picture
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.worker.image_store import ImageStore


def png(colour, size=(140, 84)):
    written = io.BytesIO()
    Image.new("RGB", size, colour).save(written, "PNG")
    return Picture(content=written.getvalue())


@pytest.fixture
def store(tiny_models):
    shape = read_model_shape(tiny_models["qwen2_5_vl"])
    reader = ImageReader(tiny_models["qwen2_5_vl"], shape.vision, DataConfig())
    prompts = []
    for pictures in ((png("red"),), (png("red", (84, 140)),), (), (png("red"), png("blue"))):
        grids = tuple(reader.grid(*reader_size) for reader_size in map(size, pictures))
        written = [token for _ in grids for token in (510, 512, 511)]
        token_ids = tuple(reader.expanded([7, *written, 9], grids))
        prompts.append(Prompt(len(prompts), token_ids, "", "", {}, pictures=pictures, grids=grids))
    return ImageStore(shape, {"train": prompts}, reader)


def size(picture):
    return Image.open(io.BytesIO(picture.content)).size


def test_pictures_are_decoded_once_and_none_of_their_pixels_travel_with_a_sample(store):
    assert store.of("train", 2) is None
    images = store.of("train", 0)
    assert store.of("train", 0) is images and store.of("train", 4) is images and store.decoded == 1
    assert images.fields.keys() == {"positions", "image_places", "image_grids", "prompt_row"}
    assert sum(field.nbytes for field in images.fields.values()) * 20 < images.pixels.nbytes


def test_two_pictures_of_one_colour_are_told_apart_by_their_shape(store):
    lying, standing, _, both = (store.of("train", row) for row in range(4))
    assert lying.pixels.equal(standing.pixels) and lying.digests != standing.digests
    assert both.digests[0] == lying.digests[0] != both.digests[1]
