"""The stages that methods are put together from; a method module only chooses and orders them."""

from dataclasses import dataclass

from herald_pipeline.pool_parts import PoolParts
from herald_pipeline.pools import Access, Buffer, Region
from herald_pipeline.stages import (
    LaunchShape,
    Layout,
    OpKind,
    Rows,
    Section,
    Stage,
    Stream,
    Work,
    once,
)

MAIN = Stream("main")
RETRIEVAL = Stream("retrieval", high_priority=True)
GATHER = Stream("gather")
UPLOAD = Stream("h2d")
FETCH = Stream("h2d", high_priority=True)
"""Where the device fetches the rows that a step is about to read: the link is to be busy while the step computes.

Without priority a fetch would begin when a kernel of the step that fills the device has run out of programs.
"""
DOWNLOAD = Stream("d2h")

FULL_PREFIX = Access("full", Region.PREFIX)
FULL_BLOCK = Access("full", Region.BLOCK)
NEXT_TAIL = Access("sparse", Region.TAIL, Buffer.IDLE)
EXACT = (Access("exact", Region.PREFIX), Access("exact", Region.BLOCK))
HIDDEN = Access("hidden")


@dataclass(frozen=True)
class Parts(PoolParts):
    """Stages, and the pools they touch, for one model and one method's settings."""

    # Main stream -----------------------------------------------------------------------------------------------------

    def denoise_dense(self) -> Stage:
        """A step over the full KV in device memory."""
        model, forward = self.model, self.forward
        full = Access("full", Region.BLOCK)
        return Stage(
            "denoise",
            "denoise",
            "main",
            "gpu",
            lambda shape, _: forward.step(shape, sparse_from=model.num_layers),
            rows=Rows.RUNNING,
            reads=(FULL_PREFIX, full),
            writes=(full,),
            decides=True,
        )

    def denoise_sparse(self, *, double_buffered: bool, drafting: bool = False) -> Stage:
        """A step over the sparse pool, exact in the first layers.

        The completing forward leaves the block's clean KV where :meth:`append` takes it from: in the idle pool's tail
        (and in the exact pool) where pools are double-buffered, else in ``clean``. A draft group leaves its KV in
        ``draft_out``.
        """
        forward, first = self.forward, self.num_exact
        active = Buffer.ACTIVE if double_buffered else Buffer.ONE
        scratch = Access("sparse", Region.SCRATCH, active)
        reads = [Access("sparse", Region.SELECTED, active), scratch]
        completes = Access("clean")
        if double_buffered:
            reads.append(Access("sparse", Region.TAIL, active))
            completes = NEXT_TAIL
        exact_block = Access("exact", Region.BLOCK)
        return Stage(
            "denoise",
            "denoise",
            "main",
            "gpu",
            lambda shape, _: forward.step(shape, sparse_from=first),
            rows=Rows.RUNNING,
            reads=(*reads, *EXACT),
            writes=(scratch, exact_block),
            drafts=(Access("draft_out"),) if drafting else (),
            completes=(completes,),
            decides=True,
        )

    def swap(self) -> Stage:
        """The idle pool becomes the active one: no work, but a point that waits for both streams."""
        return Stage("swap", "swap", "main", "gpu", lambda _shape, _layer: (), rows=Rows.NEXT)

    # Copies of whole blocks ------------------------------------------------------------------------------------------

    def draft_down(self) -> Stage:
        """The draft's KV to its own buffer in host memory."""
        forward, layers = self.forward, len(self.layers)
        return Stage(
            "draft_down",
            "draft_down",
            "d2h",
            "d2h",
            lambda shape, _: once(forward.block_down(shape.rows, layers)),
            rows=Rows.NEXT,
            reads=(Access("draft_out"),),
            writes=(Access("draft"),),
        )

    def append(self, *, double_buffered: bool) -> Stage:
        """The completed block's clean KV to the full pool in host memory."""
        source = (NEXT_TAIL, Access("exact", Region.BLOCK)) if double_buffered else (Access("clean"),)
        forward, layers = self.forward, len(self.layers)
        return Stage(
            "append",
            "append",
            "d2h",
            "d2h",
            lambda shape, _: once(forward.block_down(shape.rows, layers)),
            reads=source,
            writes=(FULL_BLOCK, *self.keys8(Region.BLOCK)),
        )

    def keys8(self, region: Region) -> tuple[Access, ...]:
        """Access to the 8-bit keys, where there are any: they are kept in step with the full pool."""
        return (Access("keys8", region),) if self.settings.keys == "int8" else ()

    # Selection on the CPU --------------------------------------------------------------------------------------------

    def selection_pass(
        self, stream: str, *, queries: int, draft: bool, buffer: Buffer, rows: Rows, decides: bool = False
    ) -> Section:
        """Layer by layer: project, select on the CPU, finish (output and FFN) beside gather and upload.

        ``queries`` [MASK] tokens a row go through the model. With ``decides`` they are the whole block and the pass is
        its step 0: the last layer is finished too, and leaves what :meth:`decide` reads.
        """
        forward = self.forward
        on_gpu = self.settings.exact_layers_on == "gpu"
        cpu_layers = self.sparse if on_gpu else self.layers
        last = self.layers[-1]
        keeping = frozenset(self.sparse)
        fused = self.settings.gather == "fused"
        reads = [FULL_PREFIX, *self.keys8(Region.PREFIX), Access("query")]
        if draft:
            reads.append(Access("draft"))

        def tokens(shape: LaunchShape) -> int:
            return shape.rows * queries

        def project(shape: LaunchShape, _: int | None) -> Work:
            return once(forward.qkv(tokens(shape)), forward.down_queries(tokens(shape)))

        def select(shape: LaunchShape, layer: int | None) -> Work:
            found = forward.select(shape, queries, draft, keeps=layer in keeping)
            return (
                once(found, forward.gather(shape, OpKind.GATHER_FUSED)) if fused and layer in keeping else once(found)
            )

        def finish(shape: LaunchShape, layer: int | None) -> Work:
            n = tokens(shape)
            return once(forward.up_outputs(n), forward.output(n), *forward.ffn(n, layer or 0))

        def exact_layer(shape: LaunchShape, layer: int | None) -> Work:
            n = tokens(shape)
            attention = forward.attention(n, shape.prefix_tokens, queries * shape.prefix_tokens)
            return once(forward.qkv(n), attention, forward.output(n), *forward.ffn(n, layer or 0))

        def scanning(name: str, layers: tuple[int, ...], *writes: Access) -> Stage:
            written = (Access("output"), *writes)
            return Stage(name, "select", stream, "cpu", select, layers, rows, reads=tuple(reads), writes=written)

        stages = [Stage("project", "project", stream, "gpu", project, cpu_layers, rows, writes=(Access("query"),))]
        if fused:
            # Layers that select nothing take no place of the ring: they are a stage of their own.
            only_attends = tuple(layer for layer in cpu_layers if layer not in keeping)
            stages += [scanning("scan", only_attends)] if only_attends else []
            ring = Access("gathered", buffer=Buffer.RING)
            stages.append(scanning("select", self.sparse, Access("indices"), ring))
        else:
            stages.append(scanning("select", cpu_layers, Access("indices")))
        finished = tuple(layer for layer in cpu_layers if decides or layer != last)
        if finished:
            left = (HIDDEN,) if decides else ()
            stages.append(
                Stage("finish", "finish", stream, "gpu", finish, finished, rows, reads=(Access("output"),), writes=left)
            )
        stages += self.transfer(buffer, rows)
        if on_gpu and self.exact:
            stages.insert(
                0,
                Stage(
                    "exact_layer",
                    "exact_layer",
                    stream,
                    "gpu",
                    exact_layer,
                    self.exact,
                    rows,
                    reads=(Access("exact", Region.PREFIX),),
                ),
            )
        return Section(tuple(stages))

    def transfer(self, buffer: Buffer, rows: Rows) -> tuple[Stage, ...]:
        """Gather of a layer's selected entries into the pinned ring, and their upload into the sparse pool.

        With ``gather=fused`` selection has filled the ring; with ``gpu`` there is none, and the device reads the rows.
        """
        forward, how = self.forward, self.settings.gather

        def gather(shape: LaunchShape, _: int | None) -> Work:
            return once(forward.gather(shape))

        def upload(shape: LaunchShape, _: int | None) -> Work:
            return once(forward.up(shape.selected_tokens, Layout.ROWS if how == "gpu" else Layout.CONTIGUOUS))

        ring = Access("gathered", buffer=Buffer.RING)
        found = Stage(
            "upload",
            "fetch_rows" if how == "gpu" else "upload",
            "h2d",
            "h2d",
            upload,
            self.sparse,
            rows,
            reads=(FULL_PREFIX, Access("indices")) if how == "gpu" else (ring,),
            writes=(Access("sparse", Region.SELECTED, buffer),),
        )
        if how != "cpu":
            return (found,)
        return (
            Stage(
                "gather",
                "gather",
                "gather",
                "cpu",
                gather,
                self.sparse,
                rows,
                reads=(FULL_PREFIX, Access("indices")),
                writes=(ring,),
            ),
            found,
        )

    def copy_streams(self) -> tuple[Stream, ...]:
        """Streams of a method that selects on the CPU, beside those in which it computes."""
        return (GATHER, UPLOAD, DOWNLOAD) if self.settings.gather == "cpu" else (UPLOAD, DOWNLOAD)

    def decide(self, reads: tuple[Access, ...] = ()) -> Section:
        """LM head and acceptance of a step 0 that ran layer by layer; ``reads``: where it was on another stream."""
        forward = self.forward

        def work(shape: LaunchShape, _: int | None) -> Work:
            return once(*forward.head(shape.tokens))

        return Section((Stage("decide", "decide", "main", "gpu", work, rows=Rows.COHORT, reads=reads, decides=True),))

    def decide_step(self) -> Stage:
        """LM head and acceptance that end a step which goes layer by layer."""
        forward = self.forward

        def work(shape: LaunchShape, _: int | None) -> Work:
            head = forward.head(shape.masked_tokens)
            return once(*head) if head else ()

        return Stage("decide", "decide", "main", "gpu", work, rows=Rows.RUNNING, decides=True)

    # Prefill ---------------------------------------------------------------------------------------------------------

    def prefill(self, offload: bool, writes: tuple[Access, ...]) -> tuple[Section, ...]:
        """The prompt and a [MASK] block through each layer; ``writes`` is what stays on the device.

        With ``offload`` each layer's KV leaves for the host as soon as it has been computed (and selected from).
        """
        forward = self.forward
        ring = Access("prompt", buffer=Buffer.RING)

        def work(shape: LaunchShape, layer: int | None) -> Work:
            return once(*forward.prefill_layer(layer or 0, shape))

        def down(shape: LaunchShape, _: int | None) -> Work:
            return once(forward.down(shape.prefix_tokens, 1))

        stages = [
            Stage(
                "prefill",
                "prefill",
                "main",
                "gpu",
                work,
                self.layers,
                writes=(*writes, *((ring,) if offload else ())),
            )
        ]
        if offload:
            stages.append(
                Stage(
                    "offload",
                    "offload",
                    "d2h",
                    "d2h",
                    down,
                    self.layers,
                    reads=(ring,),
                    writes=(FULL_BLOCK, *self.keys8(Region.BLOCK)),
                )
            )
        return (Section(tuple(stages)),)
