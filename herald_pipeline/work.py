"""Demand of each kind of launch, from the model's shape: FLOPs, bytes, tokens. Arithmetic only, no rates.

A multiply-add counts as two FLOPs. Activations between kernels are not counted: the engine's fixed cost per layer
carries them. Attention reads each KV entry once per launch, whatever the number of queries.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from herald_pipeline.model import ModelShape
from herald_pipeline.settings import INT8_CANDIDATES, INT8_HEAVIEST, Settings
from herald_pipeline.stages import LaunchShape, Layout, Op, OpKind, Repeat, Work

WEIGHT_BYTES = 2.0
"""bf16 weights."""
ACTIVATION_BYTES = 2.0
_MAX_KNOWN = 4096
_SELECT_OF = {"full": OpKind.SELECT, "key-only": OpKind.SELECT_KEYS, "int8": OpKind.SELECT_INT8}
"""What selection reads (``settings.keys``) -> its kind."""
LOGIT_BYTES = 4.0
"""Logits are fp32 in every engine read (research: confidences are too)."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Ops of a transformer forward for one model and one method's settings."""

    model: ModelShape
    settings: Settings
    _known: dict[tuple[str, int, int], Op] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Ops that depend on the number of tokens alone: the same object for every block."""
    _layers: dict[tuple[int, bool], tuple[Op, tuple[Op, ...]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _runs: dict[int, tuple[tuple[int, int, bool], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Of a step that is sparse from a layer on: first layer, count and sparsity of each run of equal layers."""

    @property
    def device_kv_bytes(self) -> float:
        """Bytes of one position's K and V in one layer, on the device and on the link."""
        return self.model.kv_bytes_per_token_layer(self.settings.kv_dtype)

    @property
    def host_kv_bytes(self) -> float:
        """Bytes of one position's K and V in one layer, in host memory."""
        return self.model.kv_bytes_per_token_layer(self.settings.dram_kv_dtype)

    def _matrix(self, kind: OpKind, tokens: int, params: int) -> Op:
        key = (kind, tokens, params)
        known = self._known.get(key)
        if known is None:
            weights = params * WEIGHT_BYTES
            known = Op(kind, tokens, 2.0 * tokens * params, hbm_bytes=weights, weight_bytes=weights)
            self._remember(key, known)
        return known

    def _copy(self, direction: str, tokens: int, size: int) -> Op:
        """``size`` bytes a token over the link, between device and host memory."""
        key = (direction, tokens, size)
        known = self._known.get(key)
        if known is None:
            total = float(tokens * size)
            down, up = (total, 0.0) if direction == "down" else (0.0, total)
            known = Op(OpKind.COPY, d2h_bytes=down, h2d_bytes=up, dram_bytes=total)
            self._remember(key, known)
        return known

    def _remember(self, key: tuple[str, int, int], op: Op) -> None:
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[key] = op

    def qkv(self, tokens: int) -> Op:
        """Query, key and value projection."""
        model = self.model
        heads = model.num_heads + 2 * model.num_kv_heads
        return self._matrix(OpKind.QKV, tokens, model.hidden_size * heads * model.head_dim)

    def output(self, tokens: int) -> Op:
        """Output projection of attention."""
        model = self.model
        params = model.num_heads * model.head_dim * model.hidden_size
        return self._matrix(OpKind.OUTPUT, tokens, params)

    def ffn(self, tokens: int, layer: int) -> tuple[Op, ...]:
        """Feed-forward of ``layer``: one dense op, or the shared part and the routed experts.

        The experts op names the bytes of **all** experts; how many of them the tokens hit is the cost model's answer.
        """
        model = self.model
        if model.moe is None or layer < model.moe.first_dense_layers:
            return (self._matrix(OpKind.FFN, tokens, model.dense_ffn_params),)
        moe = model.moe
        key = (OpKind.EXPERTS, tokens, 0)
        experts = self._known.get(key)
        if experts is None:
            weights = moe.num_experts * model.expert_params * WEIGHT_BYTES
            experts = Op(
                OpKind.EXPERTS,
                tokens,
                2.0 * tokens * moe.experts_per_token * model.expert_params,
                hbm_bytes=weights,
                weight_bytes=weights,
            )
            self._remember(key, experts)
        return (self._matrix(OpKind.FFN, tokens, model.shared_ffn_params), experts)

    def attention(self, tokens: int, keys: int, pairs: int) -> Op:
        """Attention of ``tokens`` queries; ``keys`` entries are read, ``pairs`` query-key pairs are scored."""
        model = self.model
        kv_bytes = self.device_kv_bytes
        return Op(
            OpKind.ATTENTION,
            tokens,
            4.0 * pairs * model.num_heads * model.head_dim,
            hbm_bytes=(keys + tokens) * kv_bytes,
        )

    def head(self, tokens: int) -> tuple[Op, ...]:
        """LM head and acceptance over ``tokens`` masked positions; one pass over fp32 logits is counted."""
        if tokens == 0:
            return ()
        model = self.model
        key = (OpKind.SAMPLE, tokens, 0)
        sample = self._known.get(key)
        if sample is None:
            sample = Op(OpKind.SAMPLE, tokens, hbm_bytes=tokens * model.vocab_size * LOGIT_BYTES)
            self._remember(key, sample)
        return (self._matrix(OpKind.HEAD, tokens, model.hidden_size * model.vocab_size), sample)

    def layer(self, layer: int, shape: LaunchShape, sparse: bool) -> tuple[Op, ...]:
        """One layer of a denoise step over the full prefix or over the selected entries and the tail."""
        qkv, rest = self._around(shape.tokens, layer)
        return (qkv, self._step_attention(shape, sparse), *rest)

    def _step_attention(self, shape: LaunchShape, sparse: bool) -> Op:
        keys = shape.selected_tokens + shape.tail_tokens if sparse else shape.prefix_tokens
        pairs = shape.selected_pairs if sparse else shape.prefix_pairs
        # Every query also sees its own group of B positions.
        return self.attention(shape.tokens, keys, pairs + shape.tokens * self.settings.block_length)

    def _around(self, tokens: int, layer: int) -> tuple[Op, tuple[Op, ...]]:
        """What comes before attention in a layer, and what comes after: the same objects for the same tokens."""
        key = (tokens, layer < self.model.num_dense_layers)
        known = self._layers.get(key)
        if known is None:
            if len(self._layers) >= _MAX_KNOWN:
                self._layers.clear()
            rest = (self.output(tokens), *self.ffn(tokens, layer))
            known = self._layers[key] = (self.qkv(tokens), rest)
        return known

    def step(self, shape: LaunchShape, sparse_from: int) -> Work:
        """A whole denoise step; layers from ``sparse_from`` on attend to the sparse pool."""
        runs = self._runs.get(sparse_from)
        if runs is None:
            runs = self._runs[sparse_from] = self._equal_layers(sparse_from)
        # Runs of either kind share its attention: the dense layers differ in what follows alone.
        attention: dict[bool, Op] = {}
        work = []
        for start, count, sparse in runs:
            if sparse not in attention:
                attention[sparse] = self._step_attention(shape, sparse)
            qkv, rest = self._around(shape.tokens, start)
            work.append(Repeat(count, (qkv, attention[sparse], *rest)))
        head = self.head(shape.masked_tokens)
        if head:
            work.append(Repeat(1, head))
        return tuple(work)

    def _equal_layers(self, sparse_from: int) -> tuple[tuple[int, int, bool], ...]:
        borders = {0, sparse_from, self.model.num_dense_layers, self.model.num_layers}
        cuts = sorted(border for border in borders if 0 <= border <= self.model.num_layers)
        return tuple((start, stop - start, start >= sparse_from) for start, stop in pairwise(cuts))

    def down_queries(self, tokens: int) -> Op:
        """Queries, and the own key and value of each, to the host (fp32, as the CPU kernel reads them)."""
        model = self.model
        heads = model.num_heads + 2 * model.num_kv_heads
        return self._copy("down", tokens, heads * model.head_dim * 4)

    def up_outputs(self, tokens: int) -> Op:
        """Attention outputs back to the device (fp32)."""
        return self._copy("up", tokens, self.model.num_heads * self.model.head_dim * 4)

    @property
    def key8_bytes(self) -> float:
        """Bytes of one position's keys in 8 bits in one layer: rows padded to 32 bytes, and an fp32 scale each."""
        return self.model.num_kv_heads * (-(-self.model.head_dim // 32) * 32 + 4.0)

    def select(self, shape: LaunchShape, queries: int, draft: bool, keeps: bool = True) -> Op:
        """Attention and importance of ``queries`` [MASK] queries a row over the full prefix, in host memory.

        A layer that ``keeps`` nothing of it (an exact one) reads all keys and values whatever ``settings.keys`` says.
        """
        extra, prefix = shape.rows * self.settings.block_length if draft else 0, shape.prefix_tokens
        model, keys = self.model, self.settings.keys if keeps else "full"
        row = self.host_kv_bytes
        if keys == "full":
            entries = 1.0 * (prefix + extra)  # totals may be arrays: fast mode asks for many blocks at once
            num_bytes = (prefix + extra) * row
        elif keys == "key-only":
            entries = (prefix + shape.selected_tokens) / 2 + extra
            num_bytes = entries * row
        else:
            again = (self.scored_again(shape.selected_tokens, prefix) + shape.selected_tokens) / 2 + extra
            entries, num_bytes = prefix / 2 + again, prefix * self.key8_bytes + again * row
        return Op(
            _SELECT_OF[keys],
            shape.rows * queries,
            cpu_flops=4.0 * queries * entries * model.num_heads * model.head_dim,
            dram_bytes=num_bytes,
            queries=queries,
            beside_copy_bytes=self._uploaded_bytes(shape) if keeps else 0.0,
            # A scan that gathers by itself (``gather=fused``) counts the gather's bytes as its own.
            beside_gather_bytes=self.gather(shape).dram_bytes if keeps and self.settings.gather == "cpu" else 0.0,
        )

    def _uploaded_bytes(self, shape: LaunchShape) -> float:
        """Bytes that the upload of a layer's selected entries reads in host memory."""
        return shape.selected_tokens * self.device_kv_bytes

    @staticmethod
    def scored_again(selected: int, prefix: int) -> float:
        """Positions whose keys are read again behind a scan of 8-bit keys: the budget's border and the heaviest."""
        last, first = INT8_CANDIDATES * selected, selected / INT8_CANDIDATES
        last = (prefix + last - abs(prefix - last)) / 2  # the smaller one, of arrays as well
        return last - first + INT8_HEAVIEST * first

    def gather(self, shape: LaunchShape, kind: OpKind = OpKind.GATHER) -> Op:
        """Copy of the selected entries into a contiguous buffer: each byte is read and written once."""
        entries = shape.selected_tokens
        beside = 0.0 if kind is OpKind.GATHER_FUSED else self._uploaded_bytes(shape)
        size = entries * (self.host_kv_bytes + self.device_kv_bytes)
        return Op(kind, dram_bytes=size, beside_copy_bytes=beside)

    def up(self, entries: int, layout: Layout, layers: int = 1) -> Op:
        """KV of ``entries`` positions in each of ``layers`` layers to the device."""
        size = entries * layers * self.device_kv_bytes
        return Op(OpKind.COPY, h2d_bytes=size, dram_bytes=size, layout=layout)

    def down(self, entries: int, layers: int) -> Op:
        """KV of ``entries`` positions in each of ``layers`` layers to the host."""
        size = entries * layers * self.device_kv_bytes
        return Op(OpKind.COPY, d2h_bytes=size, dram_bytes=size)

    def block_down(self, rows: int, layers: int) -> Op:
        """KV of the block of ``rows`` rows in each of ``layers`` layers to the host, one object for all blocks."""
        key = ("block down", rows, layers)
        known = self._known.get(key)
        if known is None:
            known = self.down(rows * self.settings.block_length, layers)
            self._remember(key, known)
        return known

    def top_k(self, shape: LaunchShape) -> Op:
        """Importance and top-k of a layer on the GPU: two passes over fp32 scores summed over the group."""
        size = 2 * shape.prefix_tokens * self.model.num_kv_heads * LOGIT_BYTES
        return Op(OpKind.TOP_K, shape.rows, hbm_bytes=size)

    def proxy(self, shape: LaunchShape) -> Op:
        """InfiniGen's speculated scores: partial keys of ``proxy_fraction`` of the head dimension, on the GPU."""
        model, fraction = self.model, self.settings.proxy_fraction
        return Op(
            OpKind.PROXY,
            shape.tokens,
            2.0 * shape.prefix_pairs * model.num_heads * model.head_dim * fraction,
            hbm_bytes=shape.prefix_tokens * self.device_kv_bytes / 2 * fraction,
        )

    def prefill_layer(self, layer: int, shape: LaunchShape) -> tuple[Op, ...]:
        """One layer of a prompt's forward with its [MASK] block: block-causal attention."""
        tokens = shape.prefix_tokens + shape.rows * self.settings.block_length
        mean = shape.prefix_tokens / max(shape.rows, 1)
        pairs = int(tokens * mean / 2)
        return (
            self.qkv(tokens),
            self.attention(tokens, shape.prefix_tokens, pairs),
            self.output(tokens),
            *self.ffn(tokens, layer),
        )
