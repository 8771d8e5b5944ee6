"""The starting policy and its tokenizer agree on which ids exist, whatever the files say."""

import jax
import numpy as np
import pytest

from configs import quickstart
from seal_jax import warm_start
from seal_jax.assembly import starting_policy, warm_start_metrics
from seal_jax.policy.hf import load_hf
from seal_jax.telemetry.timing import PhaseTimer


def start(tmp_path, **overrides):
    config = quickstart.get_config()
    config.policy.overrides = overrides
    return starting_policy(config, tmp_path, None, PhaseTimer())


def test_rows_without_a_token_can_never_be_sampled(tmp_path):
    real = start(tmp_path)
    n = real.tokenizer.vocab_size
    assert real.config.vocab_size == n <= real.config.padded_vocab
    padded = start(tmp_path, vocab_size=n + 5, padded_vocab=n + 64)
    assert (padded.config.vocab_size, padded.config.padded_vocab) == (n, n + 64)


def test_a_policy_with_fewer_ids_than_its_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the tokenizer has .* ids but the policy only 300") as error:
        start(tmp_path, vocab_size=300)
    assert "\n" not in str(error.value)


def test_a_clone_of_a_folder_goes_on_from_its_weights_and_is_kept(tmp_path, monkeypatch):
    """The training itself is a stand-in; what it is handed, and what becomes of it, is not."""
    config, seen = quickstart.get_config(), []
    config.warm_start.enabled, config.warm_start.demos, config.warm_start.per_skin = True, 4, 4
    config.suite_options = {"train": 2, "val": 0, "test": 0, "ood": 0, "kinds": ("ledger",)}

    def sft(policy, params, demos, settings, **_):
        seen.append((policy, params, demos))
        return jax.tree.map(lambda x: x * 2, params), {"nll": 0.5}

    monkeypatch.setattr(warm_start, "sft_train", sft)
    made = starting_policy(config, tmp_path / "run", None, PhaseTimer())
    (_, begun, demos), base = seen[0], load_hf(config.policy.path)[1]
    jax.tree.map(np.testing.assert_array_equal, begun, base)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b * 2), made.params, base)
    assert len(demos) == 4 and made.metrics == {"warm_start/nll": 0.5}
    plain, text = start(tmp_path / "plain"), "list the account of ann"
    assert made.tokenizer.encode(text) == plain.tokenizer.encode(text)
    assert made.config.vocab_size == plain.config.vocab_size
    assert not (tmp_path / "plain" / "start").exists()  # nothing was made, so nothing is kept

    # A resume loads what was kept, whatever has become of the folder, and trains nothing.
    config.policy.path = str(tmp_path / "gone")
    again = starting_policy(config, tmp_path / "run", None, PhaseTimer())
    jax.tree.map(np.testing.assert_array_equal, again.params, made.params)
    assert again.tokenizer.encode(text) == made.tokenizer.encode(text)
    assert again.metrics == made.metrics == warm_start_metrics(tmp_path / "run" / "start") and len(seen) == 1


def test_weights_of_a_folder_are_never_taken_from_the_workdir(tmp_path):
    (tmp_path / "start").mkdir()
    assert start(tmp_path).config.vocab_size > 0
