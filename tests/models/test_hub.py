"""Models of the Hugging Face hub, out of a cache in its layout; nothing here reaches a network."""

import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spmd_rl.config.config import Config, ModelConfig
from spmd_rl.config.critic_config import CriticConfig
from spmd_rl.config.loading import settings
from spmd_rl.config.model_directory import find_model, with_local_models
from spmd_rl.config.reward_config import RewardConfig, RewardModelConfig
from spmd_rl.errors import ConfigError
from spmd_rl.models import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache with the model some/tiny, and no way to the hub."""
    from huggingface_hub import constants

    home = tmp_path / "hub"
    for name, value in (("HF_HUB_CACHE", str(home)), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.chdir(tmp_path)
    snapshot = home / "models--some--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    (home / "models--some--tiny" / "refs").mkdir()
    (home / "models--some--tiny" / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_cached_model_is_taken_without_the_hub(cache):
    assert hub.local_directory("some/tiny", "model.path") == str(cache)
    assert hub.local_directory(f"some/tiny@{COMMIT}", "model.path") == str(cache)
    assert find_model("model", "some/tiny").weights == str(cache)


def test_a_run_keeps_the_name_and_the_commit_of_what_it_began_with(cache):
    models = {"judge": RewardModelConfig(path="some/tiny")}
    config = Config(ModelConfig("some/tiny", reference_path="some/tiny"), critic=CriticConfig(path="some/tiny"))
    found = with_local_models(Config(config.model, critic=config.critic, reward=RewardConfig(models=models)))
    paths = (found.model.path, found.model.reference_path, found.critic.path, found.reward.models["judge"].path)
    assert paths == (str(cache),) * 4
    assert settings(found)["model.path"] == f"some/tiny@{COMMIT}"
    assert hub.local_directory(settings(found)["model.path"], "model.path") == str(cache)


def test_a_directory_comes_before_the_hub(cache, tmp_path):
    (tmp_path / "some").mkdir()
    assert not hub.is_hub_model("some/tiny")
    assert not hub.is_hub_model("models/x/y") and not hub.is_hub_model("/some/tiny") and not hub.is_hub_model("tiny")
    assert hub.hub_name("runs/mine/hf") == "runs/mine/hf"


def test_half_a_model_in_the_cache_is_not_taken(cache):
    (cache / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one", "b": "two"}}))
    assert not hub._is_whole(cache)
    (cache / "one").touch(), (cache / "two").touch()
    assert hub._is_whole(cache)


def test_a_name_without_a_network_says_the_ways_out(cache):
    with pytest.raises(ConfigError) as refused:
        hub.local_directory("some/other", "model.path")
    said = str(refused.value)
    assert said.startswith("model.path = some/other: no directory here, and it could not be downloaded")
    assert all(way in said for way in ("HF_ENDPOINT", "HF_TOKEN", "hf download some/other --local-dir DIR"))


def test_one_process_downloads_and_the_others_wait(cache, monkeypatch):
    import huggingface_hub

    begun, inside, most = [], [], []

    def download(name, **how):
        if how.get("local_files_only"):
            if not begun:
                raise FileNotFoundError
            return str(cache)
        begun.append(name)
        inside.append(1)
        most.append(len(inside))
        inside.pop()
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    threads = [threading.Thread(target=hub.local_directory, args=("some/tiny", "model.path")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert begun == ["some/tiny"]


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers what an upload asks, and keeps who asked for what."""

    asked: list[tuple[str, str]] = []

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @property
    def here(self):
        return f"http://127.0.0.1:{self.server.server_port}/me/mine"

    def do_POST(self):
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        Hub.asked.append((self.path, sent))
        if "preupload" in self.path:
            files = json.loads(sent)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif "commit" in self.path:
            self.answer({"commitUrl": f"{self.here}/commit/1", "commitOid": COMMIT, "success": True})
        else:
            self.answer({"url": self.here, "name": "me/mine", "id": "me/mine"})

    def do_GET(self):
        Hub.asked.append((self.path, ""))
        self.answer({"id": "me/mine", "sha": COMMIT, "siblings": []})

    def log_message(self, *_):
        pass


def test_a_runs_model_is_uploaded(tmp_path):
    export = tmp_path / "runs" / "mine" / "hf"
    export.mkdir(parents=True)
    (export / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        "PATH": "/usr/bin",
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_TOKEN": "hf_secret",
        "HF_HOME": str(tmp_path / "home"),
        "NO_PROXY": "127.0.0.1",
    }
    words = [sys.executable, str(ROOT / "tools" / "push_to_hub.py"), str(tmp_path / "runs" / "mine"), "me/mine"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    server.shutdown()
    assert done.returncode == 0, done.stderr
    committed = next(sent for path, sent in Hub.asked if "/commit/" in path)
    assert "config.json" in committed and "Upload mine" in committed and "hf_secret" not in committed
