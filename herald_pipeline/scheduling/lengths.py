"""Lengths of requests once blocks are rounded up: one rule and text for admission, capacity, generate and evaluate."""


def blocks_needed(prompt_tokens: int, new_tokens: int, block_length: int) -> int:
    """Blocks in which an answer lies when blocks are absolute multiples of B: the prompt's tail shares the first."""
    return -(-(prompt_tokens % block_length + new_tokens) // block_length)


def padded_tokens(prompt_tokens: int, new_tokens: int, block_length: int) -> int:
    """Highest position that a request can write, plus one.

    Blocks are absolute multiples of B (SDAR, LLaDA2) or begin at the prompt's end (LLaDA, Dream); the longer of the two
    counts, so one rule admits for both.
    """
    absolute = -(-(prompt_tokens + new_tokens) // block_length) * block_length
    from_prompt = prompt_tokens + -(-new_tokens // block_length) * block_length
    return max(absolute, from_prompt)


def check_length(
    prompt_tokens: int, new_tokens: int, block_length: int, limit: int, what: str = "request"
) -> str | None:
    """Problem with a request that does not fit ``limit`` positions once blocks are rounded up, or ``None``.

    The limit is the model's positions, or the room that memory leaves for KV.
    """
    padded = padded_tokens(prompt_tokens, new_tokens, block_length)
    if padded <= limit:
        return None
    room = max(0, limit - prompt_tokens) // block_length * block_length
    while room and padded_tokens(prompt_tokens, room, block_length) > limit:
        room -= block_length
    remedy = f"ask for at most {room} new tokens" if room else "shorten the prompt"
    total = prompt_tokens + new_tokens
    return (
        f"{what}: prompt {prompt_tokens} + new {new_tokens} = {total} tokens take {padded} positions "
        f"in blocks of {block_length}, the limit is {limit}; {remedy}"
    )
