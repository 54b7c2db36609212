"""See what a sleep of vLLM gives back of the device, and what it loses: python -m tools.bringup.sleep [--model DIR]"""

from spmd_rl.platforms import current
from tools.bringup.engine import model_of_command_line, start
from tools.bringup.outcome import expect, leave, not_here


def main() -> None:
    machine = current()
    if machine.free_and_total_bytes is None or not machine.engine_sleeps:
        not_here(f"on a {machine.name} vLLM does not sleep")
    llm = start(model_of_command_line())
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    from spmd_rl.rollout.engine_weights import SleepMode

    memory = SleepMode(llm, runner)
    model = runner.get_model()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    buffers = {name: buffer.cpu().clone() for name, buffer in model.named_buffers()}
    awake = machine.free_and_total_bytes()[0]
    memory.sleep()
    machine.give_back_memory()
    asleep = machine.free_and_total_bytes()[0]
    kept = len(memory._plain or ())
    print(f"weights {weights:,} bytes, a sleep gives back {asleep - awake:,}; kept besides: {kept} tensors")
    expect("a sleep gives the weights back", asleep - awake >= 0.9 * weights, f"{asleep - awake:,} of {weights:,}")
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    memory.wake_weights()
    memory.wake_cache()
    lost = [name for name, buffer in model.named_buffers() if not (buffer.cpu() == buffers[name]).all()]
    expect("buffers have their values again", not lost, lost)
    moved = [name for name, parameter in model.named_parameters() if parameter.data_ptr() != before[name]]
    expect("parameters are where they were", not moved, moved)
    left = machine.free_and_total_bytes()[0]
    expect("awake it takes what it took", abs(left - awake) < 64 << 20, f"{awake - left:,} bytes more")
    leave()


if __name__ == "__main__":
    main()
