"""Captured graphs against eager: do they survive a sleep, and what do they bring? python -m tools.bringup.graphs"""

from spmd_rl.platforms import current
from tools.bringup.engine import model_of_command_line, seconds_of, start
from tools.bringup.outcome import attempt, expect, leave, not_here


def main() -> None:
    if not current().engine_sleeps:
        not_here(f"on a {current().name} engines are eager")
    llm = start(model_of_command_line(), enforce_eager=False)
    seconds_of(llm, 8, 8, True)
    before = seconds_of(llm, 64, 64, True)
    print(f"{64 * 64 / before:.0f} tokens/s with graphs; tools.bringup.seeds says it without")
    attempt("a captured graph sleeps and wakes", lambda: (llm.sleep(level=1), llm.wake_up())[1])
    after = seconds_of(llm, 64, 64, True)
    expect("it is as fast afterwards", after < 1.5 * before, f"{after:.2f} s, before {before:.2f} s")
    leave()


if __name__ == "__main__":
    main()
