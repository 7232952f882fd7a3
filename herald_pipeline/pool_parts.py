"""The pools that methods are put together from: which layers each holds, and the bytes that a request needs of it."""

from dataclasses import dataclass
from functools import cached_property

from herald_pipeline.model import KVDtype, ModelShape
from herald_pipeline.pools import Home, Pool, RequestSize
from herald_pipeline.settings import Settings
from herald_pipeline.work import Forward


@dataclass(frozen=True)
class PoolParts:
    """Layers and pools for one model and one method's settings."""

    model: ModelShape
    settings: Settings

    @cached_property
    def forward(self) -> Forward:
        """Demand of the model's kernels."""
        return Forward(self.model, self.settings)

    @property
    def num_exact(self) -> int:
        """Layers that attend to the full prefix on the GPU."""
        return min(self.settings.exact_layers, self.model.num_layers)

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers."""
        return tuple(range(self.model.num_layers))

    @property
    def exact(self) -> tuple[int, ...]:
        """The first layers, which attend to the full prefix on the GPU."""
        return self.layers[: self.num_exact]

    @property
    def sparse(self) -> tuple[int, ...]:
        """Layers that attend to selected entries."""
        return self.layers[self.num_exact :]

    def full(self, home: Home) -> Pool:
        """The whole KV cache, all layers."""
        forward = self.forward
        entry = forward.host_kv_bytes if home is Home.DRAM else forward.device_kv_bytes
        size = len(self.layers) * entry
        return Pool(
            "full",
            home,
            self.layers,
            lambda request: request.tokens * size,
            pinned=home is Home.DRAM,
            purpose="the whole KV cache",
        )

    def keys8_pools(self) -> tuple[Pool, ...]:
        """The keys of layers that select once more in 8 bits, where ``settings.keys`` asks for them."""
        if self.settings.keys != "int8":
            return ()
        size = len(self.sparse) * self.forward.key8_bytes
        purpose = "a copy of the keys in 8 bits, which selection scans"
        return (Pool("keys8", Home.DRAM, self.sparse, lambda request: request.tokens * size, purpose=purpose),)

    def exact_pool(self) -> Pool:
        """Full KV of the exact layers, on the device."""
        size = self.num_exact * self.forward.device_kv_bytes
        return Pool(
            "exact",
            Home.HBM,
            self.exact,
            lambda request: request.tokens * size,
            purpose="full KV of the first layers, which always attend exactly",
        )

    def sparse_pool(self, buffers: int) -> Pool:
        """Selected entries, the tail block and the block's own KV, contiguous: prefix and block are one key range."""
        size = len(self.sparse) * self.forward.device_kv_bytes

        def bytes_per_request(request: RequestSize) -> float:
            return (request.selected_tokens + 2 * request.block_length) * size

        return Pool(
            "sparse",
            Home.HBM,
            self.sparse,
            bytes_per_request,
            buffers=buffers,
            purpose="selected entries" + (" (active and idle)" if buffers == 2 else ""),
        )

    def block_buffer(self, name: str, home: Home, purpose: str) -> Pool:
        """KV of one block in all layers."""
        forward = self.forward
        entry = forward.host_kv_bytes if home is Home.DRAM else forward.device_kv_bytes
        size = len(self.layers) * entry
        return Pool(
            name,
            home,
            self.layers,
            lambda request: request.block_length * size,
            pinned=home is Home.DRAM,
            purpose=purpose,
        )

    def gathered(self) -> Pool:
        """Pinned ring between gather and upload: the selected entries of one layer a place."""
        size = self.forward.device_kv_bytes
        return Pool(
            "gathered",
            Home.DRAM,
            self.sparse,
            lambda request: request.selected_tokens * size,
            buffers=self.settings.staging_buffers,
            shared=True,
            pinned=True,
            purpose="gathered entries on their way to the device",
        )

    def fetched(self) -> Pool:
        """Ring in device memory that takes the full KV of one layer a place."""
        size = self.forward.device_kv_bytes
        return Pool(
            "fetched",
            Home.HBM,
            self.sparse,
            lambda request: request.tokens * size,
            buffers=self.settings.staging_buffers,
            shared=True,
            purpose="a layer's full KV on its way through selection",
        )

    def exchange(self, queries: int) -> tuple[Pool, ...]:
        """Pinned buffers between GPU and CPU: queries with their own KV, outputs, and the selected indices."""
        model = self.model
        heads = model.num_heads + 2 * model.num_kv_heads
        query_bytes = queries * heads * model.head_dim * 4.0
        output_bytes = queries * model.num_heads * model.head_dim * 4.0
        layers = max(len(self.sparse), 1)

        def index_bytes(request: RequestSize) -> float:
            return layers * model.num_kv_heads * request.selected_tokens * 4.0

        return (
            Pool("query", Home.DRAM, self.layers, lambda _: query_bytes, shared=True, pinned=True),
            Pool("output", Home.DRAM, self.layers, lambda _: output_bytes, shared=True, pinned=True),
            Pool("indices", Home.DRAM, self.sparse, index_bytes),
        )

    def hidden(self) -> Pool:
        """What the last layer of a step 0 on a stream of its own leaves for the main stream's LM head."""
        # In what the model computes in, whatever KV is stored as.
        size = self.model.hidden_size * (4.0 if self.settings.kv_dtype is KVDtype.FP32 else 2.0)
        return Pool(
            "hidden",
            Home.HBM,
            self.layers[-1:],
            lambda request: request.block_length * size,
            purpose="a step 0's last hidden states, on their way to the LM head",
        )

    def prompt_ring(self) -> Pool:
        """A prompt's KV on its way to the host, two layers at a time."""
        size = self.forward.device_kv_bytes
        return Pool(
            "prompt",
            Home.HBM,
            self.layers,
            lambda request: request.tokens * size,
            buffers=2,
            shared=True,
            prompt_only=True,
            purpose="prefill: a layer's KV on its way to the host",
        )
