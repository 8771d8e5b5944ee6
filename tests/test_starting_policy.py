"""The starting policy and its tokenizer agree on which ids exist, whatever the files say."""

import pytest

from configs import quickstart
from seal_jax.assembly import starting_policy
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
