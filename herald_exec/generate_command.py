"""``herald-exec generate``: text from a checkpoint folder.

herald-exec generate --model DIR "Why is the sky blue?"
herald-exec generate --model DIR --prompts questions.jsonl --batch 8 --json
echo "Once upon a time" | herald-exec generate --model DIR --no-chat --prompts -
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from herald_exec.prompts import Prompt, read_prompts, use_chat_template
from herald_exec.run_command import say_all_of_it
from herald_pipeline import methods
from herald_pipeline.decoding import acceptance, caches, schedulers
from herald_pipeline.errors import ConfigError, raise_problems

if TYPE_CHECKING:
    from herald_exec.checkpoints.folder import Checkpoint
    from herald_exec.checkpoints.tokenizer import TextTokenizer
    from herald_exec.generate import Answer, OnText


def _print_statistics(answers: "Sequence[Answer]", total: Mapping[str, float]) -> None:
    for a in answers:
        typer.echo(
            f"[{a.index}] {a.prompt_tokens} prompt tokens, {a.tokens} tokens in {a.forwards} forwards "
            f"({a.tokens_per_forward:.2f} tokens/forward), {a.blocks} blocks, {a.seconds:.2f} s, ended by {a.ended_by}",
            err=True,
        )
    typer.echo(
        f"all: {total['tokens']} tokens in {total['seconds']:.2f} s, {total['tokens_per_second']:.1f} tokens/s "
        f"with prefill, {total['tokens_per_forward']:.2f} tokens/forward",
        err=True,
    )


def _writer(number_of_prompts: int, *, as_json: bool) -> "OnText | None":
    """One prompt is streamed as it grows; several are printed in order once they are done."""
    if as_json or number_of_prompts > 1:
        return None

    def write(_: int, text: str) -> None:
        typer.echo(text, nl=False)
        sys.stdout.flush()

    return write


def _encode(
    checkpoint: "Checkpoint",
    tokenizer: "TextTokenizer",
    prompts: Sequence[Prompt],
    chat: bool | None,
    system: str | None,
) -> list[list[int]]:
    name = checkpoint.shape.name
    templated = use_chat_template(tokenizer, name, chat)
    if chat is None:
        reason = "has a chat template" if templated else "has no chat template, or is a base model"
        use = "used; --no-chat turns it off" if templated else "prompts are used as they are"
        typer.echo(f"{name} {reason}: {use}", err=True)
    if system is not None and not templated:
        message = "--system needs a chat template; this model's prompts are used as they are"
        raise ConfigError(message)
    return [prompt.encode(tokenizer, chat=templated, system=system) for prompt in prompts]


def generate_command(
    model: Annotated[str, typer.Option(help="Checkpoint folder, or herald-ref.")],
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts, one argument each.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="File: .jsonl, or text as one prompt; - is stdin.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 256,
    method: Annotated[
        str, typer.Option(help=f"Method of block-causal models: {', '.join(methods.names())}.")
    ] = "dense",
    budget: Annotated[
        float | None,
        typer.Option(callback=say_all_of_it, help="Share of the prefix that a method selects, 0.05 for 5%."),
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="settings.NAME=VALUE, repeatable.")] = None,
    block: Annotated[int | None, typer.Option(help="Block length B; the checkpoint's own by default.")] = None,
    decoder: Annotated[str, typer.Option(help=f"Acceptance rule: {', '.join(acceptance.names())}.")] = "confidence",
    threshold: Annotated[float | None, typer.Option(help="Confidence to accept a token.")] = None,
    scheduler: Annotated[
        str, typer.Option(help=f"Of bidirectional models: {', '.join(schedulers.names())}.")
    ] = "fixed",
    cache: Annotated[str, typer.Option(help=f"Of bidirectional models: {', '.join(caches.names())}.")] = "none",
    steps: Annotated[int, typer.Option(help="Denoising steps a block, for rules with a schedule.")] = 32,
    temperature: Annotated[float, typer.Option(help="0 is the most probable token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Share of probability that is drawn from.")] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.")] = None,
    chat: Annotated[bool | None, typer.Option("--chat/--no-chat", help="Use the chat template.")] = None,
    system: Annotated[str | None, typer.Option(help="System turn for the chat template.")] = None,
    batch: Annotated[int, typer.Option(help="Prompts that run together.")] = 8,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; as stored by default.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Counts and times per prompt, on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Generate text from a checkpoint folder, streamed as blocks complete."""
    raise_problems([methods.get(method).execution_problem()])
    # torch takes seconds to import: not for --help, nor for a misspelled option.
    from herald_exec.checkpoints.memory import require_memory, resolve_device, resolve_dtype
    from herald_exec.checkpoints.named import open_model
    from herald_exec.checkpoints.tokenizer import load_tokenizer
    from herald_exec.generate import decode_settings, generate, summary, untrained_block

    blank = [number for number, text in enumerate(prompt or (), start=1) if not text.strip()]
    if blank:
        message = f"prompt {blank[0]} is blank: there is nothing to answer; put text between the quotes"
        raise ConfigError(message)
    asked = [Prompt(text=text) for text in prompt or []] + (read_prompts(prompts) if prompts is not None else [])
    if not asked:
        message = "no prompt: give one as an argument, or a file with --prompts"
        raise ConfigError(message)
    target, wanted = resolve_device(device), resolve_dtype(dtype)
    checkpoint = open_model(model)
    tokenizer = load_tokenizer(checkpoint.folder)
    settings = decode_settings(
        checkpoint.shape,
        max_tokens=max_tokens,
        block=block,
        decoder=decoder,
        threshold=threshold,
        scheduler=scheduler,
        cache=cache,
        steps=steps,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        method=method,
        budget=budget,
        sets=set_ or (),
    )
    warning = untrained_block(checkpoint.shape, settings.block_length)
    if warning is not None:
        typer.echo(warning, err=True)
    encoded = _encode(checkpoint, tokenizer, asked, chat, system)
    require_memory(checkpoint, target, wanted)
    loaded = checkpoint.load(target, wanted)
    on_text = _writer(len(encoded), as_json=as_json)
    started = time.perf_counter()
    answers = generate(loaded, tokenizer, encoded, settings, stop=stop or (), batch_size=batch, on_text=on_text)
    total = summary(answers, time.perf_counter() - started)
    if as_json:
        rows = [answer.as_dict() for answer in answers]
        typer.echo(json.dumps({"model": checkpoint.shape.name, "settings": settings.as_dict(), **total, "rows": rows}))
    elif on_text is not None:
        typer.echo()
    else:
        for answer in answers:
            typer.echo(f"[{answer.index}] {answer.text}")
    if stats:
        _print_statistics(answers, total)
