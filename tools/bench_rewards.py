"""Measure how fast answers are graded, and what responses cost that make sympy hang.

python tools/bench_rewards.py --data gsm8k/test.jsonl
python tools/bench_rewards.py --data gsm8k/test.jsonl --hanging 20 --of 1000 --workers 2 --timeout 2
"""

import argparse
import json
import time
from pathlib import Path

from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.grading.pool import GraderPool
from spmd_rl.rewards.rules.math_answer import is_correct

HANGING = r"So the answer is \boxed{9^{9^{9^{9^{9}}}} - x}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a jsonl file with an `answer` column")
    parser.add_argument("--hanging", type=int, default=0, help="so many gradings never end")
    parser.add_argument("--of", type=int, default=1000, help="of so many")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds a grading may take")
    arguments = parser.parse_args()
    if not Path(arguments.data).is_file():
        parser.error(f"--data {arguments.data}: there is no such file; name a jsonl file with an `answer` column")
    golds = [json.loads(line)["answer"] for line in Path(arguments.data).open(encoding="utf-8")]
    if arguments.hanging:
        hanging(golds, arguments)
    else:
        rate(golds)


def rate(golds: list[str]) -> None:
    """Gradings a second of one process, by how the answer is stated."""
    for name, form in (
        ("boxed, right", lambda gold, n: f"So it is \\boxed{{{n}}}."),
        ("stated, right", lambda gold, n: f"{gold.partition('####')[0]}The answer is {n}."),
        ("boxed, wrong", lambda gold, n: f"{gold.partition('####')[0]}\\boxed{{{n}1}}"),
        ("not stated", lambda gold, n: gold.partition("####")[0] + n),
        ("a fraction", lambda gold, n: f"\\boxed{{\\frac{{{n.replace(',', '')}}}{{7}}}}"),
    ):
        responses = [form(gold, gold.rpartition("####")[2].strip()) for gold in golds]
        started = time.process_time()
        correct = sum(is_correct(gold, response).correct for gold, response in zip(golds, responses, strict=True))
        seconds = time.process_time() - started
        print(f"{name:14} {len(golds):6} gradings, {correct:6} correct, {len(golds) / seconds:8.0f} a second")


def hanging(golds: list[str], arguments: argparse.Namespace) -> None:
    """Time of many gradings with and without some that hang."""
    seconds = {}
    for hangs in (0, arguments.hanging):
        with GraderPool({"math_answer": 1.0}, arguments.workers, arguments.timeout) as pool:
            step = arguments.of // max(hangs, 1)
            started = time.monotonic()
            for number in range(arguments.of):
                gold = golds[number % len(golds)]
                hang = hangs and number % step == 0 and number // step < hangs
                answer = "x" if hang else gold
                pool.submit(number, RewardSample("", HANGING if hang else gold, answer))
            scored = pool.collect(block=True)
            seconds[hangs] = time.monotonic() - started
        causes = {cause: sum(s.cause == cause for s in scored) for cause in sorted({s.cause for s in scored})}
        print(f"{arguments.of} gradings, {hangs} of them hang: {seconds[hangs]:.2f} s, {causes}")
    bound = arguments.hanging * arguments.timeout / arguments.workers
    print(f"{arguments.hanging} timeouts / {arguments.workers} processes: {bound:.2f} s, and the time of the others")


if __name__ == "__main__":
    main()
