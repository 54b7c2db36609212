"""Two steps of GRPO with refresh, proof and consistency check, of a dense model, of experts and of latent attention."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from spmd_rl.platforms import current
from tools.bringup.outcome import expect, leave

FAMILIES = ("qwen2", "qwen3_moe", "deepseek_v3")


def settings(model: Path, directory: Path, steps: int, *more: str) -> list[str]:
    """Return the command line of a short run of a model that `made` wrote."""
    wanted = {
        "model.path": model,
        "run.dir": directory,
        "run.tensorboard": False,
        "run.export_hf": True,
        "train.steps": steps,
        "train.prompts_per_step": 4,
        "train.learning_rate": 1e-3,
        "algorithm.samples_per_prompt": 4,
        "rollout.max_response_length": 16,
        "rollout.max_sequences": 8,
        "rollout.cache_gib": 0.25,
        "rollout.canary_steps": 1,
        "data.max_prompt_length": 120,
        "evaluation.before": False,
        "evaluation.after": False,
    }
    words = [word for name, value in wanted.items() for word in (f"--{name}", str(value))]
    # Its rewards differ within a group, so that each step teaches, and a refresh brings other weights.
    return [*words, "--reward.rules", f"{model.parent / 'rule.py'}:variety", "1.0", *more]


def run(words: list[str], ranks: int = 1, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Return the exit status of a run and the end of what it said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command += ["-m", "spmd_rl.grpo", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.returncode, (done.stdout + done.stderr)[-3000:]


def made(family: str, root: Path) -> Path:
    """Return the directory of a tiny random model of a family, with a tokenizer, beside a rule of rewards."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    from tiny_run import RULE

    from tiny_models import make_tiny
    from tiny_tokenizer import make_tokenizer

    dtype = "float32" if current().free_and_total_bytes is None else "bfloat16"
    model = make_tiny(root / family, family, dtype=dtype)
    make_tokenizer(model)
    (root / "rule.py").write_text(RULE, encoding="utf-8")
    return model


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for family in FAMILIES:
            status, said = run(settings(made(family, root), root / f"run_{family}", 2))
            file = root / f"run_{family}" / "metrics.jsonl"
            rows = (
                [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
            )
            gaps, norms = (
                [row[name] for row in rows if name in row] for name in ("correction/canary_gap", "grad_norm")
            )
            taught = len(gaps) == len(norms) == 2 and min(norms) > 0 and gaps[0] != gaps[1]
            what = f"two steps of {family}, refreshed and proved; gaps of the canary {gaps}, gradients {norms}"
            expect(what, status == 0 and taught, said)
    leave()


if __name__ == "__main__":
    main()
