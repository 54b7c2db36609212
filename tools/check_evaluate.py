"""Ask the questions of an evaluation once more with nothing but vLLM, and compare answer by answer.

    python tools/check_evaluate.py evaluations/smollm2-135m-instruct-gsm8k

vLLM reads the Hugging Face directory itself, renders each question with the model's chat template and generates
greedily; the evaluation must have been greedy and without a system message. The grader is the evaluation's own. Ends
with 0 when the accuracies are the same, else with 1.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluation", type=Path, help="output directory of spmd_rl.evaluate")
    directory = parser.parse_args(argv).evaluation
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    settings = summary["settings"]
    if settings["temperature"] != 0:
        parser.error(f"{directory}: its temperature is {settings['temperature']}; only greedy answers can be repeated")
    llm, same = make_engine(settings, summary["dtype"]), True
    for name, said in summary["benchmarks"].items():
        lines = [json.loads(line) for line in (directory / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        responses = ask(llm, [line["question"] for line in lines], settings["max_response_length"])
        accuracy = sum(map(correct, lines, responses)) / len(lines)
        equal = sum(line["samples"][0]["response"] == mine for line, mine in zip(lines, responses, strict=True))
        both = f"evaluate {said['accuracy']:.3f}, plain vLLM {accuracy:.3f}"
        print(f"{name}: {both}; {equal} of {len(lines)} responses equal")
        same &= accuracy == said["accuracy"]
    return 0 if same else 1


def make_engine(settings: dict, dtype: str):
    for name, value in (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_NO_USAGE_STATS", "1"),
    ):
        os.environ.setdefault(name, value)
    from vllm import LLM

    return LLM(
        settings["model"],
        # vLLM's own "auto" would compute a float32 model in bfloat16.
        dtype=dtype,
        enforce_eager=True,
        max_model_len=settings["max_prompt_length"] + settings["max_response_length"],
        max_num_seqs=settings["rollout"]["max_sequences"],
        disable_log_stats=True,
    )


def ask(llm, questions: list[str], max_tokens: int) -> list[str]:
    from vllm import SamplingParams

    conversations = [[{"role": "user", "content": question}] for question in questions]
    made = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    return [output.outputs[0].text for output in made]


def correct(line: dict, response: str) -> bool:
    from spmd_rl.rewards.rules.math_answer import is_correct

    return is_correct(line["answer"], response).cause == "correct"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
