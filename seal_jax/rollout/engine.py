"""The rollout engine: groups of rows that share a prompt, play several turns, and never compute a token twice.

A session holds, on the device,

    prompt cache  [L, B, K, P, H]      computed once per group, read by all its rows (keys have H before P, see `KV`)
    rows' cache   [L, B, K, G, S, H]   every row at its own length; S grows from one declared bucket to the next

(where the layers are unrolled, both are lists with one KV per layer, without L)

`Session.act` feeds each row its new tokens (`_extend`, in chunks) and samples its next message (`_decode`, a
`while_loop` that ends when every row has met a stop id or its limit). jax only queues that work: `Session.act_in_parts`
hands control back until its tokens are needed, so that the device samples while the host does something else. During
a message the new keys go to a small buffer at a place common to all rows and the big caches are only read; they are
written once, after the loop. A message's last token has not been through the model when the loop ends: it is kept as
pending and leads the row's next chunk, so rows continue exactly where they stopped.

Everything stands on the left and is padded on the right; masks come from lengths, never from ids, so a pad id that
equals a stop id is harmless. Shapes come from declared buckets only and params are an argument: after each bucket has
been met, nothing compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from seal_jax.policy.config import Params, PolicyConfig
from seal_jax.policy.model import (
    KV,
    SHALLOW,
    Decoder,
    cast_matrices,
    each_layer,
    prompt_mask,
    row_mask,
    stack,
    unstack,
    write_rows,
)
from seal_jax.policy.sharding import BATCH_AXES, check_batch, on_mesh, whole_letters
from seal_jax.rollout.work import Work
from seal_jax.telemetry.timing import PhaseTimer

Row = tuple[int, int]  # (b, g): group and row in it, as numbered at the start of the session
Cache = KV | list[KV]  # all layers stacked, or one KV per layer

#: What starting one more chunk costs, in padded tokens; weighs "one long chunk" against "several short ones".
_CHUNK_OVERHEAD = 8


@dataclass(frozen=True)
class Sampled:
    """One sampled message. `ids` include the stop id; `logps` are float32 log-probs of `ids` under the sampling
    distribution (at temperature 1 when greedy); `truncated` says that a limit came before a stop id."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    truncated: bool


def kv_sharding(config: PolicyConfig, mesh: Mesh, *, stacked: bool) -> NamedSharding:
    """The layout of every cache: groups over the batch axes, key/value heads over tensor where they divide; `stacked`:
    with all layers in a leading axis."""
    axes = (BATCH_AXES, None if "k" in whole_letters(config, mesh) else "tensor")
    return NamedSharding(mesh, PartitionSpec(*((None,) if stacked else ()), *axes))


class RolloutEngine:
    """Compiled prefill, extend, decode and compaction for one model shape.

    `stop_ids`: any of them ends a message. `max_new_tokens`: longest message. `decode_size`: tokens sampled by one call
    of the decode loop, whose buffer every step reads whole; longer messages take several calls. Buckets are ascending
    sizes: prompt tokens, suffix tokens a row can hold, tokens fed at once, groups, and (optional) rows per group that
    compaction may use beside the session's own. Ids from `config.vocab_size` on are never sampled. `mesh`: groups are
    split over its data and fsdp axes; None follows the params. `unroll`: decode (and, of shallow models, extend) with
    the layers unrolled, which compiles longer and runs faster on CPU; None does so on CPU only.
    """

    def __init__(
        self,
        config: PolicyConfig,
        *,
        stop_ids: Sequence[int],
        prompt_buckets: Sequence[int],
        suffix_buckets: Sequence[int],
        chunk_buckets: Sequence[int],
        group_buckets: Sequence[int],
        max_new_tokens: int,
        decode_size: int = 512,
        row_buckets: Sequence[int] = (),
        mesh: Mesh | None = None,
        unroll: bool | None = None,
    ):
        if not stop_ids or any(not 0 <= i < config.vocab_size for i in stop_ids):
            raise ValueError(
                f"engine.stop_ids={tuple(stop_ids)} must be one or more ids below vocab_size={config.vocab_size}"
            )
        for name, value in (("max_new_tokens", max_new_tokens), ("decode_size", decode_size)):
            if value < 1:
                raise ValueError(f"engine.{name}={value} must be at least 1")
        self.config = config
        self.stop_ids = frozenset(int(i) for i in stop_ids)
        self.prompt_buckets = _buckets("prompt_buckets", prompt_buckets)
        self.suffix_buckets = _buckets("suffix_buckets", suffix_buckets)
        self.chunk_buckets = _buckets("chunk_buckets", chunk_buckets)
        self.group_buckets = _buckets("group_buckets", group_buckets)
        self.row_buckets = _buckets("row_buckets", row_buckets) if row_buckets else ()
        self.max_new_tokens = max_new_tokens
        self.decode_size = min(decode_size, max_new_tokens)
        self.mesh = mesh
        self.unroll = jax.default_backend() == "cpu" if unroll is None else unroll
        if mesh is not None:
            for size in self.group_buckets:
                check_batch(size, mesh, "engine.group_buckets entry")
        # With a mesh every cache has one layout from its first moment on: else the first call of each function, on
        # fresh caches, would compile apart from all later ones, and donated buffers would not fit.
        kv = None if mesh is None else kv_sharding(config, mesh, stacked=not self.unroll)
        batch = self.batch_sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        self._prefill = jax.jit(on_mesh(mesh, self._prefill_fn), out_shardings=kv)
        self._new_rows = jax.jit(self._new_rows_fn, static_argnums=(1, 2), out_shardings=(kv, batch))
        self._extend = jax.jit(
            on_mesh(mesh, self._extend_fn), donate_argnames=("hidden_bgd",), out_shardings=(kv, batch)
        )
        self._decode = jax.jit(on_mesh(mesh, self._decode_fn), out_shardings=(kv, batch, batch, batch))
        # Apart from the functions that read the rows: in one program XLA copies them whole before it writes. A partial,
        # because engines would share the cache of equal functions.
        self._write = jax.jit(functools.partial(write_rows), donate_argnums=0, out_shardings=kv)
        self._repack = jax.jit(self._repack_fn, out_shardings=(kv, kv, batch))
        self._grow = jax.jit(self._grow_fn, static_argnums=(1,), out_shardings=kv)

    @property
    def compilations(self) -> int:
        """Executables made so far, counted where jax keeps them (a trace can be reused where a compilation is not)."""
        names = ("prefill", "new_rows", "extend", "decode", "write", "repack", "grow")
        return sum(getattr(self, f"_{name}")._cache_size() for name in names)

    def start(
        self, params: Params, prompts: Sequence[Sequence[int]], rollouts: int, *, timer: PhaseTimer | None = None
    ) -> Session:
        """Prefills each prompt once and opens a session of len(prompts) groups with `rollouts` rows each.

        `timer` is told the phases "prefill", "extend" and "decode". Raises ValueError for an empty or too long prompt,
        or more groups than the largest bucket.
        """
        return Session(self, params, prompts, rollouts, PhaseTimer() if timer is None else timer)

    # --- the compiled functions --------------------------------------------------------------------------------------
    def _prefill_fn(self, params: Params, ids_bp: jax.Array, len_b: jax.Array) -> Cache:
        cache = Decoder.from_params(self.config, params).prefill(ids_bp, len_b)[1]
        return unstack(cache) if self.unroll else cache

    def _layers(self, decoder: Decoder) -> list[Params] | None:
        """What makes `Decoder.extend` unroll its layers."""
        return unstack(decoder.layer_params()) if self.unroll else None

    def _new_rows_fn(self, prompt: Cache, rows: int, size: int) -> tuple[Cache, jax.Array]:
        """Empty row caches beside a prompt cache, and a place for their last hidden states."""

        def empty(prompt: KV) -> KV:
            batch, n_kv, _, head_dim = prompt.values.shape
            keys = jnp.zeros((batch, n_kv, rows, head_dim, size), prompt.keys.dtype)
            return KV(keys, keys.swapaxes(-1, -2))

        cache = each_layer(empty, prompt)
        leaf = jax.tree.leaves(prompt)[0]
        return cache, jnp.zeros((leaf.shape[-4], rows, self.config.d_model), leaf.dtype)

    def _extend_fn(
        self,
        params: Params,
        prompt: Cache,
        prompt_len_b: jax.Array,
        rows: Cache,
        row_len_bg: jax.Array,
        hidden_bgd: jax.Array,
        ids_bgc: jax.Array,
        len_bg: jax.Array,
    ) -> tuple[Cache, jax.Array]:
        """Feeds a chunk. Returns its KV, yet to be written, and each row's hidden state at its last token so far."""
        decoder = Decoder.from_params(self.config, params)
        # For a whole chunk a copy of the caches costs less than a program that grows with depth.
        scanned = self.unroll and self.config.n_layers > SHALLOW
        if scanned:
            prompt, rows = stack(prompt), stack(rows)
        pasts = [(prompt, prompt_mask(prompt, prompt_len_b)), (rows, row_mask(rows, row_len_bg))]
        layers = None if scanned else self._layers(decoder)
        hidden_bgcd, new = decoder.extend(ids_bgc, prompt_len_b[:, None] + row_len_bg, pasts, layers)
        if scanned:
            new = unstack(new)
        last = jnp.take_along_axis(hidden_bgcd, jnp.maximum(len_bg - 1, 0)[..., None, None], axis=2)[:, :, 0]
        return new, jnp.where(len_bg[..., None] > 0, last, hidden_bgd)

    def _decode_fn(
        self,
        params: Params,
        prompt: Cache,
        prompt_len_b: jax.Array,
        rows: Cache,
        row_len_bg: jax.Array,
        hidden_bgd: jax.Array,
        limit_bg: jax.Array,
        seed_bg: jax.Array,
        temperature: jax.Array,
    ) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
        """Samples up to `limit` tokens a row. Returns their KV, yet to be written and without the last one's, ids
        [B,G,N], log-probs [B,G,N] and counts [B,G].
        """
        decoder = Decoder.from_params(self.config, cast_matrices(self.config, params))
        stop = jnp.asarray(sorted(self.stop_ids), jnp.int32)
        n_new = self.decode_size
        batch, n_rows = row_len_bg.shape
        first_bg = prompt_len_b[:, None] + row_len_bg  # position of the first sampled token
        layers, head = self._layers(decoder), decoder.head()
        prompt_past = (prompt, prompt_mask(prompt, prompt_len_b))
        rows_past = (rows, row_mask(rows, row_len_bg))

        def sample(state: dict[str, Any], hidden_bgd: jax.Array) -> dict[str, Any]:
            step, alive = state["step"], state["alive"]
            token, logp = sample_tokens(decoder.logits(hidden_bgd, head), temperature, seed_bg, first_bg + step)
            count = state["count"] + alive
            return {
                **state,
                "step": step + 1,
                "token": token,
                "ids": state["ids"].at[..., step].set(token),
                "logp": state["logp"].at[..., step].set(logp),
                "count": count,
                "alive": alive & ~(token[..., None] == stop).any(-1) & (count < limit_bg),
            }

        def body(state: dict[str, Any]) -> dict[str, Any]:
            fed = state["step"] - 1  # tokens of this message that are in the buffer; the present one becomes the next
            buffer = (state["new"], jnp.arange(n_new) < fed)
            pasts = [prompt_past, rows_past, buffer]
            hidden_bgcd, one = decoder.extend(state["token"][..., None], first_bg + fed, pasts, layers)
            state = sample(state, hidden_bgcd[:, :, 0])
            # No id is negative, but XLA for CPU does not know: so it writes after it has read, in place. Left to
            # choose, it copies every buffer, twice a token.
            place = jnp.where(state["token"].min() < 0, 0, fed) if self.unroll else fed
            return {**state, "new": each_layer(functools.partial(_put_token, place=place), state["new"], one)}

        state = {
            "step": jnp.int32(0),
            "token": jnp.zeros((batch, n_rows), jnp.int32),
            "ids": jnp.zeros((batch, n_rows, n_new), jnp.int32),
            "logp": jnp.zeros((batch, n_rows, n_new), jnp.float32),
            "count": jnp.zeros((batch, n_rows), jnp.int32),
            "alive": limit_bg > 0,
            "new": self._new_rows_fn(prompt, n_rows, n_new)[0],
        }
        state = sample(state, hidden_bgd)
        # an alive row has count < limit <= n_new, so the loop cannot run past the buffers
        state = jax.lax.while_loop(lambda state: state["alive"].any(), body, state)
        return state["new"], state["ids"], state["logp"], state["count"]

    def _repack_fn(
        self,
        prompt: Cache,
        rows: Cache,
        hidden_bgd: jax.Array,
        group_b: jax.Array,
        slot_bg: jax.Array,
        row_bg: jax.Array,
    ) -> tuple[Cache, Cache, jax.Array]:
        """A new grid: slot b gets the prompt of old slot group_b[b], its row g is old row (slot_bg[b, g], row_bg[b,
        g]).
        """

        def move(rows: KV) -> KV:  # indices on both sides of a slice put their axes first: [B, G, K, S, H]
            return KV(*(jnp.transpose(x[slot_bg, :, row_bg], (0, 2, 1, 3, 4)) for x in rows))

        prompt = each_layer(lambda kv: KV(*(x[group_b] for x in kv)), prompt)
        return prompt, each_layer(move, rows), hidden_bgd[slot_bg, row_bg]

    def _grow_fn(self, rows: Cache, size: int) -> Cache:
        def grow(rows: KV) -> KV:
            more, pads = (0, size - rows.values.shape[-2]), [(0, 0)] * 3
            return KV(jnp.pad(rows.keys, [*pads, (0, 0), more]), jnp.pad(rows.values, [*pads, more, (0, 0)]))

        return each_layer(grow, rows)


def _put_token(buffer: KV, one: KV, place: jax.Array) -> KV:
    """Writes a single token's KV at a place common to all rows: a slice update, in place, no scatter."""
    put = jax.lax.dynamic_update_slice_in_dim
    return KV(put(buffer.keys, one.keys, place, axis=-1), put(buffer.values, one.values, place, axis=-2))


def sample_tokens(
    logits: jax.Array, temperature: jax.Array, seed: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Samples from softmax(logits / temperature) and gives the float32 log-prob under that same distribution.

    logits [..., V] float32 (masked ids at -inf); temperature scalar, 0 = greedy with log-probs at temperature 1; seed
    uint32 and position int32 [...]: the noise of a row depends on these two alone, so neither neighbours nor batch
    shape can change it.
    """
    greedy = temperature == 0.0
    scaled = logits / jnp.where(greedy, 1.0, temperature)

    def with_noise(scaled: jax.Array) -> jax.Array:
        def one(seed: jax.Array, position: jax.Array) -> jax.Array:
            return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), scaled.shape[-1:])

        return scaled + jax.vmap(one)(seed.reshape(-1), position.reshape(-1)).reshape(scaled.shape)

    token = jnp.argmax(jax.lax.cond(greedy, lambda x: x, with_noise, scaled), axis=-1).astype(jnp.int32)
    picked = jnp.take_along_axis(scaled, token[..., None], axis=-1)[..., 0]
    return token, picked - jax.nn.logsumexp(scaled, axis=-1)


class Session:
    """The episodes of some groups, from their prompts on. Made by `RolloutEngine.start`; params are fixed for its
    lifetime. `work` counts what went through the model.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        params: Params,
        prompts: Sequence[Sequence[int]],
        rollouts: int,
        timer: PhaseTimer,
    ):
        self.engine, self.params, self.timer = engine, params, timer
        if not prompts or rollouts < 1:
            raise ValueError(
                f"a session needs prompts and rollouts >= 1, got {len(prompts)} prompts and rollouts={rollouts}"
            )
        lengths = [len(prompt) for prompt in prompts]
        if min(lengths) == 0:
            raise ValueError(f"prompt {lengths.index(0)} is empty; a row needs at least one token to start from")
        size = _pick(
            engine.prompt_buckets,
            max(lengths),
            f"prompt {lengths.index(max(lengths))} has {max(lengths)} tokens",
            "prompt_buckets",
        )
        batch = _pick(engine.group_buckets, len(prompts), f"{len(prompts)} prompts", "group_buckets")
        ids_bp = np.zeros((batch, size), np.int32)
        for b, prompt in enumerate(prompts):
            _check_ids(prompt, engine.config, f"prompt {b}")
            ids_bp[b, : len(prompt)] = prompt
        self.rollouts = rollouts
        self.prompt_len = lengths
        self._written = {(b, g): 0 for b in range(len(prompts)) for g in range(rollouts)}  # suffix tokens in the cache
        self._pending: dict[Row, int] = {}  # sampled, not yet in the cache
        # where each live row stands in the grid; a slot is a group's prompt with some of its rows
        self._place: dict[Row, tuple[int, int]] = {row: row for row in self._written}
        self._slot_group = [b if b < len(prompts) else -1 for b in range(batch)]
        self.work = Work(prompt=sum(lengths), prefill_places=ids_bp.size)
        with timer.phase("prefill"):
            self._prompt = engine._prefill(params, self._put(ids_bp), self._put(self._by_slot(self.prompt_len)))
        self._prefilled = False  # has the host seen it end
        self._rows: Cache | None = None
        self._hidden: jax.Array | None = None
        self._grid = (batch, rollouts)
        self._capacity = 0

    # --- what the host can ask ---------------------------------------------------------------------------------------
    def room(self, row: Row) -> int:
        """Tokens the row can still take, fed and sampled together."""
        suffix = self._suffix_length(row)
        positions = self.engine.config.max_position - self.prompt_len[row[0]]
        return min(self.engine.suffix_buckets[-1], positions) - suffix

    def _suffix_length(self, row: Row) -> int:
        if row not in self._written:
            raise ValueError(
                f"row {row} is not of this session; it has groups 0..{len(self.prompt_len) - 1} x {self.rollouts} rows"
            )
        return self._written[row] + (row in self._pending)

    # --- acting ------------------------------------------------------------------------------------------------------
    def act(
        self, tokens: Mapping[Row, Sequence[int]], *, temperature: float, keys: Mapping[Row, int]
    ) -> dict[Row, Sampled]:
        """Feeds each row its new tokens, then samples its next message.

        tokens: non-empty ids per row (what the template or the world adds after the row's last token). Rows not named
        are finished for good. temperature: 0 is greedy. keys: a uint32 seed per row; the noise at a place depends on
        seed and position only, so one seed can serve a whole episode. Raises ValueError if a row is finished or
        unknown, has no seed, gets no tokens or more than `room(row) - 1` (one place must be left to sample into).
        """
        parts = self.act_in_parts(tokens, temperature=temperature, keys=keys)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                return end.value

    def act_in_parts(
        self, tokens: Mapping[Row, Sequence[int]], *, temperature: float, keys: Mapping[Row, int]
    ) -> Generator[None, None, dict[Row, Sampled]]:
        """`act`, yielding whenever the device has been given work and its tokens are what is needed next."""
        engine = self.engine
        if not tokens:
            self._place.clear()
            return {}
        self._check(tokens, keys, temperature)
        left = {row: min(engine.max_new_tokens, self.room(row) - len(ids)) for row, ids in tokens.items()}
        fed = {row: [*self._pending_ids(row), *ids] for row, ids in tokens.items()}
        self._place = {row: place for row, place in self._place.items() if row in tokens}
        with self.timer.phase("extend"):
            self._compact()
        ids: dict[Row, list[int]] = {row: [] for row in tokens}
        logps: dict[Row, list[float]] = {row: [] for row in tokens}
        while fed:  # once, unless a message is longer than the decode loop's buffer
            limits = {row: min(engine.decode_size, left[row]) for row in fed}
            with self.timer.phase("extend"):
                self._reserve(max(self._written[row] + len(fed[row]) + limits[row] - 1 for row in fed))
                self._feed(fed)
            with self.timer.phase("decode"):
                sampling = self._sample(limits, keys, temperature)
            yield
            ids_bgn, logp_bgn, count_bg = self._read(sampling)
            for row in fed:
                place = self._place[row]
                n = int(count_bg[place])
                ids[row] += ids_bgn[place][:n].tolist()
                logps[row] += logp_bgn[place][:n].tolist()
                left[row] -= n
                self._written[row] += n - 1
                self._pending[row] = ids[row][-1]
            fed = {row: self._pending_ids(row) for row in fed if left[row] and ids[row][-1] not in engine.stop_ids}
        return {
            row: Sampled(tuple(ids[row]), tuple(logps[row]), truncated=ids[row][-1] not in engine.stop_ids)
            for row in tokens
        }

    def _check(self, tokens: Mapping[Row, Sequence[int]], keys: Mapping[Row, int], temperature: float) -> None:
        if not temperature >= 0.0:
            raise ValueError(f"temperature={temperature} must be 0 (greedy) or positive")
        for row, ids in tokens.items():
            room = self.room(row)
            if row not in self._place:
                raise ValueError(
                    f"row {row} is finished: it was absent from an earlier act; start a new session for it"
                )
            if row not in keys:
                raise ValueError(f"row {row} has no seed in keys; give each acting row a uint32")
            if len(ids) == 0:
                raise ValueError(f"row {row} was given no tokens; feed at least the assistant header")
            _check_ids(ids, self.engine.config, f"row {row}")
            if len(ids) >= room:
                raise ValueError(
                    f"row {row} has room for {room} tokens but was given {len(ids)} and must sample at least one; "
                    f"end the episode, or raise engine.suffix_buckets[-1]={self.engine.suffix_buckets[-1]}"
                )

    def _pending_ids(self, row: Row) -> list[int]:
        return [self._pending[row]] if row in self._pending else []

    def _feed(self, fed: Mapping[Row, Sequence[int]]) -> None:
        """Runs all new tokens through the model, in as few padded tokens as the chunk buckets allow."""
        done = 0
        for size in _chunk_plan(max(map(len, fed.values())), self.engine.chunk_buckets):
            ids_bgc = np.zeros((*self._grid, size), np.int32)
            len_bg = np.zeros(self._grid, np.int32)
            for row, ids in fed.items():
                part = ids[done : done + size]
                ids_bgc[self._place[row]][: len(part)] = part
                len_bg[self._place[row]] = len(part)
            written_bg, fed_bg = self._put(self._by_row(self._written)), self._put(len_bg)
            new, self._hidden = self.engine._extend(
                self.params,
                self._prompt,
                self._put(self._by_slot(self.prompt_len)),
                rows=self._rows,
                row_len_bg=written_bg,
                hidden_bgd=self._hidden,
                ids_bgc=self._put(ids_bgc),
                len_bg=fed_bg,
            )
            self._rows = self.engine._write(self._rows, new, written_bg, fed_bg)
            self.work += Work(fed=int(len_bg.sum()), extend_places=ids_bgc.size)
            done += size
            for row in fed:
                self._written[row] += int(len_bg[self._place[row]])
        for row in fed:
            self._pending.pop(row, None)

    def _sample(self, limits: Mapping[Row, int], keys: Mapping[Row, int], temperature: float) -> tuple[Any, ...]:
        """Queues the sampling of a message, or of as much of it as the loop's buffer holds; `_read` it."""
        written_bg = self._put(self._by_row(self._written))
        sampling = self.engine._decode(
            self.params,
            self._prompt,
            self._put(self._by_slot(self.prompt_len)),
            rows=self._rows,
            row_len_bg=written_bg,
            hidden_bgd=self._hidden,
            limit_bg=self._put(self._by_row({row: limits.get(row, 0) for row in self._place})),
            seed_bg=self._put(self._by_row(keys, np.uint32)),
            temperature=np.float32(temperature),
        )
        return written_bg, *sampling

    def _read(self, sampling: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
        """Waits for what `_sample` queued and writes its KV: ids [B,G,N], log-probs [B,G,N] and counts [B,G].

        The device works in the order of the calls, so each phase's wait is awaited in turn.
        """
        if not self._prefilled:
            with self.timer.phase("prefill"):
                jax.block_until_ready(self._prompt)
            self._prefilled = True
        with self.timer.phase("extend"):
            jax.block_until_ready(self._hidden)
        with self.timer.phase("decode"):
            written_bg, new, *sampled = sampling
            ids_bgn, logp_bgn, count_bg = jax.device_get(sampled)
            self._rows = self.engine._write(self._rows, new, written_bg, self._put(np.maximum(count_bg - 1, 0)))
        steps = int(count_bg.max()) - 1  # the first token of a message comes from the chunk before it
        self.work += Work(
            decoded=int(np.maximum(count_bg - 1, 0).sum()),
            sampled=int(count_bg.sum()),
            steps=steps,
            decode_places=steps * count_bg.size,
        )
        return ids_bgn, logp_bgn, count_bg

    # --- the grid ----------------------------------------------------------------------------------------------------
    def _reserve(self, need: int) -> None:
        """Moves the rows to a suffix bucket that holds `need` tokens, if the present one does not."""
        engine = self.engine
        if self._capacity >= need:
            return
        self._capacity = _pick(engine.suffix_buckets, need, f"a row of {need} tokens", "suffix_buckets")
        if self._rows is None:
            self._rows, self._hidden = engine._new_rows(self._prompt, self._grid[1], self._capacity)
        else:
            self._rows = engine._grow(self._rows, self._capacity)

    def _compact(self) -> None:
        """Packs the live rows into a smaller grid when that at least nearly halves the work.

        A group's rows may be spread over several slots (its prompt then stands in each), but never over more slots
        than the largest group bucket.
        """
        engine = self.engine
        groups: dict[int, list[Row]] = {}
        for row in sorted(self._place):
            groups.setdefault(row[0], []).append(row)
        best: tuple[int, int, int] | None = None  # cost, slots, rows per slot
        for width in {*engine.row_buckets, self._grid[1]}:
            slots = sum(-(-len(rows) // width) for rows in groups.values())
            size = next((size for size in engine.group_buckets if size >= slots), None)
            if size is not None and (best is None or size * width < best[0]):
                best = (size * width, size, width)
        if best is None or best[0] > 0.6 * self._grid[0] * self._grid[1]:
            return
        _, size, width = best
        old, old_width = self._place, self._grid[1]
        self._place, self._slot_group, self._grid = {}, [], (size, width)
        group_b = np.zeros(size, np.int32)
        slot_bg, row_bg = np.zeros((size, width), np.int32), np.zeros((size, width), np.int32)
        for b, rows in groups.items():
            for first in range(0, len(rows), width):
                slot = len(self._slot_group)
                self._slot_group.append(b)
                group_b[slot] = old[rows[first]][0]
                for g, row in enumerate(rows[first : first + width]):
                    self._place[row] = (slot, g)
                    slot_bg[slot, g], row_bg[slot, g] = old[row]
        self._slot_group += [-1] * (size - len(self._slot_group))
        if self._rows is None:  # nothing fed yet: only the prompts move
            self._rows, self._hidden = engine._new_rows(self._prompt, old_width, engine.suffix_buckets[0])
            self._capacity = engine.suffix_buckets[0]
        indices = (self._put(group_b), self._put(slot_bg), self._put(row_bg))
        self._prompt, self._rows, self._hidden = engine._repack(self._prompt, self._rows, self._hidden, *indices)

    def _by_slot(self, values: Sequence[int]) -> np.ndarray:
        """int32 [B] from a value per group; empty slots get 0."""
        return np.asarray([values[b] if b >= 0 else 0 for b in self._slot_group], np.int32)

    def _by_row(self, values: Mapping[Row, int], dtype: Any = np.int32) -> np.ndarray:
        """[B, G] from a value per row; places without a live row get 0."""
        out = np.zeros(self._grid, dtype)
        for row, place in self._place.items():
            out[place] = values[row]
        return out

    def _put(self, array: np.ndarray) -> jax.Array:
        """A [B, ...] host array on the device(s)."""
        sharding = self.engine.batch_sharding
        return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)


# --- host helpers ----------------------------------------------------------------------------------------------------
def _buckets(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(sizes)
    if not sizes or any(size < 1 for size in sizes) or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"engine.{name}={sizes} must be one or more ascending positive sizes")
    return sizes


def _pick(buckets: Sequence[int], size: int, what: str, name: str) -> int:
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise ValueError(f"{what}, but the largest of engine.{name}={tuple(buckets)} is {buckets[-1]}; add a larger bucket")


@functools.lru_cache(maxsize=4096)
def _chunk_plan(length: int, buckets: tuple[int, ...]) -> tuple[int, ...]:
    """Chunk sizes that cover `length` tokens with the least padding plus overhead, large ones first."""
    cost, choice = [0.0], [0]
    for n in range(1, length + 1):
        options = [(cost[max(0, n - size)] + size + _CHUNK_OVERHEAD, size) for size in buckets]
        best = min(options)
        cost.append(best[0])
        choice.append(best[1])
    plan = []
    while length > 0:
        plan.append(choice[length])
        length -= choice[length]
    return tuple(sorted(plan, reverse=True))


def _check_ids(ids: Sequence[int], config: PolicyConfig, what: str) -> None:
    """An id outside the vocabulary would silently read another row of the embedding."""
    low, high = min(ids), max(ids)
    if low < 0 or high >= config.vocab_size:
        bad = low if low < 0 else high
        raise ValueError(
            f"{what}: token id {bad} is outside the policy's {config.vocab_size} ids; does the tokenizer match?"
        )
