"""The run record: what a run writes down, shows while it runs, and draws afterwards.

Metric names (all flat, `/`-separated; rates in 0..1, times in seconds). Any other name may be recorded beside these;
the figures and the live display look for:

| name | meaning |
|---|---|
| `train/success`, `train/success/<category>` | share of the round's training rows with reward 1 |
| `train/success_bare`, `train/success_cued` | the same over the rows without and with cues |
| `refused/bare`, `refused/cued` | turns of those rows in which a tool refused a call |
| `refused/bare/repaired`, ... | in how many of these the same call was made again, and taken |
| `groups/informative` | share of groups whose rewards are not all equal |
| `train/truncated`, `train/parse_errors` | shares of rows that were cut and of messages that were rejected |
| `train/reasoning_kept` | per row, messages of finished turns whose reasoning Qwen3's own template would have dropped |
| `train/context_limit_bare`, `train/context_limit_cued` | share of the rows without and with cues that were full |
| `train/turns` | mean turns reached |
| `eval/<split>/success`, `eval/<split>/success/<category>` | strict evaluation with the bare interface |
| `eval/test_cued/success_bare` | success on its tasks as played for `test`, without cues |
| `eval/<split>/n` | tasks evaluated |
| `eval/<split>/context_limit` | share of its episodes that filled their row |
| `eval/<split>/label/<label>` | share of turns with the label in the evaluation |
| `profile/<label>` | share of the label in the reached turns of the rows without cues (if any; else of all rows) |
| `profile_ema/<label>` | the same, smoothed over rounds: what Evolve reads |
| `weight/gain` | sum of the weighted advantages' sizes over the unweighted: 1 = as plain GRPO |
| `advantage_mass/<label>` | share of that weighted sum on turns with the label |
| `loss/<name>` | policy, kl (where there is one), total |
| `clip/<name>`, `ratio/<name>` | shares of tokens clipped (high, low, dual); the policy ratio's mean and max |
| `time/<phase>` | seconds since the last round: prefill, extend, decode, environment, diagnosis, update, ... |
| `rollout/<kind>_tokens` | of the round: prompt (once per group), fed, sampled; processed: what the model computed |
| `rollout/steps` | passes of the decode loop |
| `rollout/padding_share` | share of the places of prefill and extend that held no token |
| `rollout/idle_share` | share of the decode loop's places whose row had ended its message, or never was |
| `rollout/sampled_per_s`, `rollout/processed_per_s` | tokens per second of rollout, its environments included |
| `rollout/time_share/<phase>` | share of those seconds in prefill, extend, decode, environment |
| `count/compilations`, `memory/peak_mib` | compiled programs so far, peak resident memory so far |

Of several processes, `time/*`, `rollout/*`, `count/*` and `memory/*` are those of process 0.

`<split>` names the split alone where its episodes were played by the "seal" protocol, and `<split>_official` by the
benchmark's own; `test_cued` is test with the cues of config.eval.cued shown. This package imports no jax; matplotlib,
rich and tensorboardX are imported where they are used.
"""

from seal_jax.telemetry.recorder import RunRecorder
from seal_jax.telemetry.timing import PhaseTimer, peak_rss_mib

__all__ = ["PhaseTimer", "RunRecorder", "peak_rss_mib"]
