"""The engine against the full forward pass: what it samples, what it records, and what may not matter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seal_jax.policy.config import PolicyConfig
from seal_jax.policy.model import full_logits, init_params, token_logp
from seal_jax.policy.sharding import make_mesh, shard_params
from seal_jax.rollout.engine import RolloutEngine, _chunk_plan, sample_tokens

STOP = (1, 2)
# attention_budget is far below the scores at hand, so that queries are processed in several blocks
CONFIG = PolicyConfig.tiny(
    60, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, attention_budget=2**12, head_chunk=64
)
PARAMS = init_params(CONFIG, 0)
SAMPLE = jax.jit(sample_tokens)
TOKEN_LOGP = jax.jit(token_logp, static_argnums=0)


def make_engine(config: PolicyConfig = CONFIG, **options) -> RolloutEngine:
    settings = {
        "stop_ids": STOP,
        "prompt_buckets": (32,),
        "suffix_buckets": (48, 96),
        "chunk_buckets": (16,),
        "group_buckets": (1, 4),
        "max_new_tokens": 8,
    }
    return RolloutEngine(config, **{**settings, **options})


#: One shape of everything: the least to compile.
SMALL = {"suffix_buckets": (96,), "group_buckets": (4,)}


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return make_engine(row_buckets=(1, 4))


def ids(rng: np.random.Generator, low: int, high: int) -> list[int]:
    return rng.integers(0, CONFIG.vocab_size, int(rng.integers(low, high + 1))).tolist()


def play(engine, params, prompts, rollouts, turns, *, temperature=1.0, seed=0, keep=lambda turn, row: True, feed=None):
    """Plays `turns` acts with random observations of ragged lengths (a row's depend on the row alone).

    Returns {row: suffix ids}, {row: {position in suffix: recorded log-prob}} and the session.
    """
    session = engine.start(params, prompts, rollouts)
    rows = [(b, g) for b in range(len(prompts)) for g in range(rollouts)]
    suffix = {row: [] for row in rows}
    logps = {row: {} for row in rows}
    for turn in range(turns):
        rows = [row for row in rows if keep(turn, row)]
        new = {row: ids(np.random.default_rng((turn, *row)), 1, 21) for row in rows}
        out = session.act(new, temperature=temperature, keys={row: 1000 * seed + 10 * row[0] + row[1] for row in rows})
        assert set(out) == set(rows)
        for row, sampled in out.items():
            suffix[row] += new[row]
            for token, logp in zip(sampled.ids, sampled.logps, strict=True):
                logps[row][len(suffix[row])] = logp
                suffix[row].append(token)
            assert session.room(row) == min(
                engine.suffix_buckets[-1], CONFIG.max_position - len(prompts[row[0]])
            ) - len(suffix[row])
    return suffix, logps, session


def check_against_forward(prompts, suffix, logps, temperature=1.0):
    n_groups, n_rows = len(prompts), 1 + max(g for _, g in suffix)
    prompt_ids = np.full((n_groups, 32), -7, np.int32)
    suffix_ids = np.full((n_groups, n_rows, 96), 10**6, np.int32)
    for b, prompt in enumerate(prompts):
        prompt_ids[b, : len(prompt)] = prompt
    suffix_len = np.zeros((n_groups, n_rows), np.int32)
    for row, tokens in suffix.items():
        suffix_ids[row][: len(tokens)] = tokens
        suffix_len[row] = len(tokens)
    prompt_len = np.asarray([len(prompt) for prompt in prompts], np.int32)
    expected = TOKEN_LOGP(CONFIG, PARAMS, prompt_ids, prompt_len, suffix_ids, suffix_len, max(temperature, 1e-9) or 1.0)
    checked = 0
    for row, recorded in logps.items():
        for position, logp in recorded.items():
            assert logp <= 0.0
            assert logp == pytest.approx(float(expected[row][position]), abs=1e-4)
            checked += 1
    return checked


PROMPTS = [ids(np.random.default_rng(b), 3, 30) for b in range(3)]


def test_recorded_logps_equal_the_full_forward_on_ragged_turns(engine):
    suffix, logps, _ = play(engine, PARAMS, PROMPTS, 4, 3)
    assert check_against_forward(PROMPTS, suffix, logps) > 40
    assert len({len(tokens) for tokens in suffix.values()}) > 3  # the rows really are ragged


def test_temperature_is_inside_the_recorded_logp(engine):
    suffix, logps, _ = play(engine, PARAMS, PROMPTS, 4, 2, temperature=0.5)
    check_against_forward(PROMPTS, suffix, logps, temperature=0.5)


def test_scanned_and_unrolled_layers_agree(engine, monkeypatch):
    assert engine.unroll or jax.default_backend() != "cpu"
    one = play(engine, PARAMS, PROMPTS, 4, 2)[0]
    assert one == play(make_engine(unroll=False, **SMALL), PARAMS, PROMPTS, 4, 2)[0]
    monkeypatch.setattr("seal_jax.rollout.engine.SHALLOW", 1)  # a deep model: decode unrolled, extend scanned
    assert one == play(make_engine(unroll=True, **SMALL), PARAMS, PROMPTS, 4, 2)[0]


def test_a_message_longer_than_the_decode_loops_buffer_is_sampled_in_pieces(engine):
    whole, logps, _ = play(engine, PARAMS, PROMPTS, 4, 3)
    pieces, logps_of_pieces, _ = play(make_engine(decode_size=3, **SMALL), PARAMS, PROMPTS, 4, 3)
    assert pieces == whole
    for row, recorded in logps.items():
        np.testing.assert_allclose(list(logps_of_pieces[row].values()), list(recorded.values()), atol=1e-5)
    lengths = {len(recorded) for recorded in logps.values()}
    assert max(lengths) > 9 and min(lengths) < max(lengths)  # some messages take several pieces, some rows end early


def test_shared_prompt_equals_repeated_prompt(engine):
    """A group of three rows samples what three groups of one row sample."""
    shared = engine.start(PARAMS, [PROMPTS[0]], 4)
    repeated = engine.start(PARAMS, [PROMPTS[0]] * 4, 1)
    for turn in range(2):
        new = [ids(np.random.default_rng((turn, g)), 1, 9) for g in range(4)]
        a = shared.act({(0, g): new[g] for g in range(4)}, temperature=1.0, keys={(0, g): g for g in range(4)})
        b = repeated.act({(g, 0): new[g] for g in range(4)}, temperature=1.0, keys={(g, 0): g for g in range(4)})
        for g in range(4):
            assert a[0, g].ids == b[g, 0].ids
            np.testing.assert_allclose(a[0, g].logps, b[g, 0].logps, atol=1e-5)


def test_greedy_is_deterministic_and_records_temperature_one(engine):
    first = play(engine, PARAMS, PROMPTS, 4, 2, temperature=0.0, seed=1)
    second = play(engine, PARAMS, PROMPTS, 4, 2, temperature=0.0, seed=2)
    assert first[0] == second[0]
    suffix, logps, _ = first
    check_against_forward(PROMPTS, suffix, logps, temperature=1.0)
    row = (1, 0)
    text = np.asarray([PROMPTS[1] + suffix[row]], np.int32)
    best = np.argmax(full_logits(CONFIG, PARAMS, text, np.asarray([text.shape[1]], np.int32))[0], -1)
    for position in logps[row]:
        assert suffix[row][position] == best[len(PROMPTS[1]) + position - 1]


def test_short_and_long_prompt_together_and_alone(engine):
    short, long = list(range(3, 6)), list(range(10, 19))
    rows = [(0, 0), (1, 0)]
    both = engine.start(PARAMS, [short, long], 1).act(
        dict.fromkeys(rows, [5]), temperature=0.0, keys=dict.fromkeys(rows, 0)
    )
    for b, prompt in enumerate((short, long)):
        alone = engine.start(PARAMS, [prompt], 1).act({(0, 0): [5]}, temperature=0.0, keys={(0, 0): 0})[0, 0]
        assert alone.ids == both[b, 0].ids
        np.testing.assert_allclose(alone.logps, both[b, 0].logps, atol=1e-4)


def test_neighbours_and_compaction_change_nothing(engine):
    """Rows that stay to the end sample the same whoever leaves, while the grid is packed again and again."""
    everyone, _, _ = play(engine, PARAMS, PROMPTS + PROMPTS[:1], 4, 4)
    stays = {(0, 1), (2, 0), (2, 3)}
    leaves = {(0, 0): 1, (0, 2): 2, (0, 3): 2, (1, 0): 1, (1, 1): 1, (1, 2): 2, (1, 3): 3, (2, 1): 2, (2, 2): 3}
    fewer, logps, session = play(
        engine, PARAMS, PROMPTS + PROMPTS[:1], 4, 4, keep=lambda turn, row: row in stays or turn < leaves.get(row, 1)
    )
    assert set(session._place) == stays
    assert session._grid[0] * session._grid[1] <= 4  # 16 places at the start
    for row in stays:
        assert fewer[row] == everyone[row]
    check_against_forward(PROMPTS + PROMPTS[:1], fewer, logps)
    with pytest.raises(ValueError, match="row \\(0, 0\\) is finished"):
        session.act({(0, 0): [3]}, temperature=1.0, keys={(0, 0): 0})


def test_compaction_before_the_first_tokens(engine):
    whole = engine.start(PARAMS, PROMPTS, 4)
    part = engine.start(PARAMS, PROMPTS, 4)
    seeds = {(b, g): 7 * b + g for b in range(3) for g in range(4)}
    a = whole.act({row: [9, 8] for row in seeds}, temperature=1.0, keys=seeds)
    b = part.act({(2, 3): [9, 8]}, temperature=1.0, keys=seeds)
    assert b[2, 3].ids == a[2, 3].ids


def test_seeds(engine):
    session = engine.start(PARAMS, [PROMPTS[0]], 4)
    keys = {(0, g): g for g in range(4)}
    out = session.act({(0, g): [4] for g in range(4)}, temperature=1.0, keys=keys)
    assert len({sampled.ids[0] for sampled in out.values()}) > 1  # first tokens differ over the rows of a group
    again = engine.start(PARAMS, [PROMPTS[0]], 4).act({(0, g): [4] for g in range(4)}, temperature=1.0, keys=keys)
    assert again == out
    same = engine.start(PARAMS, [PROMPTS[0]], 4).act(
        {(0, g): [4] for g in range(4)}, temperature=1.0, keys={(0, g): 5 for g in range(4)}
    )
    assert len(set(same.values())) == 1


def test_every_stop_id_ends_a_message_and_limits_truncate(engine):
    ends = set()
    for seed in range(6):
        session = engine.start(PARAMS, PROMPTS, 4)
        rows = [(b, g) for b in range(3) for g in range(4)]
        keys = {row: 100 * seed + 10 * row[0] + row[1] for row in rows}
        out = session.act({row: [3] for row in rows}, temperature=3.0, keys=keys)
        for sampled in out.values():
            assert not set(sampled.ids[:-1]) & set(STOP)
            assert sampled.truncated == (sampled.ids[-1] not in STOP)
            assert sampled.truncated == (len(sampled.ids) == 8 and sampled.ids[-1] not in STOP)
            ends.add(sampled.ids[-1])
    assert set(STOP) <= ends


def test_room_and_overflow(engine):
    """The row is cut at its room, refuses what does not fit, and is usable up to the last place."""
    session = engine.start(PARAMS, [PROMPTS[0]], 1)
    row, keys = (0, 0), {(0, 0): 3}
    assert session.room(row) == 96
    with pytest.raises(ValueError, match="room for 96 tokens but was given 96"):
        session.act({row: [3] * 96}, temperature=1.0, keys=keys)
    suffix = ids(np.random.default_rng(0), 93, 93)
    out = session.act({row: suffix}, temperature=0.1, keys=keys)[row]
    assert len(out.ids) <= 3
    assert session.room(row) == 96 - 93 - len(out.ids)
    if len(out.ids) == 3:
        assert out.truncated
    logps = {93 + i: logp for i, logp in enumerate(out.logps)}
    check_against_forward(PROMPTS[:1], {row: suffix + list(out.ids)}, {row: logps}, temperature=0.1)


def test_max_position_bounds_the_room():
    config = dataclasses.replace(CONFIG, max_position=40)
    session = make_engine(config, **SMALL).start(PARAMS, [list(range(3, 33))], 1)
    assert session.room((0, 0)) == 10


def test_pad_id_that_is_a_stop_id_is_harmless(engine):
    """Prompts and suffixes that contain id 0 (what padding holds) and stop ids inside fed text."""
    prompts = [[0, 0, 1, 2, 0], [2, 2, 2]]
    zero_stops = make_engine(stop_ids=(0,), **SMALL)
    suffix, logps, _ = play(zero_stops, PARAMS, prompts, 2, 2)
    check_against_forward(prompts, suffix, logps)


def test_sampling_distribution_divides_before_the_softmax():
    logits = jnp.asarray([2.0, 0.0, -jnp.inf])
    for seed in range(20):
        token, logp = SAMPLE(logits, jnp.float32(0.5), jnp.uint32(seed), jnp.int32(7))
        assert int(token) in (0, 1)
        expected = -0.01815 if int(token) == 0 else -4.01815
        assert float(logp) == pytest.approx(expected, abs=1e-5)
    token, logp = SAMPLE(logits, jnp.float32(0.0), jnp.uint32(0), jnp.int32(7))
    assert int(token) == 0 and float(logp) == pytest.approx(-0.12693, abs=1e-5)


def test_samples_follow_the_distribution():
    logits = jnp.log(jnp.asarray([0.5, 0.3, 0.2]))
    seeds = jnp.arange(4000, dtype=jnp.uint32)
    tokens, _ = SAMPLE(jnp.tile(logits, (4000, 1)), jnp.float32(1.0), seeds, jnp.full(4000, 11, jnp.int32))
    np.testing.assert_allclose(np.bincount(tokens, minlength=3) / 4000, [0.5, 0.3, 0.2], atol=0.03)


def test_padded_vocabulary_is_never_sampled():
    """Id 63 is the head's favourite but lies beyond the tokenizer's 60 ids."""
    assert CONFIG.padded_vocab == 64
    config = dataclasses.replace(CONFIG, tied=False)
    head = 0.01 * jax.random.normal(jax.random.key(0), (CONFIG.d_model, 64))
    params = {**PARAMS, "head_dv": head.at[:, 60:].set(100.0 * jnp.sign(jnp.arange(32) - 10)[:, None])}
    engine = make_engine(config, **SMALL)
    for temperature in (0.0, 1.0, 5.0):
        session = engine.start(params, [[5, 6]], 4)
        out = session.act({(0, g): [7] for g in range(4)}, temperature=temperature, keys={(0, g): g for g in range(4)})
        for sampled in out.values():
            assert max(sampled.ids) < 60
            assert np.isfinite(sampled.logps).all()


def test_second_pass_compiles_nothing():
    """Other lengths, other groups, other params and another temperature reuse what the first pass compiled."""
    engine = make_engine(**SMALL)
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: events.append(name) if "backend_compile" in name else None
    )
    play(engine, PARAMS, PROMPTS, 4, 2)
    assert 0 < engine.compilations <= 6  # prefill, new rows, extend, decode, and writing what either made
    assert events  # the listener hears compilations
    before = engine.compilations
    other = init_params(CONFIG, 1)
    events.clear()
    play(engine, other, [[3] * 7, [4] * 31, [5], [6] * 16], 4, 3, temperature=0.7, seed=9)
    play(engine, PARAMS, PROMPTS[:2], 4, 2, temperature=0.0)
    assert engine.compilations == before
    assert not events


def test_many_lengths_and_batch_sizes_stay_within_the_buckets(engine):
    fresh = make_engine()
    rng = np.random.default_rng(0)
    for batch in range(12):
        play(fresh, PARAMS, [ids(rng, 5, 30) for _ in range(1 + batch % 4)], 1, 2)
    # 2 prefills (groups); new rows, extend, decode, 2 writes: 2 groups x 2 suffixes each; grow: 2
    assert fresh.compilations <= 2 + 5 * 4 + 2
    before = fresh.compilations
    for batch in range(12):
        play(fresh, PARAMS, [ids(rng, 5, 30) for _ in range(1 + batch % 4)], 1, 2)
    assert fresh.compilations == before


def test_the_decode_loop_copies_no_buffer(monkeypatch):
    """With unrolled layers, as on CPU."""
    engine, texts = make_engine(max_new_tokens=24), []
    decode = engine._decode

    def compiled(*args, **named):
        texts.append(decode.lower(*args, **named).compile().as_text())
        return decode(*args, **named)

    monkeypatch.setattr(engine, "_decode", compiled)
    engine.start(PARAMS, [[5, 6, 7]], 3).act({(0, 0): [4]}, temperature=1.0, keys={(0, 0): 1})
    lines = texts[0].splitlines()
    heads, width = CONFIG.n_kv_heads, CONFIG.head_dim
    for shape in (f"f32[1,{heads},3,{width},24]", f"f32[1,{heads},3,24,{width}]"):
        assert any(f"= {shape}" in line and "dynamic-update-slice" in line for line in lines)
        copies = [line for line in lines if f"= {shape}" in line and " copy(" in line]
        assert len(copies) <= CONFIG.n_layers, copies  # of the empty buffers, before the loop


def test_rows_cache_is_donated(engine):
    session = engine.start(PARAMS, PROMPTS, 2)
    tokens = {(b, g): [3] for b in range(3) for g in range(2)}
    session.act(tokens, temperature=1.0, keys=dict.fromkeys(tokens, 1))
    old = session._rows
    session.act(tokens, temperature=1.0, keys=dict.fromkeys(tokens, 1))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2), pytest.param((1, 2, 4), marks=pytest.mark.slow)])
def test_params_on_a_mesh(engine, shape):
    if jax.device_count() < np.prod(shape):
        pytest.skip("needs 8 (forced) devices")
    mesh = make_mesh(shape)
    meshed = make_engine(mesh=mesh, **SMALL)
    suffix, logps, _ = play(meshed, shard_params(CONFIG, PARAMS, mesh), PROMPTS, 4, 2)
    assert suffix == play(engine, PARAMS, PROMPTS, 4, 2)[0]
    check_against_forward(PROMPTS, suffix, logps)
    assert meshed.compilations <= 6  # one layout from the first call on


def test_bad_input_is_named(engine):
    with pytest.raises(ValueError, match="prompt 1 has 33 tokens, but the largest of engine.prompt_buckets"):
        engine.start(PARAMS, [[3], [3] * 33], 1)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        engine.start(PARAMS, [[]], 1)
    with pytest.raises(ValueError, match="5 prompts, but the largest of engine.group_buckets"):
        engine.start(PARAMS, [[3]] * 5, 1)
    with pytest.raises(ValueError, match="prompt 0: token id 60"):
        engine.start(PARAMS, [[60]], 1)
    with pytest.raises(ValueError, match="chunk_buckets"):
        make_engine(chunk_buckets=(16, 4))
    with pytest.raises(ValueError, match="stop_ids"):
        make_engine(stop_ids=())
    session = engine.start(PARAMS, [[3]], 1)
    with pytest.raises(ValueError, match="no tokens"):
        session.act({(0, 0): []}, temperature=1.0, keys={(0, 0): 0})
    with pytest.raises(ValueError, match="no seed"):
        session.act({(0, 0): [3]}, temperature=1.0, keys={})
    with pytest.raises(ValueError, match="row \\(1, 0\\) is not of this session"):
        session.act({(1, 0): [3]}, temperature=1.0, keys={(1, 0): 0})
    with pytest.raises(ValueError, match="temperature=-1"):
        session.act({(0, 0): [3]}, temperature=-1.0, keys={(0, 0): 0})


def test_chunk_plan():
    assert _chunk_plan(3, (4, 16)) == (4,)
    assert _chunk_plan(16, (4, 16)) == (16,)
    assert _chunk_plan(17, (4, 16)) == (16, 4)
    assert _chunk_plan(70, (16, 64, 256)) == (64, 16)
    for length in range(1, 60):
        assert sum(_chunk_plan(length, (4, 16))) >= length
