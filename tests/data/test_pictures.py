"""Pictures are shown as people see them: upright, on white, of 8 bits; and found where a row says they are."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from spmd_rl.data.pictures import Picture, decode, pictures_of, size_of

COLOURS = Image.fromarray(np.random.RandomState(0).randint(0, 255, (40, 64, 3), dtype=np.uint8))


def saved(image, kind="PNG", **options):
    written = io.BytesIO()
    image.save(written, kind, **options)
    return written.getvalue()


def pixels(content):
    shown = decode(Picture(content=content))
    assert shown.size == size_of(Picture(content=content))
    return np.asarray(shown)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_is_turned_as_the_camera_was_held(kind):
    for held in range(10):
        exif = Image.Exif()
        exif[0x0112] = held
        content = saved(COLOURS, kind, exif=exif)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        assert np.array_equal(pixels(content), np.asarray(upright)), held
    broken = saved(COLOURS, kind, exif=b"Exif\x00\x00no such thing")
    assert pixels(broken).shape == (40, 64, 3)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white_and_what_is_not_keeps_its_colours(mode):
    black = Image.new("RGBA", (30, 30))
    black.paste((0, 0, 255, 255), (10, 10, 20, 20))
    found = pixels(saved(black.convert(mode), transparency=0) if mode == "P" else saved(black.convert(mode)))
    assert found[0, 0].tolist() == [255, 255, 255] and found[15, 15].max() < 256 and found[15, 15].min() < 60
    opaque = COLOURS.convert("RGBA")
    assert np.array_equal(pixels(saved(opaque)), np.asarray(opaque.convert("RGB")))


def test_greys_of_16_bits_are_those_of_8_bits():
    greys = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    assert np.array_equal(pixels(saved(Image.fromarray(greys)))[..., 0], greys >> 8)


def test_what_phones_put_behind_a_jpeg_is_passed_over():
    two = saved(COLOURS, "MPO", save_all=True, append_images=[COLOURS.rotate(180)])
    alone = pixels(saved(COLOURS, "JPEG"))
    assert np.array_equal(pixels(two), alone)
    assert np.array_equal(pixels(saved(COLOURS, "JPEG") + bytes(5000)), alone)
    for cut in (two[:1000], saved(COLOURS, "JPEG")[:1000] + bytes(5000)):
        with pytest.raises(ValueError, match="its end is missing"):
            size_of(Picture(content=cut))


def test_a_row_may_hold_a_picture_as_base64():
    content = saved(COLOURS)
    address = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    [picture] = pictures_of(address, Path())
    assert picture.read() == content
    with pytest.raises(ValueError, match="picture 0, data:image/png;base64,.* is no base64"):
        pictures_of(address + "!", Path())
    with pytest.raises(ValueError, match="nothing is fetched"):
        pictures_of("data:text/html,hello", Path())
