"""`dgraph chat`: a conversation with a model at a terminal."""

from __future__ import annotations

import inspect
import queue
import shlex
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgraph.cli import decoding_args as args
from dgraph.cli import options as given
from dgraph.cli.completion import completing
from dgraph.cli.conversation import Conversation
from dgraph.cli.output import ERR, OUT, print_text, status
from dgraph.cli.streaming import LEGEND, followed, interrupted, view_of
from dgraph.errors import DgraphError, InputError, UnknownName
from dgraph.types.card import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from dgraph.compiler.compiled_model import CompiledModel
    from dgraph.engine.engine import Engine
    from dgraph.engine.io.events import Event
    from dgraph.families import Model
    from dgraph.runtime.decoding import Decoding

PREFERRED, SMALLER = "smol_sdar", "tiny_sdar"
"""The model of a chat that names none, and the one where the base of the first is not installed."""
PROMPT = "> "
HELD = 4096
"""Positions of a conversation, where the model has more."""


def chat(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="As for `dgraph generate`.",
            show_default=f"{PREFERRED} if its base is installed, else {SMALLER}",
            autocompletion=completing("models"),
            callback=given.fetched,
        ),
    ] = None,
    recipe: args.Recipe = "focus",
    option: given.Options = None,
    kv_dtype: given.KvDtype = None,
    system: Annotated[
        str, typer.Option(help="A message that stands before the conversation.", show_default=False)
    ] = "",
    max_new_tokens: args.MaxNewTokens = 256,
    threshold: args.Threshold = None,
    steps: args.Steps = None,
    policy: args.Policy = None,
    block_length: args.BlockLength = None,
    temperature: args.Temperature = None,
    top_p: args.TopP = None,
    top_k: args.TopK = None,
    stop: args.Stop = None,
    seed: args.Seed = 0,
    backend: args.Backend = "auto",
    dtype: given.Dtype = None,
    weights: given.Weights = None,
    device: given.Device = None,
    fact: given.Facts = None,
    calibration: given.Calibration = None,
    cache: args.Cache = True,
) -> None:
    """Talk with a model, and watch the block that it is denoising. In a pipe: a message per line.

    Ctrl-C ends a response, Ctrl-D the program; /help lists the commands.

    \b
    dgraph chat
    dgraph chat ./SDAR-8B-Chat-b32 -r focus --device cuda
    echo "Sort these words: river stone cloud maple" | dgraph chat tiny_sdar
    """
    decoding, options = args.decoding_of(context.params), given.recipe_options(recipe, option, kv_dtype)
    with status("loading") as tell:
        facts = given.facts(fact, calibration)
        found = _loaded(model, given.torch_dtype(dtype), given.torch_device(device), weights is not None, facts)
        if found.tokenizer is None:
            raise InputError(f"{found.name} has no tokenizer.json, so it cannot talk; add one to its folder.")
        how = {"backend": backend, "artifacts": cache, "weights": weights}
        talk = Chat(context, found, decoding, Conversation(found, system), how)
        talk.take(recipe, options, tell)
    with talk:
        talk.run()


def _loaded(model: str | None, dtype: Any, device: Any, opened: bool, facts: dict[str, Any]) -> Model:
    """Load the model that was named, or one that is embedded; say which."""
    import dgraph

    if model is not None:
        return dgraph.load(model, dtype, device, opened, **facts)
    try:
        return dgraph.load(PREFERRED, dtype, device, opened, **facts)
    except InputError as error:
        ERR.print(f"note: {SMALLER} answers, which knows a few tasks (`dgraph models`): {error}")
        return dgraph.load(SMALLER, dtype, device, opened, **facts)


class Chat:
    """The loop of a conversation: reads lines, answers them, and obeys commands.

    Args:
        context: of the command.
        model: answers.
        decoding: how.
        conversation: so far.
        how: arguments of `dgraph.optimize` beside the recipe and its options.
    """

    def __init__(
        self,
        context: typer.Context,
        model: Model,
        decoding: Decoding,
        conversation: Conversation,
        how: dict[str, Any],
    ):
        self._context, self._model, self._decoding, self._how = context, model, decoding, how
        self._conversation = conversation
        self._compiled: CompiledModel | None = None
        self._engine: Engine | None = None
        self._dropped = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "recipe": self._recipe,
            "threshold": self._threshold,
            "save": self._save,
            "clear": self._clear,
        }

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._engine.close(drain=False)

    def take(self, recipe: str, options: dict[str, Any], tell: Callable[[str], None]) -> None:
        """Answer under a recipe from now on. A refusal leaves the one before in place.

        Raises:
            DgraphError: an unknown recipe, or one that the model cannot have.
        """
        import dgraph

        made = dgraph.optimize(self._model, recipe, progress=tell, **self._how, **options)
        positions = min(HELD, self._model.spec.max_positions)
        engine = made.engine(max_sequences=1, max_tokens=positions, block_length=self._decoding.block_length)
        if self._engine is not None:
            self._engine.close(drain=False)
        self._compiled, self._engine = made, engine
        given_options = [f"{name}={value}" for name, value in options.items()]
        named = self._context.params["model"] or self._model.name
        # The format of keys is among the options.
        args.tell_backend(self._context, made, model=named, recipe=recipe, option=given_options, kv_dtype=())

    def run(self) -> None:
        """Read and answer lines until they end, or /exit."""
        talks = sys.stdin is not None and sys.stdin.isatty() and OUT.is_terminal
        if talks:
            with suppress(ImportError):
                import readline  # noqa: F401  (lines that can be edited, and those before them by the arrow keys)
            OUT.print(f"{self._name}. /help lists commands; Ctrl-C ends a response, Ctrl-D the chat.", style="dim")
        if not self._conversation.framed:
            ERR.print(f"note: {self._model.name} has no chat template: it continues the text of the conversation.")
        while True:
            try:
                line = input(PROMPT) if talks else next(sys.stdin).rstrip("\n")
            except (EOFError, StopIteration):
                if talks:
                    print_text("")
                return
            except KeyboardInterrupt:
                if not talks:
                    raise
                print_text("")
                continue
            try:
                if not self._obeys(line):
                    return
            except DgraphError as error:
                ERR.print(f"error: {error}")
            except KeyboardInterrupt:  # while a recipe is loaded; the one before stays
                if not talks:
                    raise

    @property
    def _name(self) -> str:
        assert self._compiled is not None, "taken before anything is said"
        return f"{self._model.name} under {self._compiled.recipe.name}"

    def _obeys(self, line: str) -> bool:
        """Answer a line or obey its command; False to end."""
        if not line.strip():
            return True
        if not line.startswith("/"):
            self._answer(line)
            return True
        name, _, rest = line[1:].strip().partition(" ")
        if name in ("exit", "quit"):
            return False
        if name not in self._commands:
            raise UnknownName("command", f"/{name}", [f"/{each}" for each in (*self._commands, "exit")])
        self._commands[name](rest.strip())
        return True

    def _answer(self, text: str) -> None:
        """Answer the user's message, and remember both. Ctrl-C ends the answer, of which the text so far counts."""
        said, engine, tokenizer = self._conversation, self._engine, self._model.tokenizer
        assert engine is not None and tokenizer is not None, "given before anything is said"  # noqa: PT018
        said.say(text)
        answer, last = "", None
        try:
            ids, dropped = said.ids(engine.max_tokens - self._decoding.max_new_tokens)
            if dropped > self._dropped:
                ERR.print(f"note: {counted(dropped, 'message')} of the beginning no longer fit and are left out.")
            self._dropped = dropped
            arrived: queue.SimpleQueue[Event] = queue.SimpleQueue()
            with view_of(tokenizer.decode) as view:
                name = engine.submit(ids, self._decoding, sink=arrived.put, draft=True)
                with interrupted(lambda: engine.cancel(name)):
                    events = followed(arrived, view.show)
            answer, last = "".join(event.text for event in events), events[-1]
        finally:
            said.answer(answer)
        if OUT.is_terminal and last is not None and last.served is not None:
            usage, seconds = last.usage, last.served.ended - last.served.arrived
            ended = ", interrupted" if last.finish_reason == "cancelled" else ""
            counts = f"{counted(usage.completion_tokens, 'token')} in {counted(usage.steps, 'step')}"
            OUT.print(f"{counts}, {seconds:.1f} s{ended}", style="dim")

    # -- commands, each called with the rest of its line ---------------------------------------------------------

    def _help(self, rest: str) -> None:
        """List the commands."""
        for name, command in self._commands.items():
            print_text(f"/{name:<10} {inspect.getdoc(command)}")
        print_text(f"/{'exit':<10} End the chat, as Ctrl-D does.")
        print_text(f"{LEGEND}\nCtrl-C ends a response, and what it has said so far counts.")

    def _recipe(self, rest: str) -> None:
        """NAME [KEY=VALUE ...]: answer under another recipe; without a name, say which."""
        if rest:
            name, *options = _words(rest)
            with status("loading") as tell:
                self.take(name, given.recipe_options(name, options), tell)
        print_text(self._name)

    def _threshold(self, rest: str) -> None:
        """NUMBER: commit tokens above this confidence, in (0, 1]; without a number, say which."""
        if rest:
            try:
                value = float(rest)
            except ValueError:
                raise InputError(f"/threshold takes a number in (0, 1], got {rest!r}.") from None
            decoding = replace(self._decoding, threshold=value)
            decoding.for_model(self._model.spec)  # refuses a threshold that the rule has no place for
            self._decoding = decoding
        print_text(f"rule {self._decoding.for_model(self._model.spec).rule}")

    def _save(self, rest: str) -> None:
        """FILE: write the conversation as JSON."""
        if not rest:
            raise InputError("/save takes a file, as in /save talk.json.")
        assert self._compiled is not None, "taken before anything is said"
        self._conversation.save(Path(rest).expanduser(), self._compiled.recipe.to_json(), self._decoding)
        print_text(f"{counted(len(self._conversation.messages), 'message')} in {rest}")

    def _clear(self, rest: str) -> None:
        """Forget the conversation."""
        self._conversation.clear()
        self._dropped = 0
        print_text("forgotten")


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"{text!r} cannot be read: {error}.") from None
