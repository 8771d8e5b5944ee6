"""The run record: what a run writes down, shows while it runs, and draws afterwards.

Metric names (all flat, `/`-separated; rates in 0..1, times in seconds). Any other name may be recorded beside these;
the figures and the live display look for:

| name | meaning |
|---|---|
| `train/success`, `train/success/<category>` | share of the round's training rows with reward 1 |
| `train/success_bare`, `train/success_cued` | the same over the rows without and with cues |
| `train/informative_groups` | share of groups whose rewards are not all equal |
| `train/truncated`, `train/parse_errors` | shares of rows that were cut and of messages that were rejected |
| `train/turns` | mean turns reached |
| `eval/<split>/success`, `eval/<split>/success/<category>` | strict evaluation with the bare interface |
| `eval/<split>/n` | tasks evaluated |
| `eval/<split>/label/<label>` | share of turns with the label in the evaluation |
| `profile/<label>` | rate of the label among the round's turns (what Ψ counted) |
| `profile_ema/<label>` | the smoothed rate that Evolve reads |
| `weight/<label>` | mean w of the rows or turns with the label |
| `loss/<name>` | policy, kl, total, grad_norm, clip_fraction, dual_clip_fraction, ... |
| `time/<phase>` | seconds of the round in rollout, env, diagnosis, update, eval, checkpoint, ... (`PhaseTimer.lap`) |
| `count/compilations`, `memory/peak_mib` | compiled programs so far, peak resident memory so far |

This package imports no jax; matplotlib, rich and tensorboardX are imported where they are used.
"""

from seal_jax.telemetry.recorder import RunRecorder
from seal_jax.telemetry.timing import PhaseTimer, peak_rss_mib

__all__ = ["PhaseTimer", "RunRecorder", "peak_rss_mib"]
