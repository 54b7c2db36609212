"""A family is one file: its architectures, what its config.json means, and the rows of its weights."""

import json
import re
from pathlib import Path

import pytest

import spmd_rl.models
from spmd_rl.errors import ConfigError
from spmd_rl.models import CAUSAL_LM, FAMILIES, SEQUENCE_CLASSIFICATION
from spmd_rl.models.model_shape import read_model_shape


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_a_file_of_its_name(family):
    source = (Path(spmd_rl.models.__file__).parent / f"{family}.py").read_text()
    assert f'"{FAMILIES[family].causal_lm}"' in source


def test_an_architecture_belongs_to_one_family_and_one_head():
    assert len(CAUSAL_LM) == len(FAMILIES)
    assert all(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in CAUSAL_LM)
    assert all(name.endswith("ForSequenceClassification") for name in SEQUENCE_CLASSIFICATION)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_of_a_saved_model_are_those_that_its_familys_rows_name(tiny_models, family):
    from spmd_rl.weights.files.hf_reader import check_headers, read_headers

    directories = [path for name, path in tiny_models.items() if name.split("-")[0] == family]
    assert directories
    for path in directories:
        shape = read_model_shape(path)
        assert (shape.family, shape.head, shape.architecture) == (family, "lm", FAMILIES[family].causal_lm)
        check_headers(path, read_headers(path), shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_score_head_of_a_family_is_read_or_refused_by_name(tiny_models, tmp_path, family):
    content = json.loads((Path(tiny_models[family if family != "qwen2" else "qwen2-tied"]) / "config.json").read_text())
    architecture = re.sub("For.*", "ForSequenceClassification", FAMILIES[family].causal_lm)
    (tmp_path / "config.json").write_text(json.dumps(content | {"architectures": [architecture], "num_labels": 3}))
    if FAMILIES[family].scores:
        shape = read_model_shape(tmp_path, head="value")
        assert (shape.architecture, shape.head, shape.labels, shape.tied) == (architecture, "value", 3, False)
        return
    with pytest.raises(ConfigError, match=f"critic.path = {tmp_path}: the architecture .* is {architecture}"):
        read_model_shape(tmp_path, "critic.path")
