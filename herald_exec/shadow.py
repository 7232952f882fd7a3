"""ShadowKV's shadow of the KV cache: low-rank keys and landmarks on the device, values in host memory.

Per layer and slot the device holds ``rank`` coefficients a position and the basis that turns them into keys before
RoPE, a landmark a chunk, and in full the keys of outlier chunks and of the newest chunks. The basis is that of the
prompt's right singular vectors, taken as eigenvectors of K^T K: always orthonormal and of full size, so that at full
rank any key, also of a later block, comes back. Actions are in :mod:`herald_exec.shadow_actions`.
"""

import numpy as np
import torch
from torch import Tensor

from herald_exec.models.base import BlockModel
from herald_exec.models.layers import Rotary, rotate
from herald_exec.pools import TORCH_DTYPES
from herald_pipeline.errors import RunError
from herald_pipeline.methods.shadowkv import CHUNK, LOCAL_CHUNKS, RANK, outlier_chunks
from herald_pipeline.pools import RequestSize
from herald_pipeline.settings import Settings


def basis_of(keys: Tensor, rank: int) -> Tensor:
    """Right singular vectors ``[D, rank]`` of ``keys [n, D]`` with the largest singular values; any n, also 0."""
    wide = keys.double()
    vectors: Tensor = torch.linalg.eigh(wide.T @ wide).eigenvectors
    return vectors.flip(-1)[:, :rank]


def chunk_means(keys: Tensor) -> Tensor:
    """Landmarks ``[kv, n // 8, d]`` in fp32 of ``keys [kv, n, d]``; what fills no chunk is left out."""
    heads, count, dim = keys.shape
    return keys[:, : count // CHUNK * CHUNK].view(heads, -1, CHUNK, dim).float().mean(dim=2)


def outliers_of(keys: Tensor, landmarks: Tensor, count: int) -> Tensor:
    """Chunks ``[kv, count]`` of which some key is least like its landmark (smallest cosine), ascending."""
    heads, chunks, dim = landmarks.shape
    members = keys[:, : chunks * CHUNK].view(heads, chunks, CHUNK, dim).float()
    least = torch.cosine_similarity(members, landmarks[:, :, None], dim=-1).amin(dim=-1)
    return least.argsort(dim=-1, stable=True)[:, :count].sort(dim=-1).values


def chunk_scores(queries: Tensor, landmarks: Tensor, excluded: Tensor) -> Tensor:
    """Scores ``[kv, C]`` of landmarks ``[kv, C, d]``: softmax over those that are not ``excluded [kv, C]``.

    Summed over the queries ``[n, heads, d]``; of a KV head's query heads the largest sum counts.
    """
    count, _, dim = queries.shape
    folded = queries.view(count, landmarks.shape[0], -1, dim).permute(1, 2, 0, 3).float() * dim**-0.5
    scores = folded @ landmarks.float().transpose(-2, -1)[:, None]
    out = excluded[:, None, None]
    weights = scores.masked_fill(out, float("-inf")).softmax(dim=-1)
    # Where all are excluded the softmax is of nothing.
    summed: Tensor = weights.masked_fill(out, 0.0).sum(dim=2)
    return summed.amax(dim=1)


def choose(scores: Tensor, outliers: Tensor, prefix: int, count: int) -> Tensor:
    """Positions ``[kv, count]`` of a prefix, ascending, from chunk ``scores [kv, C]``.

    In this order until ``count`` are found: positions behind the last chunk, the newest chunks from the newest on,
    ``outliers [kv, C]``, then chunks by falling score (the lower chunk first where equal). The last chunk is cut.
    """
    heads, chunks = scores.shape
    first_local = max(0, chunks - LOCAL_CHUNKS)
    ranked = scores.masked_fill(outliers, float("inf"))[:, :first_local].argsort(dim=-1, descending=True, stable=True)
    newest = torch.arange(chunks - 1, first_local - 1, -1, device=scores.device).expand(heads, -1)
    order = torch.cat([newest, ranked], dim=1)
    inside = torch.arange(CHUNK, device=scores.device)
    behind = torch.arange(chunks * CHUNK, prefix, device=scores.device).expand(heads, -1)
    positions = torch.cat([behind, (order[..., None] * CHUNK + inside).flatten(1)], dim=1)
    return positions[:, :count].sort(dim=-1).values


class Shadow:
    """The shadow of ``slots`` requests of up to ``size`` in all layers, and their values in host memory.

    Attributes
    ----------
    picked
        Per layer and slot, the newest positions picked: ``[kv, k]`` on the device and in host memory.
    """

    def __init__(
        self, model: BlockModel, settings: Settings, slots: int, size: RequestSize, rank: int | None = None
    ) -> None:
        shape, device, dtype = model.shape, model.device, model.kv_dtype
        self.model = model
        self.rank = min(rank or RANK, shape.num_kv_heads * shape.head_dim)
        heads, dim = shape.num_kv_heads, shape.head_dim
        most_outliers = outlier_chunks(size.selected_tokens)

        def zeros(*dims: int) -> Tensor:
            return torch.zeros(shape.num_layers, slots, *dims, dtype=dtype, device=device)

        self._basis = zeros(heads * dim, self.rank)
        self._coefficients = zeros(size.tokens, self.rank)
        self._landmarks = zeros(heads, size.tokens // CHUNK, dim)
        self._outlier_keys = zeros(heads, most_outliers * CHUNK, dim)
        self._newest_keys = zeros(heads, (LOCAL_CHUNKS + 1) * CHUNK, dim)
        # Place of a chunk among the outliers of its KV head, -1 for others.
        places = (shape.num_layers, slots, heads, size.tokens // CHUNK)
        self._places = torch.full(places, -1, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        host = TORCH_DTYPES[settings.dram_kv_dtype]
        self._values = torch.zeros(shape.num_layers, slots, heads, size.tokens, dim, dtype=host, pin_memory=pinned)
        self._lengths = np.zeros((shape.num_layers, slots), np.int64)
        self._staged = torch.zeros(slots, heads * size.selected_tokens * dim, dtype=dtype, pin_memory=pinned)
        self.picked: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def _parts(self) -> tuple[Tensor, ...]:
        return (
            self._basis,
            self._coefficients,
            self._landmarks,
            self._outlier_keys,
            self._newest_keys,
            self._places,
            self._values,
            self._staged,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device and in host memory."""
        return sum(part.nbytes for part in self._parts())

    @property
    def host_bytes(self) -> int:
        """Those in host memory: values, and what is on its way up."""
        return self._values.nbytes + self._staged.nbytes

    # Keys ------------------------------------------------------------------------------------------------------------

    def factor(self, layer: int, slot: int, keys: Tensor, outliers: int) -> None:
        """Begin a slot with a prompt's ``keys [kv, S, d]``, ``outliers`` chunks of each KV head kept whole."""
        heads, count, dim = keys.shape
        joined = self._plain(keys, 0)
        basis = basis_of(joined, self.rank)
        self._basis[layer, slot] = basis
        self._coefficients[layer, slot, :count] = joined @ basis.to(joined.dtype)
        landmarks = chunk_means(keys)
        chunks = landmarks.shape[1]
        self._landmarks[layer, slot, :, :chunks] = landmarks
        found = outliers_of(keys, landmarks, min(outliers, chunks))
        kept = found.shape[1]
        places = self._places[layer, slot]
        places.fill_(-1)
        order = torch.arange(kept, dtype=torch.int32, device=keys.device)
        places.scatter_(1, found, order.expand(heads, -1).contiguous())
        index = (found[..., None] * CHUNK + torch.arange(CHUNK, device=keys.device)).flatten(1)
        self._outlier_keys[layer, slot, :, : kept * CHUNK] = keys.gather(1, index[..., None].expand(-1, -1, dim))
        first = _first_local(count)
        self._newest_keys[layer, slot, :, : count - first] = keys[:, first:]

    def fold(self, layer: int, slot: int, start: int, keys: Tensor) -> None:
        """Completed positions ``[start, start + n)`` with ``keys [kv, n, d]`` join the shadow."""
        joined = self._plain(keys, start)
        end = start + keys.shape[1]
        self._coefficients[layer, slot, start:end] = joined @ self._basis[layer, slot].to(joined.dtype)
        first = _first_local(start)
        whole = torch.cat([self._newest_keys[layer, slot, :, : start - first], keys], dim=1)
        chunk = start // CHUNK
        means = chunk_means(whole[:, chunk * CHUNK - first :])
        self._landmarks[layer, slot, :, chunk : chunk + means.shape[1]] = means
        rest = whole[:, _first_local(end) - first :]
        self._newest_keys[layer, slot, :, : rest.shape[1]] = rest

    def pick(self, layer: int, slot: int, queries: Tensor, prefix: int, count: int) -> Tensor:
        """Positions ``[kv, count]`` of the prefix that ``queries [B, heads, d]`` choose, ascending."""
        chunks = prefix // CHUNK
        outliers = self._places[layer, slot, :, :chunks] >= 0
        newest = torch.arange(chunks, device=outliers.device) >= chunks - LOCAL_CHUNKS
        scores = chunk_scores(queries, self._landmarks[layer, slot, :, :chunks], outliers | newest)
        return choose(scores, outliers, prefix, count)

    def keys_at(self, layer: int, slot: int, positions: Tensor, prefix: int) -> Tensor:
        """Keys ``[kv, k, d]`` of ``positions [kv, k]``: rebuilt, or whole where they are kept so."""
        heads, count = positions.shape
        if not count:
            return self._newest_keys[layer, slot, :, :0]
        basis = self._basis[layer, slot].view(heads, -1, self.rank)
        plain = self._coefficients[layer, slot][positions] @ basis.transpose(-2, -1)
        dim = plain.shape[-1]
        keys = rotate(plain.view(-1, 1, dim), self.model.rotary(positions.flatten())).view(heads, count, dim)
        first = _first_local(prefix)
        keys = _replaced(keys, self._newest_keys[layer, slot], positions - first)
        if self._outlier_keys.shape[3]:
            chunk = (positions // CHUNK).clamp(max=max(prefix // CHUNK - 1, 0))
            place = self._places[layer, slot].gather(1, chunk).long()
            at = torch.where((place >= 0) & (positions < first), place * CHUNK + positions % CHUNK, -1)
            keys = _replaced(keys, self._outlier_keys[layer, slot], at)
        return keys

    def _plain(self, keys: Tensor, start: int) -> Tensor:
        """Keys before RoPE, KV heads joined: ``[n, D]`` in fp32. Turning back is exact but for rounding."""
        turned = keys.transpose(0, 1).float()
        rotary = self.model.rotary(torch.arange(start, start + len(turned), device=keys.device))
        return rotate(turned, Rotary(rotary.cos, -rotary.sin)).flatten(1)

    # Values ----------------------------------------------------------------------------------------------------------

    def store_values(self, layer: int, slot: int, start: int, values: Tensor) -> None:
        """Write ``values [kv, n, d]`` behind the ``start`` positions that are there already; 0 begins the slot anew."""
        held = int(self._lengths[layer, slot])
        if start not in (0, held):
            raise RunError(f"layer {layer}, slot {slot}: {held} values are stored, the next write begins at {start}")
        end = start + values.shape[1]
        self._values[layer, slot, :, start:end] = values.to("cpu", self._values.dtype)
        self._lengths[layer, slot] = end

    def values(self, layer: int, slot: int) -> Tensor:
        """Values stored, ``[kv, n, d]``."""
        return self._values[layer, slot, :, : int(self._lengths[layer, slot])]

    def stage_values(self, layer: int, slot: int, positions: Tensor) -> None:
        """Gather the values of ``positions [kv, k]`` to where the upload takes them from."""
        stored = self.values(layer, slot)
        if positions.numel() and int(positions.max()) >= stored.shape[1]:
            message = f"position {int(positions.max())} is read, {stored.shape[1]} are stored"
            raise RunError(f"layer {layer}, slot {slot}: {message}")
        index = positions[..., None].expand(-1, -1, stored.shape[-1])
        self.staged(slot, positions.shape[1]).copy_(stored.gather(1, index))

    def staged(self, slot: int, count: int) -> Tensor:
        """A slot's gathered values ``[kv, count, d]``, contiguous."""
        heads, dim = self._values.shape[2], self._values.shape[4]
        return self._staged[slot, : heads * count * dim].view(heads, count, dim)

    def close(self) -> None:
        """Free the memory."""
        empty = torch.empty(0)
        self._basis = self._coefficients = self._landmarks = self._outlier_keys = self._newest_keys = empty
        self._places = self._values = self._staged = empty
        self.picked.clear()


def _first_local(prefix: int) -> int:
    """First position of the newest chunks of a prefix, whose keys are kept whole."""
    return max(0, prefix // CHUNK - LOCAL_CHUNKS) * CHUNK


def _replaced(keys: Tensor, whole: Tensor, at: Tensor) -> Tensor:
    """``keys [kv, k, d]``, with row ``at [kv, k]`` of ``whole [kv, n, d]`` where that is not negative."""
    rows = whole.gather(1, at.clamp(min=0)[..., None].expand(-1, -1, keys.shape[-1]))
    return torch.where((at >= 0)[..., None], rows, keys)
