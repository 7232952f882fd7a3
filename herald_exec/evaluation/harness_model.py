"""lm-eval's view of a checkpoint: a model class registered as ``herald``.

    lm_eval --model herald --model_args folder=DIR,max_new_tokens=256 --tasks gsm8k

Generation tasks only: a masked-diffusion model has no exact likelihood of a continuation.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from herald_exec.checkpoints.memory import require_memory, resolve_device, resolve_dtype
from herald_exec.checkpoints.named import open_model
from herald_exec.checkpoints.tokenizer import TextTokenizer, load_tokenizer
from herald_exec.decoding import DecodeSettings
from herald_exec.generate import Answer, decode_settings, generate
from herald_exec.models.base import BlockModel
from herald_pipeline.errors import ConfigError, check_number, raise_problems


@dataclass(slots=True)
class HarnessCounts:
    """What the requests of an evaluation took; ``truncated`` prompts lost their middle."""

    requests: int = 0
    truncated: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0

    def add(self, answers: Sequence[Answer]) -> None:
        """Count one batch of answers."""
        self.requests += len(answers)
        self.prompt_tokens += sum(answer.prompt_tokens for answer in answers)
        self.tokens += sum(answer.tokens for answer in answers)
        self.forwards += sum(answer.forwards for answer in answers)
        self.seconds += max((answer.seconds for answer in answers), default=0.0)

    def as_dict(self) -> dict[str, float]:
        """For JSON, with tokens per forward and per second (prefill included)."""
        return {
            "requests": self.requests,
            "truncated": self.truncated,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "forwards": self.forwards,
            "seconds": self.seconds,
            "tokens_per_forward": self.tokens / self.forwards if self.forwards else 0.0,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
        }


def truncate_middle(tokens: Sequence[int], limit: int) -> list[int]:
    """The first and last halves of a prompt that is longer than ``limit`` tokens (LongBench's rule)."""
    if len(tokens) <= limit:
        return list(tokens)
    head = limit // 2
    return [*tokens[:head], *tokens[len(tokens) - (limit - head) :]]


def longest_prompt(max_positions: int, max_new_tokens: int, block_length: int) -> int:
    """Longest prompt whose padded length stays within the model's positions."""
    whole = max_positions // block_length * block_length
    return whole - -(-max_new_tokens // block_length) * block_length


@register_model("herald")
class HeraldLM(LM):  # type: ignore[misc]
    """A checkpoint folder as lm-eval calls it; arguments are those of ``herald-exec generate``.

    Parameters
    ----------
    folder
        Checkpoint folder, or ``herald-ref``.
    max_new_tokens
        Length of an answer; over what a task asks for, because the papers fix it.
    max_prompt_tokens
        Longest prompt; the model's positions give it by default.
    middle_truncation
        Longer prompts lose their middle; else they are refused.
    batch_size
        Prompts that run together.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_new_tokens: int = 256,
        max_prompt_tokens: int | None = None,
        middle_truncation: bool = False,
        batch_size: int | str | None = 8,
        device: str | None = "cpu",
        dtype: str | None = None,
        block: int | None = None,
        decoder: str = "confidence",
        threshold: float | None = None,
        scheduler: str = "fixed",
        cache: str = "none",
        steps: int = 32,
        method: str = "dense",
        budget: float | None = None,
        seed: int = 0,
        **unused: Any,
    ) -> None:
        super().__init__()
        if unused:
            message = f"unknown model arguments: {', '.join(sorted(unused))}; see herald-exec generate --help"
            raise ConfigError(message)
        raise_problems([check_number(_whole(batch_size, 8), "batch_size", minimum=1, integer=True)])
        self.batch_size = _whole(batch_size, 8)
        target, wanted = resolve_device(device or "cpu"), resolve_dtype(dtype)
        checkpoint = open_model(folder)
        self.settings = decode_settings(
            checkpoint.shape,
            max_tokens=max_new_tokens,
            block=block,
            decoder=decoder,
            threshold=threshold,
            scheduler=scheduler,
            cache=cache,
            steps=steps,
            seed=seed,
            method=method,
            budget=budget,
        )
        self.tokenizer = load_tokenizer(checkpoint.folder)
        require_memory(checkpoint, target, wanted)
        self.model = checkpoint.load(target, wanted)
        self._prepare(middle_truncation=middle_truncation, max_prompt_tokens=max_prompt_tokens)

    @classmethod
    def of(
        cls,
        model: BlockModel,
        tokenizer: TextTokenizer,
        settings: DecodeSettings,
        *,
        batch_size: int = 8,
        middle_truncation: bool = False,
        max_prompt_tokens: int | None = None,
    ) -> "HeraldLM":
        """Model class of what is loaded already."""
        made = cls.__new__(cls)
        LM.__init__(made)
        made.batch_size = batch_size
        made.model, made.tokenizer, made.settings = model, tokenizer, settings
        made._prepare(middle_truncation=middle_truncation, max_prompt_tokens=max_prompt_tokens)
        return made

    def _prepare(self, *, middle_truncation: bool, max_prompt_tokens: int | None) -> None:
        fits = longest_prompt(self.model.shape.max_positions, self.settings.max_new_tokens, self.settings.block_length)
        if max_prompt_tokens is not None:
            raise_problems(
                [check_number(max_prompt_tokens, "max_prompt_tokens", minimum=1, maximum=fits, integer=True)]
            )
        self.max_prompt_tokens = max_prompt_tokens or fits
        self.middle_truncation = middle_truncation
        self.uses_chat_template = False
        self.counts = HarnessCounts()

    # What lm-eval asks ------------------------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """Names the chat template in lm-eval's request caches."""
        return self.model.shape.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Note whether prompts come rendered; lm-eval records the text."""
        self.uses_chat_template = bool(chat_template)
        return self.model.shape.name if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation by the checkpoint's template."""
        self.uses_chat_template = True
        return self.tokenizer.render_chat(chat_history, add_generation_prompt=add_generation_prompt)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers to ``(context, generation arguments)``, in order."""
        texts: dict[int, str] = {}
        for stop, numbers in self._by_stop_words(requests).items():
            prompts = [self._encode(requests[number].args[0]) for number in numbers]
            answers = generate(
                self.model, self.tokenizer, prompts, self.settings, stop=stop, batch_size=self.batch_size
            )
            self.counts.add(answers)
            for number, answer in zip(numbers, answers, strict=True):
                texts[number] = answer.text
                self.cache_hook.add_partial("generate_until", requests[number].args, answer.text)
        return [texts[number] for number in range(len(requests))]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Refused: see the module."""
        raise ConfigError(_no_likelihood(requests))

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Refused: see the module."""
        raise ConfigError(_no_likelihood(requests))

    # How it is done ---------------------------------------------------------------------------------------------------

    def _by_stop_words(self, requests: Sequence[Instance]) -> dict[tuple[str, ...], list[int]]:
        """Requests that may share batches. A task's own length is not read: the suite's or the caller's holds."""
        groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            arguments = request.args[1]
            if arguments.get("do_sample") and float(arguments.get("temperature", 0.0)) > 0:
                message = (
                    f"task {request.task_name} asks for sampling; evaluations here are greedy: set do_sample: false"
                )
                raise ConfigError(message)
            until = arguments.get("until") or []
            words = tuple(word for word in ([until] if isinstance(until, str) else until) if word)
            groups[words].append(number)
        return groups

    def _encode(self, context: str) -> list[int]:
        tokens = self.tokenizer.encode(context, add_special_tokens=not self.uses_chat_template)
        if len(tokens) > self.max_prompt_tokens and self.middle_truncation:
            self.counts.truncated += 1
            return truncate_middle(tokens, self.max_prompt_tokens)
        return tokens


def _whole(value: int | str | None, default: int) -> int:
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        message = f"batch_size must be a whole number, got {value!r}"
        raise ConfigError(message) from None


def _no_likelihood(requests: Sequence[Instance]) -> str:
    names = sorted({str(request.task_name) for request in requests})
    return (
        f"{', '.join(names)}: a diffusion model has no exact likelihood of a continuation; "
        "choose tasks that generate text"
    )
