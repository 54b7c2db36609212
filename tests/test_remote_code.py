"""Python code that lies in a model's directory is run when it is asked for, and never else."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spmd.ranks import ROOT
from spmd_rl.data.tokens import load_tokenizer

CODE = """
open({marker!r}, "w").close()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class Tokenizer(PreTrainedTokenizerFast):
    pass

class Config(LlamaConfig):
    pass

class Model(LlamaForCausalLM):
    pass
"""
# As spmd_rl.rollout.engine tells it.
VLLM = """
from vllm import EngineArgs
from spmd_rl.config.config import ModelConfig
model = ModelConfig({model!r})
made = EngineArgs(model.path, load_format="dummy", max_model_len=128, trust_remote_code=model.trust_remote_code)
print("CONFIG", type(made.create_model_config().hf_config).__name__)
"""


@pytest.fixture
def model(tiny_models, tmp_path, monkeypatch):
    """A model of a known kind whose files say that other code is to be used."""
    directory = Path(shutil.copytree(tiny_models["llama"], tmp_path / "model"))
    (directory / "other.py").write_text(CODE.format(marker=str(tmp_path / "run")))
    change(directory / "tokenizer_config.json", auto_map={"AutoTokenizer": ["other.Tokenizer", "other.Tokenizer"]})
    change(directory / "config.json", auto_map={"AutoConfig": "other.Config", "AutoModelForCausalLM": "other.Model"})
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return directory


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.spmd
def test_code_beside_a_model_is_not_run_unasked_by_tokenizers_or_vllm(model, tmp_path):
    load_tokenizer(str(model))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", VLLM.format(model=str(model))],
        env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "CONFIG LlamaConfig" in done.stdout, done.stderr[-3000:]
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_read_without_it_is_refused_with_the_setting_that_runs_it(model, tmp_path):
    change(model / "config.json", model_type="unheard_of")
    change(model / "tokenizer_config.json", tokenizer_class="Tokenizer")
    with pytest.raises(ValueError, match=r"model\.path = .*needs Python code .*set model\.trust_remote_code to true"):
        load_tokenizer(str(model))
    assert not (tmp_path / "run").exists()
    load_tokenizer(str(model), trust_remote_code=True)
    assert (tmp_path / "run").exists(), "the code would have told that it was run"
