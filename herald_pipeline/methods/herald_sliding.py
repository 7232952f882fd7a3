"""A block that slides over HERALD's pools: retrieval is triggered by committed tokens instead of block ends.

DSB lets the active block follow what has been committed, in models whose attention is bidirectional and whose KV is
approximate anyway. HERALD serves block-causal models, whose clean KV is exact: a position's KV is final once its block
is complete and has been forwarded once more, seeing itself and everything left of it. That forbids the plain port.
A slide by a single token would leave clean KV that saw masks, and a pool swap for each token would move the pool's
bytes over the link for each token. So the slide has a stride, and the stride is what is made final at a time:

- *Period*: R committed tokens, the description's ``block_length``. It ends when the R leftmost positions of the window
  are committed, which is when s has moved by R since the last retrieval. Pools are then swapped.
- *Window*: the ``window_blocks`` x R positions [s, s + W) from the leftmost period on. Every forward computes all of
  it; tokens may be committed anywhere in it. What was committed right of the period stays when the window slides, so
  the next period begins with part of it done and takes fewer steps (that is all that sliding can gain).
- *Sight*: a window is read as blocks of the model's B from its own start. With W = B its positions see one another, as
  a block's did in training; rotary positions are relative, so that a block may begin anywhere. A wider window is
  block-causal. The prompt's clean KV stays that of the model's own blocks.
- *Clean KV*: as HERALD's, by the forward behind the period's last commit. It computes the R tokens once more, and they
  see no position right of them; the rest of the window goes along and may commit what is sure. R tokens leave through
  the idle pool's tail, the other W - R positions have scratch KV only, written over by every step.
- *Draft*: the window's positions that are not committed yet, by argmax, with those that are, as they are: W positions,
  seen as in the completing forward. The first R stand for the prefix that the next period will have, the others are
  its own first part. (A period of one step drafts in its completing forward: what is behind it is masks there.)
- *Retrieval* of the next period: one representative query, index W // 2 of the next window [s + R, s + R + W), over the
  prefix and the draft up to the query, beside this period's steps. Its selection holds for all of the next window.
- *A step at least*: a period that was committed ahead still takes one, which is not forced to commit anything. The
  draft comes out of it, and the retrieval needs the time.

Two strides make sense. R < B with W = B keeps a forward's size and what its positions see, but clean KV comes in
smaller blocks than were trained, and retrieval must scan the prefix B / R times as often: where the scan binds,
throughput falls by that factor. R = B (the default, with W = 2 B) keeps clean KV exactly as the model was trained, and
only commits in the window's right part are a leap: they are made beside a left part that still holds masks, which a
block-causal model never saw in training. ``--set settings.window_blocks=1`` is HERALD, stage by stage and token for
token.

Steps are given per period. Sliding loses unless they fall by more than a forward grows; how far they fall is the
model's matter: ``python -m herald_exec.evaluation sliding`` measures it, with what it costs in accuracy, and
``docs/accuracy.md`` has what it found on the reference model.
"""

from dataclasses import replace

from herald_pipeline.methods import herald
from herald_pipeline.methods.base import Axes, Method
from herald_pipeline.parts import Parts
from herald_pipeline.pools import Pool, RequestSize
from herald_pipeline.settings import Settings
from herald_pipeline.stages import LaunchShape, OpKind, Section, Stage, Template, Work, once
from herald_pipeline.work import Forward


def widen(shape: LaunchShape, blocks: int, period: int) -> LaunchShape:
    """Totals of forwards over windows of ``blocks`` periods, from those over one period of ``period`` tokens.

    A completing forward has no masks in its own period; the rest of the window goes along and does.
    """
    return shape._replace(
        tokens=shape.tokens * blocks,
        masked_tokens=shape.masked_tokens * blocks + shape.completed_rows * (blocks - 1) * period,
        prefix_pairs=shape.prefix_pairs * blocks,
        selected_pairs=shape.selected_pairs * blocks,
    )


def _grown(pool: Pool, extra_bytes: float) -> Pool:
    """``pool`` with ``extra_bytes`` more a request in each buffer."""
    before = pool.bytes_per_request

    def bytes_per_request(request: RequestSize) -> float:
        return before(request) + extra_bytes

    return replace(pool, bytes_per_request=bytes_per_request)


def build(parts: Parts) -> tuple[Template, tuple[Pool, ...]]:
    """HERALD's template over periods; forwards, draft and draft buffers have the window's length."""
    blocks, period = parts.settings.window_blocks, parts.settings.block_length
    window = Parts(parts.model, parts.settings.replace(block_length=blocks * period, queries=parts.settings.queries))
    forward, first, layers = window.forward, parts.num_exact, len(parts.layers)
    # A selection reads the draft before its first query; how many queries ask does not change what it reads.
    read = parts.settings.replace(block_length=parts.settings.drafted_tokens, queries=1)
    asked = Forward(parts.model, read)

    def denoise(shape: LaunchShape, _: int | None) -> Work:
        return forward.step(widen(shape, blocks, period), sparse_from=first)

    def draft_down(shape: LaunchShape, _: int | None) -> Work:
        return once(forward.block_down(shape.rows, layers))

    def select(shape: LaunchShape, layer: int | None) -> Work:
        found = asked.select(shape, parts.settings.queries, draft=True, keeps=layer in parts.sparse)
        copies = parts.settings.gather == "fused" and layer in parts.sparse
        return once(found, forward.gather(shape, OpKind.GATHER_FUSED)) if copies else once(found)

    def prefill(shape: LaunchShape, layer: int | None) -> Work:
        return once(*forward.prefill_layer(layer or 0, shape))

    work = {"denoise": denoise, "draft_down": draft_down, "scan": select, "select": select, "prefill": prefill}

    def over_window(stage: Stage) -> Stage:
        return replace(stage, work=work.get(stage.name, stage.work))

    def sections(of: tuple[Section, ...]) -> tuple[Section, ...]:
        return tuple(Section(tuple(map(over_window, section.stages))) for section in of)

    template, pools = herald.build(parts)
    further, device, host = (blocks - 1) * period, forward.device_kv_bytes, forward.host_kv_bytes
    extra = {
        "exact": further * len(parts.exact) * device,
        "sparse": further * len(parts.sparse) * device,
        "draft_out": further * layers * device,
        "draft": further * layers * host,
    }
    template = replace(
        template,
        prefill=sections(template.prefill),
        denoise=over_window(template.denoise),
        after_step={step: sections(of) for step, of in template.after_step.items()},
    )
    return template, tuple(_grown(pool, extra.get(pool.name, 0.0)) for pool in pools)


METHOD = Method(
    "herald-sliding",
    "HERALD with a sliding window: retrieval every R committed tokens, forwards over window_blocks x R positions",
    Axes(
        "dram",
        "1 query, cpu, during the previous period",
        "draft (the window) and committed KV down; selected KV up, once a period",
        "gpu sparse",
        "retrieval beside main",
        "sparse[active|idle], exact, draft, all with the window's positions",
    ),
    build,
    Settings(budget=0.05, queries=1, window_blocks=2),
    assumptions=(
        "our own question, in neither paper: block_length is R, the committed tokens between retrievals, and steps are "
        "those of a period of R tokens",
        "how many steps a period takes follows from the model: python -m herald_exec.evaluation sliding measures it on "
        "the reference model; a period that was committed ahead takes one all the same",
        "the period ends when the window's R leftmost positions are committed; a longer run of committed tokens waits "
        "for the next period, so that all swaps have one size",
        "a window is read as blocks of the model's B from its own start; with W above B, commits right of the first of "
        "them were made beside masks that a block-causal model has not seen in training",
        "R below the model's trained block length changes its clean KV as well",
        "planned steps commit a period's tokens alone; confidences also commit ahead of it",
        "the representative is index W // 2 of the next window; selection reads the draft up to its first query",
    ),
)
