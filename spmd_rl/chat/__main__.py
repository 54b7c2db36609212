"""Talk to a model: `python -m spmd_rl.chat --model DIR`, or `torchrun --nproc_per_node N -m spmd_rl.chat --model DIR`.

With N ranks the model is cut over all of them. Rank 0 reads the terminal.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spmd_rl.chat.conversation import Conversation, Thoughts
from spmd_rl.chat.terminal import Pipe, terminal
from spmd_rl.config.check_serving import chat_problems, weights_dtype
from spmd_rl.config.loading import load
from spmd_rl.config.model_directory import find_model
from spmd_rl.config.serving import ChatConfig, of_chat
from spmd_rl.config.template_names import CHAT
from spmd_rl.data.image_reader import ImageReader
from spmd_rl.data.pictures import size_of
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.seeds import derived_seed
from spmd_rl.data.templates import load_template
from spmd_rl.data.text_stream import TextStream
from spmd_rl.data.tokens import encode_rendered, render_text
from spmd_rl.distributed.environment import size_from_environment
from spmd_rl.distributed.status import IDLE, doing
from spmd_rl.errors import ConfigError, Problem, refuse
from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.program import run_rank
from spmd_rl.runtime.process import Started, launch
from spmd_rl.serve import ServeSpec, Serving

DESCRIPTION = """\
Talk to a model. Every setting below can also stand in a YAML file.

  --config FILE   the YAML file; without it the defaults below hold
"""
NEEDED = {"model": "name a Hugging Face directory or a checkpoint with --model DIR"}


@dataclass(frozen=True)
class Chat:
    """Settings that have passed all checks."""

    settings: ChatConfig
    spec: ServeSpec


def configure(arguments: list[str]) -> Chat:
    """Everything that can be wrong before any rank has met another, without torch. Raises ValueError: all problems."""
    settings = load(ChatConfig, arguments, NEEDED, DESCRIPTION)
    found = find_model("model", settings.model)
    directory = found.config
    shape, ranks = read_model_shape(directory, "model"), size_from_environment()
    settings = replace(settings, context=min(settings.context, shape.max_positions))
    config = of_chat(settings, directory, weights_dtype(directory, settings.dtype), ranks)
    refuse(chat_problems(settings, shape, config.model.dtype, ranks))
    return Chat(settings, ServeSpec(config, shape, (found.weights,), settings.context, settings.platform))


def converse(chat: Chat, serving: Serving, shown: Pipe) -> None:
    """Ask and answer until the user ends it; on rank 0."""
    settings = chat.settings
    sampling = SamplingParams(settings.temperature, settings.max_tokens, settings.top_p, settings.top_k, settings.min_p)
    sees = settings.images_per_conversation if serving.rank.inputs.images else 0
    conversation = Conversation(sampling, settings.seed, settings.system, sees)
    serving.servers.load(chat.spec.models[0])
    ranks = f"{serving.rank.world.size} rank{'s' if serving.rank.world.size > 1 else ''}"
    shown.note(f"{settings.model}: {ranks}, {settings.context} tokens of context; /help, /exit")
    while (line := _asked(shown)) is not None:
        if line.strip().lower() in ("exit", "quit"):
            break
        if line.startswith("/"):
            said = conversation.obey(line)
            if said is None:
                break
            shown.note(said)
        elif line.strip():
            _turn(settings, serving, conversation, line.strip(), shown)


def _asked(shown: Pipe) -> str | None:
    with doing(IDLE):
        return shown.ask()


def _turn(settings: ChatConfig, serving: Serving, conversation: Conversation, question: str, shown: Pipe) -> None:
    """One question and its answer."""
    rendered, prompt = _render(settings, serving.rank.inputs.tokenizer, conversation.asked(question))
    if (images := serving.rank.inputs.images) is not None:
        prompt = images.expanded(prompt, [images.grid(*size_of(picture)) for picture in conversation.pictures])
    context = settings.context
    room = context - len(prompt)
    if room < 1:
        shown.note(
            f"(the conversation would have {len(prompt)} tokens, the context holds {context}: /reset begins a new one; "
            "--context N allows more, up to the model's positions. Your question was not asked)"
        )
        return
    tokenizer = serving.rank.inputs.tokenizer
    if max(prompt) >= serving.shape.vocabulary:
        word = tokenizer.convert_ids_to_tokens(max(prompt))
        shown.note(f"(the model has no embedding for {word}, id {max(prompt)}: your question was not asked)")
        return
    opened = rendered.rstrip().endswith("<think>")
    text, thoughts, said = TextStream(tokenizer, serving.worker.engine.end_ids), Thoughts(opened), []

    def heard(tokens: Sequence[int]) -> bool:
        piece = text.add(tokens)
        said.append(piece)
        for part, thought in thoughts.add(piece):
            shown.say(part, thought)
        return shown.interrupted

    serving.worker.tokens_heard = heard
    sampling = replace(conversation.sampling, max_tokens=min(conversation.sampling.max_tokens, room))
    seed = derived_seed("chat", conversation.seed, len(conversation.messages))
    with shown.answering():
        reason = serving.servers.reply(prompt, seed, sampling, [picture.read() for picture in conversation.pictures])
    rest = text.add([], last=True)
    for part, thought in (*thoughts.add(rest), *thoughts.end()):
        shown.say(part, thought)
    shown.say("\n")
    if reason == "abort":
        shown.note("(stopped)")
    elif reason == "length" and sampling.max_tokens == room:
        shown.note(f"(cut: the conversation fills the context of {context} tokens; /reset begins a new one)")
    elif reason == "length":
        shown.note(f"(cut at max_tokens = {sampling.max_tokens}; /set max_tokens=N allows more)")
    # The template of a thinking model leaves out earlier thoughts, which it finds by their tags.
    conversation.answered(question, ("<think>\n" if opened else "") + "".join((*said, rest)))


def _render(settings: ChatConfig, tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[int]]:
    template = load_template(settings.template or CHAT, "template")
    if template.plain:
        way = "leave it out, or name one"
        raise ConfigError(Problem("template", settings.template, "a conversation needs a template", way))
    [rendered] = render_text(tokenizer, [messages], template.text, settings.enable_thinking, prefix="")
    return rendered, encode_rendered(tokenizer, [rendered])[0]


def main(arguments: list[str] | None = None) -> None:
    """Run the command; the exit status is 2 where the user can fix what is wrong."""
    shown: list[Pipe] = []

    def run(chat: Chat, started: Started) -> None:
        def control(serving: Serving) -> None:
            shown.append(terminal())
            converse(chat, serving, shown[0])

        def read(tokenizer: Any, images: ImageReader | None) -> tuple[dict[str, Any], tuple[str, ...]]:
            """Find out now that a template is not there or does not fit."""
            system = [] if chat.settings.system is None else [{"role": "system", "content": chat.settings.system}]
            _render(chat.settings, tokenizer, [*system, {"role": "user", "content": "Hello"}])
            return {}, ()

        run_rank(Serving(chat.spec, read, control), started)

    def before_exit(received: signal.Signals) -> bool:
        """An interrupt ends the answer; under torchrun, which ends all ranks after it, it ends the program."""
        if received == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ and shown and shown[0].interrupt():
            return False
        if shown and hasattr(shown[0], "close"):
            shown[0].close()
        return True

    launch(configure, run, arguments, before_exit)


if __name__ == "__main__":
    main()
