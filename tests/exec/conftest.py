"""The slow, obviously right decoder: one row, one block at a time, no streams, no pools, no kernels."""

import dataclasses

import pytest
import torch

from herald_exec.models import tiny
from herald_exec.models.layers import rotate
from herald_exec.requests import DecodeRequest
from herald_pipeline import methods
from herald_pipeline.decoding.sampling import hash_uniform
from herald_pipeline.pipeline import build

BLOCK = 8


class Oracle:
    """Decodes one request as DESIGN section 5 words it. ``sets`` keeps what each block's steps attended to."""

    def __init__(self, model, settings, steps, eos=()):
        self.model, self.settings, self.steps, self.eos = model, settings, steps, eos
        self.shape = model.shape
        self.block, self.window = settings.block_length, settings.window_length
        self.layers = range(self.shape.num_layers)

    # Plain attention and forwards --------------------------------------------------------------------------------

    def attend(self, q, keys, values, seen=None):
        """q [n, heads, d]; keys, values [kv, m, d]; every query sees every key, or those of ``seen [n, m]``."""
        group = self.shape.group_size
        k, v = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = torch.einsum("nhd,hmd->hnm", q, k) / self.shape.head_dim**0.5
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1)
        return torch.einsum("hnm,hmd->nhd", weights, v), weights

    def forward(self, ids, start, prefix, positions=None, ends=None):
        """Forward ids as one group over ``prefix(layer, q) -> (keys, values)``; hidden states and the group's KV.

        ``ends``: how many of the group each of them sees, instead of all.
        """
        at = torch.arange(start, start + len(ids)) if positions is None else positions
        hidden, kv, self.entering = self.model.embed(ids), [], []
        for layer in self.layers:
            self.entering.append(hidden)
            q, k, v = self.model.project(layer, hidden, at)
            k, v = k.transpose(0, 1), v.transpose(0, 1)
            kv.append((k, v))
            keys, values = prefix(layer, q, k, v)
            seen = None
            if ends is not None:
                seen = torch.arange(-keys.shape[1], len(ids))[None, :] < torch.tensor(ends)[:, None]
            out, _ = self.attend(q, torch.cat([keys, k], 1), torch.cat([values, v], 1), seen)
            hidden = self.model.finish(layer, hidden, out)
        return hidden, kv

    def select(self, layer, q, extra_keys, count, prefix_length):
        """The ``count`` prefix positions with most attention weight, per KV head, ascending."""
        keys = torch.cat([self.keys[layer][:, :prefix_length], extra_keys], 1)
        _, weights = self.attend(q, keys, keys)
        per_head = weights.sum(1).view(self.shape.num_kv_heads, -1, keys.shape[1]).sum(1)[:, :prefix_length]
        return per_head.topk(min(count, prefix_length), dim=-1).indices.sort(-1).values

    def picked(self, layer, chosen):
        index = chosen[..., None].expand(-1, -1, self.shape.head_dim)
        return self.keys[layer].gather(1, index), self.values[layer].gather(1, index)

    # Selections ----------------------------------------------------------------------------------------------------

    def prefill(self, prompt):
        """KV of the prompt's whole blocks, block by block; and block 0's sets by B [MASK] queries."""
        empty = torch.zeros(self.shape.num_kv_heads, 0, self.shape.head_dim)
        self.keys = [empty for _ in self.layers]
        self.values = [empty for _ in self.layers]
        context = len(prompt) // self.block * self.block
        asked = [[] for _ in self.layers]

        def noted(layer, q, *_):
            asked[layer].append(q)
            return self.whole(layer)

        # Blocks that slide leave the prompt's as the model was trained.
        size = self.block if self.window == self.block else self.shape.block_length
        for start in range(0, context, size):
            _, kv = self.forward(torch.tensor(prompt[start : min(start + size, context)]), start, noted)
            self.store(kv)
        self.columns = [self.skewed(torch.cat(q) if q else None) for q in asked]
        return context

    def skewed(self, queries):
        """Per KV head, the right singular vectors of the prompt's queries with most weight; without one, first axes."""
        count, found = max(1, round(self.settings.proxy_fraction * self.shape.head_dim)), []
        if queries is None:
            return [torch.eye(self.shape.head_dim)[:, :count]] * self.shape.num_kv_heads
        for head in range(self.shape.num_kv_heads):
            group = queries[:, head * self.shape.group_size : (head + 1) * self.shape.group_size].flatten(0, 1)
            basis = torch.linalg.svd(group.double()).Vh.T.float()
            found.append(basis[:, (group @ basis).abs().sum(0).topk(count).indices])
        return found

    def whole(self, layer, *_):
        return self.keys[layer], self.values[layer]

    def store(self, kv):
        for layer in self.layers:
            self.keys[layer] = torch.cat([self.keys[layer], kv[layer][0]], 1)
            self.values[layer] = torch.cat([self.values[layer], kv[layer][1]], 1)

    def mask_pass(self, start, queries, prefix_length, draft=None, ends=None):
        """Sets by ``queries`` [MASK] tokens around the centre of the block at ``start``; a draft is seen, not taken."""
        count = self.settings.selected_tokens(prefix_length)
        chosen = {}
        first = start + self.window // 2 - queries // 2
        if draft is not None:
            draft = [(k[:, : first - start + self.block], v[:, : first - start + self.block]) for k, v in draft]

        def prefix(layer, q, k, v):
            keys, values = self.keys[layer][:, :prefix_length], self.values[layer][:, :prefix_length]
            extra = [k] if draft is None else [draft[layer][0], k]
            chosen[layer] = self.select(layer, q, torch.cat(extra, 1), count, prefix_length)
            if draft is None:
                return keys, values
            return torch.cat([keys, draft[layer][0]], 1), torch.cat([values, draft[layer][1]], 1)

        self.forward(torch.full((queries,), self.shape.mask_token_id), first, prefix, ends=ends)
        return chosen

    def sparse(self, chosen, tail):
        """Prefix of a sparse step: exact layers whole; the others the chosen entries, then the newest ``tail``."""

        def prefix(layer, *_):
            if layer < self.settings.exact_layers:
                return self.keys[layer], self.values[layer]
            keys, values = self.picked(layer, chosen[layer])
            length = self.keys[layer].shape[1]
            return (
                torch.cat([keys, self.keys[layer][:, length - tail :]], 1),
                torch.cat([values, self.values[layer][:, length - tail :]], 1),
            )

        return prefix

    def sight(self):
        """How many of a window each of its positions sees in a step; ``None``: all."""
        trained = self.shape.block_length
        return None if self.window == self.block else [(i // trained + 1) * trained for i in range(self.window)]

    # Decoding --------------------------------------------------------------------------------------------------------

    def decode(self, request, method):
        """Answer of a request; ``self.sets[n]`` are the entries that block n attended to, per layer."""
        prompt, block = list(request.prompt), self.block
        context = self.prefill(prompt)
        self.sets = []
        end = len(prompt) + request.new_tokens
        tokens = prompt + [0] * (-(-end // block) * block - len(prompt) + self.window - block)
        masked = [False] * len(prompt) + [True] * (len(tokens) - len(prompt))
        chosen = self.mask_pass(context, self.window, context, ends=self.sight())
        answer, index = [], 0
        while context < len(tokens) - (self.window - block):
            chosen, following = self.decode_block(request, method, tokens, masked, context, index, chosen)
            self.sets.append(chosen)
            new = tokens[max(context, len(prompt)) : min(context + block, end)]
            stop = next((i for i, token in enumerate(new) if token in self.eos), None)
            answer += new if stop is None else new[: stop + 1]
            if stop is not None:
                break
            context, index, chosen = context + block, index + 1, following
        return answer

    def decode_block(self, request, method, tokens, masked, start, index, chosen):
        settings, block, span = self.settings, self.block, slice(start, start + self.block)
        wide = slice(start, start + self.window)
        # A window is blocks of the model's B from its own start; clean KV sees nothing behind the period.
        steps_see = self.sight()
        cleans_see = None if steps_see is None else [block] * block + steps_see[block:]
        ahead = method.startswith("herald")
        if method == "mage-cpu-representative":
            chosen = self.mask_pass(start, settings.queries, start)
        prefix = self.sparse(chosen, block if ahead and index else 0)
        if method in ("dense", "cpu-exact", "layer-prefetch"):
            prefix = self.whole
        step_0 = prefix
        if method in ("mage-cpu", "mage-offload"):
            chosen, step_0 = {}, None

            def exact(layer, q, k, v):
                chosen[layer] = self.select(layer, q, k, settings.selected_tokens(start), start)
                return self.keys[layer], self.values[layer]

            step_0, prefix = exact, self.sparse(chosen, 0)
        if method in ("infinigen", "step-fetch"):
            chosen, columns = {}, self.columns

            def fetched(layer, *_):
                chosen[layer] = self.proxy(layer, columns, start, self.entering[max(layer - 1, 0)])
                return self.picked(layer, chosen[layer])

            step_0 = fetched
            prefix = fetched if method == "step-fetch" else self.sparse(chosen, 0)
        if method == "shadowkv":
            chosen = {}
            if index == 0:
                self.prompt_length = start

            def rebuilt(layer, q, *_):
                chosen[layer] = self.landmarks(layer, q, start)
                return self.picked(layer, chosen[layer])

            step_0, prefix = rebuilt, self.sparse(chosen, 0)
        counts = even(self.steps(request.id, index), sum(masked[span]))
        draft = None
        for step, count in enumerate(counts):
            ids = [self.shape.mask_token_id if m else t for t, m in zip(tokens[wide], masked[wide], strict=True)]
            hidden, _ = self.forward(torch.tensor(ids), start, prefix if step else step_0, ends=steps_see)
            logits = self.model.logits(hidden)
            logits[:, self.shape.mask_token_id] = -torch.inf
            best = logits.argmax(-1).tolist()
            for position in self.order(request.id, masked, start)[:count]:
                tokens[position], masked[position] = best[position - start], False
            if step == 0:
                draft = [best[i] if masked[start + i] else tokens[start + i] for i in range(self.window)]
        done = [self.shape.mask_token_id if m else t for t, m in zip(tokens[wide], masked[wide], strict=True)]
        _, computed = self.forward(torch.tensor(done), start, prefix, ends=cleans_see)
        clean = [(k[:, :block], v[:, :block]) for k, v in computed]
        following = None
        if ahead:
            _, draft_kv = self.forward(torch.tensor(draft), start, prefix, ends=cleans_see)
            if len(counts) == 1:
                # The completing forward is the draft's: behind the period stand masks, not guesses.
                draft_kv = computed
            if method == "herald-no-draft":
                draft_kv = None
            following = self.mask_pass(start + block, settings.queries, start, draft_kv)
        self.store(clean)
        return chosen, following

    def proxy(self, layer, columns, start, hidden):
        """InfiniGen's picks: partial keys scored by this layer's queries of the layer before's attention input."""
        shape, weights = self.shape, self.model.weights.layers[layer]

        def norm(x, weight):
            return x / (x.pow(2).mean(-1, keepdim=True) + shape.norm_eps).sqrt() * weight

        size = shape.num_heads * shape.head_dim
        x = norm(hidden, self.model.weights.layers[max(layer - 1, 0)].input_norm)
        q = norm((x @ weights.qkv[:size].T).view(-1, shape.num_heads, shape.head_dim), weights.q_norm)
        q = rotate(q, self.model.rotary(torch.arange(start, start + self.block)))
        chosen = []
        for head in range(shape.num_kv_heads):
            group = q[:, head * shape.group_size : (head + 1) * shape.group_size].flatten(0, 1)
            scores = (group @ columns[layer][head]) @ (self.keys[layer][head, :start] @ columns[layer][head]).T
            count = min(self.settings.selected_tokens(start), start)
            weights = (scores / self.shape.head_dim**0.5).softmax(-1)
            chosen.append(weights.sum(0).topk(count).indices.sort().values)
        return torch.stack(chosen)

    def landmarks(self, layer, q, start):
        """ShadowKV's picks at full rank: chunks of 8 by mean keys; the newest four and the outliers come first."""
        chosen, count = [], self.settings.selected_tokens(start)
        chunks, group = start // 8, self.shape.group_size
        for head in range(self.shape.num_kv_heads):
            members = self.keys[layer][head, : chunks * 8].view(chunks, 8, self.shape.head_dim)
            means = members.mean(1)
            prompt = self.prompt_length // 8
            likeness = torch.cosine_similarity(members, means[:, None], dim=-1).amin(-1)[:prompt].tolist()
            outliers = sorted(range(prompt), key=lambda c: likeness[c])
            outliers = outliers[: self.settings.selected_tokens(self.prompt_length) * 24 // 1024]
            newest = [chunk for chunk in range(chunks - 1, chunks - 5, -1) if chunk >= 0]
            others = [chunk for chunk in range(chunks) if chunk not in newest and chunk not in outliers]
            score = {}
            if others:
                queries = q[:, head * group : (head + 1) * group]
                weights = (queries @ means[others].T / self.shape.head_dim**0.5).softmax(-1)
                score = dict(zip(others, weights.sum(0).amax(0).tolist(), strict=True))
            order = newest + sorted(set(outliers) - set(newest)) + sorted(others, key=lambda c: -score[c])
            positions = list(range(chunks * 8, start)) + [8 * chunk + i for chunk in order for i in range(8)]
            chosen.append(torch.tensor(sorted(positions[:count]), dtype=torch.int64))
        return torch.stack(chosen)

    def order(self, request_id, masked, start):
        """Masked positions of the block in the script's order: by falling hash."""
        at = torch.arange(start, start + self.block)
        score = hash_uniform(at, at * 0 + request_id, at * 0)
        still = [p for p in at.tolist() if masked[p]]
        return sorted(still, key=lambda p: -score[p - start].item())


def even(steps, count):
    """``count`` tokens over at most ``steps`` steps, the remainder to the first."""
    steps = min(steps, count)
    return [count // steps + (i < count % steps) for i in range(steps)]


def describe(name, shape, **settings):
    """A pipeline in fp32 whose B-query methods take the shape's own block."""
    method = methods.get(name)
    queries = min(method.defaults.queries, shape.block_length)
    method = dataclasses.replace(method, defaults=method.defaults.replace(queries=queries))
    return build(shape, method, block_length=shape.block_length, kv_dtype="fp32", dram_kv_dtype="fp32", **settings)


def prompts(lengths, new_tokens, seed=0, vocab=512):
    """Requests of these prompt lengths with ids in 2..vocab-1 (no EOS, no mask)."""
    generator = torch.Generator().manual_seed(seed)
    new = [new_tokens] * len(lengths) if isinstance(new_tokens, int) else new_tokens
    return [
        DecodeRequest(i, tuple(torch.randint(2, vocab, (n,), generator=generator).tolist()), new[i])
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="session")
def model():
    return tiny(block_length=BLOCK, eos_token_ids=())


@pytest.fixture(scope="session")
def kit():
    """What the tests build with: ``kit.describe``, ``kit.prompts``, ``kit.Oracle``."""
    from types import SimpleNamespace

    return SimpleNamespace(describe=describe, prompts=prompts, Oracle=Oracle, even=even, BLOCK=BLOCK)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield
