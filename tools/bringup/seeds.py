"""Measure what a seed for each request costs: python -m tools.bringup.seeds [--model DIR]"""

from tools.bringup.engine import model_of_command_line, seconds_of, start
from tools.bringup.outcome import expect, leave


def main() -> None:
    llm = start(model_of_command_line())
    seconds_of(llm, 8, 8, True)  # warms up
    found = {seeds: seconds_of(llm, 64, 64, seeds) for seeds in (False, True)}
    rates = {seeds: 64 * 64 / took for seeds, took in found.items()}
    times = found[True] / found[False]
    print(f"{rates[False]:.0f} tokens/s without seeds of their own, {rates[True]:.0f} with: {times:.2f} times the time")
    expect("seeds cost less than half of the time", found[True] < 2 * found[False], found)
    leave()


if __name__ == "__main__":
    main()
